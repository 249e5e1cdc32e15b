/* Attention over one block of keys, and merging. Included after rows_tmpl.h. */

#define KEY_VECTORS (CB_KEY_BLOCK / VEC_LANES)

/* ---- elements of a state block ---- */

VEC_INLINE uint64_t element_size(uint32_t format) {
    return format == COLIBRI_STATE_F32 ? 4 : format == COLIBRI_STATE_F16 ? 2 : 1;
}

/* VEC_LANES elements from element `index` on, not yet scaled. */
VEC_INLINE vec load_elements(uint32_t format, const void *block, uint64_t index) {
    switch (format) {
    case COLIBRI_STATE_F32:
        return vec_load((const float *)block + index);
    case COLIBRI_STATE_F16:
        return vec_load_f16((const uint16_t *)block + index);
    default:
        return vec_load_int8((const int8_t *)block + index);
    }
}

/* Likewise `lanes` of them; nothing behind them is read: a block ends with its last value. */
VEC_INLINE vec load_element_lanes(uint32_t format, const void *block, uint64_t index, uint32_t lanes) {
    if (lanes == VEC_LANES) {
        return load_elements(format, block, index);
    }
    if (format == COLIBRI_STATE_F32) {
        return vec_load_first((const float *)block + index, lanes);
    }
    float rest[VEC_LANES] = {0};
    memcpy(rest, (const uint8_t *)block + index * element_size(format), lanes * element_size(format));
    return load_elements(format, rest, 0);
}

/* ---- a block ---- */

/* Query rows of a block that see at least one key, handled together. */
typedef struct row_group {
    uint32_t row[VEC_ATTENTION_ROWS];
    float alpha[VEC_ATTENTION_ROWS];
    float p[VEC_ATTENTION_ROWS][CB_KEY_BLOCK]; /* scores, then exp(score - m) */
} row_group;

/* Few query rows read the state as fast as memory gives it: row `row` of `rows` of what comes next is asked for. */
VEC_INLINE void fetch_row(const void *block, uint32_t row, uint32_t rows, uint64_t row_bytes) {
    if (block == NULL || row >= rows) {
        return;
    }
    const char *p = (const char *)block + row * row_bytes;
    for (uint64_t i = 0; i < row_bytes; i += CB_CACHE_LINE) {
        __builtin_prefetch(p + i);
    }
}

/* Scores of all 64 keys; those that a row must not see may come from memory never written and are dropped later. */
VEC_INLINE void score_keys(const cb_attention_block *job, row_group *group, const uint32_t rows, const uint32_t width,
                           const uint32_t format) {
    const float *q[VEC_ATTENTION_ROWS];
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++)
        q[r] = job->q + group->row[r] * job->q_stride;
    for (uint32_t first = 0; first < KEY_VECTORS; first += width) {
        vec sum[VEC_ATTENTION_ROWS][KEY_VECTORS];
        VEC_UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            VEC_UNROLL
            for (uint32_t w = 0; w < width; w++)
                sum[r][w] = vec_set(0.0f);
        }
        vec scale[KEY_VECTORS];
        VEC_UNROLL
        for (uint32_t w = 0; w < width; w++)
            scale[w] = format == COLIBRI_STATE_Q8 ? vec_load(job->key_scales + (first + w) * VEC_LANES) : vec_set(1.0f);
        uint64_t at = first * VEC_LANES;
        for (uint32_t d = 0; d < job->key_dim; d++, at += CB_KEY_BLOCK) {
            if (rows <= 2)
                fetch_row(job->v, d, CB_KEY_BLOCK, job->value_dim * element_size(format));
            VEC_UNROLL
            for (uint32_t w = 0; w < width; w++) {
                const vec stored = load_elements(format, job->k, at + w * VEC_LANES);
                const vec key = format == COLIBRI_STATE_Q8 ? vec_mul(stored, scale[w]) : stored;
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++) {
                    sum[r][w] = vec_fma(key, vec_set(q[r][d]), sum[r][w]);
                }
            }
        }
        VEC_UNROLL
        for (uint32_t r = 0; r < rows; r++) {
            VEC_UNROLL
            for (uint32_t w = 0; w < width; w++) {
                vec_store(&group->p[r][(first + w) * VEC_LANES], vec_mul(vec_set(job->scale), sum[r][w]));
            }
        }
    }
}

/* Online softmax of one row: scores become p, m and l move on, alpha is what the old sums are worth now. A score of
 * -infinity would pass as a weight of 0 and NaN be ignored where the largest is sought, so l tells of them. */
static void update_row(const cb_attention_block *job, row_group *group, uint32_t r) {
    const uint32_t row = group->row[r];
    const uint32_t first = job->first[row];
    const uint32_t last = job->last[row];
    float *p = group->p[r];
    vec_mask seen[KEY_VECTORS];
    vec largest = vec_set(-__builtin_inff()), magnitude = vec_set(0.0f);
    for (uint32_t v = 0; v < KEY_VECTORS; v++) {
        const uint32_t from = v * VEC_LANES;
        const uint32_t begin = first < from ? 0 : lanes_of(first - from);
        const uint32_t end = last < from ? 0 : lanes_of(last - from);
        seen[v] = vec_lanes(begin, end);
        const vec score = vec_load(p + from);
        largest = vec_max(vec_select(seen[v], score, vec_set(-__builtin_inff())), largest);
        magnitude = vec_max_magnitude(magnitude, vec_select(seen[v], score, vec_set(0.0f)));
    }
    const float m = job->m[row];
    const float block = vec_largest(largest);
    const float m_new = block > m ? block : m;
    vec sum = vec_set(0.0f);
    for (uint32_t v = 0; v < KEY_VECTORS; v++) {
        const vec value = vec_exp(vec_sub(vec_load(p + v * VEC_LANES), vec_set(m_new)));
        vec_store(p + v * VEC_LANES, value);
        sum = vec_add(sum, vec_select(seen[v], value, vec_set(0.0f)));
    }
    float alpha[VEC_LANES];
    vec_store(alpha, vec_exp(vec_set(m - m_new)));
    group->alpha[r] = alpha[0];
    job->m[row] = m_new;
    const float l = __builtin_fmaf(job->l[row], alpha[0], vec_sum(sum));
    job->l[row] = finite_magnitude(magnitude) ? l : __builtin_nanf("");
}

VEC_INLINE vec load_value(const cb_attention_block *job, const uint32_t format, uint64_t key, uint32_t dim,
                          uint32_t lanes) {
    const vec value = load_element_lanes(format, job->v, key * job->value_dim + dim, lanes);
    return format == COLIBRI_STATE_Q8 ? vec_mul(value, vec_set(job->value_scales[key])) : value;
}

/* out = out * alpha, then out = fma(p, v, out) for each key that the row sees, for `width` vectors of dimensions (or
 * one of `lanes` lanes). Keys that all rows see are read once for all; adding 0 * v for the others instead would
 * turn -0 into +0 and touch values never written. */
VEC_INLINE void add_values(const cb_attention_block *job, const row_group *group, const uint32_t rows,
                           const uint32_t width, const uint32_t format, uint32_t dim, uint32_t lanes) {
    uint32_t common_first = 0, common_last = CB_KEY_BLOCK;
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t first = job->first[group->row[r]];
        const uint32_t last = job->last[group->row[r]];
        common_first = first > common_first ? first : common_first;
        common_last = last < common_last ? last : common_last;
    }
    common_last = common_last < common_first ? common_first : common_last;

    vec out[VEC_ATTENTION_ROWS][KEY_VECTORS];
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t row = group->row[r];
        const float *old = job->out + row * job->out_stride + dim;
        const uint32_t end = job->last[row] < common_first ? job->last[row] : common_first;
        VEC_UNROLL
        for (uint32_t w = 0; w < width; w++) {
            out[r][w] = vec_mul(load_lanes(old + w * VEC_LANES, lanes), vec_set(group->alpha[r]));
        }
        for (uint32_t key = job->first[row]; key < end; key++) {
            VEC_UNROLL
            for (uint32_t w = 0; w < width; w++) {
                const vec value = load_value(job, format, key, dim + w * VEC_LANES, lanes);
                out[r][w] = vec_fma(vec_set(group->p[r][key]), value, out[r][w]);
            }
        }
    }
    for (uint32_t key = common_first; key < common_last; key++) {
        if (rows <= 2 && dim == 0)
            fetch_row(job->next_k, key, job->key_dim, CB_KEY_BLOCK * element_size(format));
        VEC_UNROLL
        for (uint32_t w = 0; w < width; w++) {
            const vec value = load_value(job, format, key, dim + w * VEC_LANES, lanes);
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                out[r][w] = vec_fma(vec_set(group->p[r][key]), value, out[r][w]);
            }
        }
    }
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const uint32_t row = group->row[r];
        float *new = job->out + row * job->out_stride + dim;
        const uint32_t begin = job->first[row] > common_last ? job->first[row] : common_last;
        for (uint32_t key = begin; key < job->last[row]; key++) {
            VEC_UNROLL
            for (uint32_t w = 0; w < width; w++) {
                const vec value = load_value(job, format, key, dim + w * VEC_LANES, lanes);
                out[r][w] = vec_fma(vec_set(group->p[r][key]), value, out[r][w]);
            }
        }
        VEC_UNROLL
        for (uint32_t w = 0; w < width; w++)
            store_lanes(new + w *VEC_LANES, out[r][w], lanes);
    }
}

VEC_INLINE void attend_group(const cb_attention_block *job, row_group *group, const uint32_t rows, const uint32_t width,
                             const uint32_t format) {
    score_keys(job, group, rows, width, format);
    for (uint32_t r = 0; r < rows; r++) {
        update_row(job, group, r);
    }
    uint32_t dim = 0;
    for (; dim + width * VEC_LANES <= job->value_dim; dim += width * VEC_LANES) {
        add_values(job, group, rows, width, format, dim, VEC_LANES);
    }
    for (; dim < job->value_dim; dim += VEC_LANES) {
        add_values(job, group, rows, 1, format, dim, lanes_of(job->value_dim - dim));
    }
}

/* Rows [0, rows) of a group, as a group of their own. */
VEC_INLINE void attend_part(const cb_attention_block *job, const uint32_t *row, const uint32_t rows,
                            const uint32_t width, const uint32_t format) {
    row_group part;
    memcpy(part.row, row, rows * sizeof *row);
    attend_group(job, &part, rows, width, format);
}

/* Many rows share what is loaded; the fewer they are, the wider, so that enough sums are under way. */
VEC_INLINE void attend_rows(const cb_attention_block *job, const uint32_t format) {
    uint32_t row[VEC_ATTENTION_ROWS], rows = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        if (job->first[i] >= job->last[i]) {
            continue;
        }
        row[rows++] = i;
        if (rows == VEC_ATTENTION_ROWS) {
            attend_part(job, row, VEC_ATTENTION_ROWS, VEC_ATTENTION_WIDTH, format);
            rows = 0;
        }
    }
    uint32_t done = 0;
#if VEC_ATTENTION_ROWS > 4
    if (rows - done >= 4) {
        attend_part(job, row + done, 4, VEC_ATTENTION_PAIR_WIDTH, format);
        done += 4;
    }
#endif
#if VEC_ATTENTION_ROWS > 2
    if (rows - done >= 2) {
        attend_part(job, row + done, 2, VEC_ATTENTION_PAIR_WIDTH, format);
        done += 2;
    }
#endif
    for (; done < rows; done++) {
        attend_part(job, row + done, 1, KEY_VECTORS, format);
    }
}

void KERNEL(attention_block)(const cb_attention_block *job) {
    switch (job->format) {
    case COLIBRI_STATE_F16:
        attend_rows(job, COLIBRI_STATE_F16);
        break;
    case COLIBRI_STATE_Q8:
        attend_rows(job, COLIBRI_STATE_Q8);
        break;
    default:
        attend_rows(job, COLIBRI_STATE_F32);
    }
}

void KERNEL(attention_merge)(float *m, float *l, float *out, float m2, float l2, const float *out2,
                             uint32_t value_dim) {
    /* l is 0 only where no key was seen (a seen key with the largest score adds exp(0) = 1). Those cases keep the
     * other side's bits: the sums below would turn -0 into +0, and m - m_new would be -inf - -inf. */
    if (l2 == 0.0f) {
        return;
    }
    if (*l == 0.0f) {
        *m = m2;
        *l = l2;
        memcpy(out, out2, value_dim * sizeof(float));
        return;
    }
    const float m_new = m2 > *m ? m2 : *m;
    const vec a = vec_exp(vec_set(*m - m_new));
    const vec b = vec_exp(vec_set(m2 - m_new));
    float factors[2 * VEC_LANES];
    vec_store(factors, a);
    vec_store(factors + VEC_LANES, b);
    *m = m_new;
    *l = __builtin_fmaf(*l, factors[0], l2 * factors[VEC_LANES]);
    for (uint32_t i = 0; i < value_dim; i += VEC_LANES) {
        const vec added = vec_mul(load_lanes(out2 + i, value_dim - i), b);
        store_lanes(out + i, vec_fma(load_lanes(out + i, value_dim - i), a, added), value_dim - i);
    }
}

bool KERNEL(attention_finish)(float *y, const float *out, float l, uint32_t value_dim) {
    const vec inverse = vec_set(1.0f / l);
    vec m = vec_set(0.0f);
    for (uint32_t i = 0; i < value_dim; i += VEC_LANES) {
        const vec part = vec_mul(load_lanes(out + i, value_dim - i), inverse);
        m = vec_max_magnitude(m, part);
        store_lanes(y + i, part, value_dim - i);
    }
    return finite_magnitude(m);
}
