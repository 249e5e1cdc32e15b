/* Matmul with float weights in layout tiled16. Included after rows_tmpl.h.
 *
 * Every output is one chain of fma over k, so speed comes from many chains at once: VEC_CHAINS accumulators, taken
 * as tiles for few activation rows and as activation rows for many. */

VEC_INLINE vec load_weights(const uint8_t *p, const uint32_t format) {
    switch (format) {
    case CB_FORMAT_F32:
        return vec_load((const float *)(const void *)p);
    case CB_FORMAT_BF16:
        return vec_load_bf16((const uint16_t *)(const void *)p);
    default:
        return vec_load_f16((const uint16_t *)(const void *)p);
    }
}

/* `tiles` tiles from `tile` on, times `rows` activation rows from `row` on. */
VEC_INLINE void multiply_float(const cb_matmul *job, const uint32_t format, uint32_t tile, uint32_t row,
                               const uint32_t tiles, const uint32_t rows) {
    const uint64_t step = VEC_LANES * (format == CB_FORMAT_F32 ? 4 : 2);
    const uint8_t *weights[VEC_CHAINS];
    const float *x[VEC_CHAINS];
    vec sum[VEC_CHAINS][VEC_CHAINS];
    VEC_UNROLL
    for (uint32_t t = 0; t < tiles; t++)
        weights[t] = job->tiles + (uint64_t)(tile + t) * job->k * step;
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t source = job->index ? job->index[row + r] : row + r;
        x[r] = job->x->values + source * job->x->stride;
    }
    VEC_UNROLL
    for (uint32_t t = 0; t < tiles; t++) {
        VEC_UNROLL
        for (uint32_t r = 0; r < rows; r++)
            sum[t][r] = vec_set(0.0f);
    }
    for (uint64_t k = 0; k < job->k; k++) {
        VEC_UNROLL
        for (uint32_t t = 0; t < tiles; t++) {
            const vec w = load_weights(weights[t] + k * step, format);
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++)
                sum[t][r] = vec_fma(w, vec_set(x[r][k]), sum[t][r]);
        }
    }
    VEC_UNROLL
    for (uint32_t t = 0; t < tiles; t++) {
        const uint32_t first = (tile + t) * CB_LANES;
        VEC_UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            store_lanes(job->out + (row + r) * job->out_stride + first, sum[t][r], job->rows - first);
        }
    }
}

/* All activation rows, `rows` at a time, as far as they go; returns the first row left. */
VEC_INLINE uint32_t multiply_rows(const cb_matmul *job, const uint32_t format, uint32_t tile, uint32_t end,
                                  uint32_t row, const uint32_t rows) {
    const uint32_t tiles = VEC_CHAINS / rows;
    for (; row + rows <= job->count; row += rows) {
        uint32_t t = tile;
        for (; t + tiles <= end; t += tiles) {
            multiply_float(job, format, t, row, tiles, rows);
        }
        for (; t < end; t++) {
            multiply_float(job, format, t, row, 1, rows);
        }
    }
    return row;
}

/* VEC_CHAINS tiles stay in the cache while all activation rows pass. */
VEC_INLINE void matmul_float(const cb_matmul *job, const uint32_t format) {
    const uint32_t tiles = job->rows / CB_LANES + (job->rows % CB_LANES != 0);
    for (uint32_t tile = 0; tile < tiles; tile += VEC_CHAINS) {
        const uint32_t end = tiles - tile < VEC_CHAINS ? tiles : tile + VEC_CHAINS;
        uint32_t row = 0;
#if VEC_CHAINS >= 8
        row = multiply_rows(job, format, tile, end, row, 8);
#endif
#if VEC_CHAINS >= 4
        row = multiply_rows(job, format, tile, end, row, 4);
#endif
        row = multiply_rows(job, format, tile, end, row, 2);
        multiply_rows(job, format, tile, end, row, 1);
    }
}

void KERNEL(matmul_f32)(const cb_matmul *job) { matmul_float(job, CB_FORMAT_F32); }

void KERNEL(matmul_bf16)(const cb_matmul *job) { matmul_float(job, CB_FORMAT_BF16); }

void KERNEL(matmul_f16)(const cb_matmul *job) { matmul_float(job, CB_FORMAT_F16); }
