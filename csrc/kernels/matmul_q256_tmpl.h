/* Quantised matmul in 256-bit registers. Included after steps256.h and after the ISA's own
 *
 *   __m256i dot_group(const __m256i steps[STEPS], const int8_t *codes, int16_t sum, uint32_t bits)
 *
 * A step's 64 bytes are two registers of 8 output rows; each half of a block goes through all activation rows in
 * hand before the other, so that its 8 unpacked steps of a group stay in registers. */
#define MAX_ROWS 4
#define MAX_TILES 4
#define PREFETCH_BYTES 2048 /* ahead of use: the hardware's own streams stop at the ends of pages */

/* `tiles` tiles from output row `first` on, block by block side by side, times `rows` activation rows from row i on. */
VEC_INLINE void multiply(const cb_matmul *job, uint32_t first, uint32_t tiles, uint32_t i, const uint32_t rows,
                         const uint32_t bits) {
    const uint64_t blocks = blocks_of(job);
    const uint64_t tile_bytes = blocks * TILE_BLOCK_BYTES(bits);
    const uint8_t *block = job->tiles + first / CB_LANES * tile_bytes;
    quantised_row x[MAX_ROWS];
    __m256 sum[MAX_TILES][MAX_ROWS][2];
    for (uint32_t r = 0; r < rows; r++) {
        x[r] = row_of(job, i + r);
        for (uint32_t tile = 0; tile < tiles; tile++) {
            sum[tile][r][0] = sum[tile][r][1] = _mm256_setzero_ps();
        }
    }
    for (uint64_t b = 0; b < blocks; b++, block += TILE_BLOCK_BYTES(bits)) {
        for (uint32_t tile = 0; tile < tiles; tile++) {
            const uint8_t *weights = block + tile * tile_bytes;
            for (uint32_t line = 0; line < TILE_BLOCK_BYTES(bits); line += 64) {
                _mm_prefetch((const char *)((uintptr_t)weights + PREFETCH_BYTES + line), _MM_HINT_T0);
            }
            for (uint32_t half = 0; half < 2; half++) {
                __m256 t[MAX_ROWS];
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++)
                    t[r] = _mm256_setzero_ps();
                for (uint32_t g = 0; g < TILE_GROUPS; g++) {
                    const uint64_t at = b * TILE_GROUPS + g;
                    const void *scales = weights + TILE_CODE_BYTES(bits) + (g * CB_LANES + half * 8) * 2;
                    const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
                    __m256i steps[STEPS];
                    load_steps(steps, weights + g * (TILE_CODE_BYTES(bits) / TILE_GROUPS) + half * 32, bits);
                    VEC_UNROLL
                    for (uint32_t r = 0; r < rows; r++) {
                        const __m256i dot = dot_group(steps, x[r].codes + at * TILE_GROUP, x[r].sums[at], bits);
                        t[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, t[r]);
                    }
                }
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++) {
                    sum[tile][r][half] = _mm256_fmadd_ps(t[r], _mm256_set1_ps(x[r].scales[b]), sum[tile][r][half]);
                }
            }
        }
    }
    for (uint32_t tile = 0; tile < tiles; tile++) {
        const uint32_t row = first + tile * CB_LANES;
        const uint32_t lanes = job->rows - row < CB_LANES ? job->rows - row : CB_LANES;
        for (uint32_t r = 0; r < rows; r++) {
            memcpy(job->out + (i + r) * job->out_stride + row, sum[tile][r], lanes * sizeof(float));
        }
    }
}

/* A few tiles go through all activation rows before the next, so that they come from memory once; reading them side
 * by side makes several streams, which memory serves faster than one. */
VEC_INLINE void matmul(const cb_matmul *job, const uint32_t bits) {
    const uint32_t all_tiles = job->rows / CB_LANES + (job->rows % CB_LANES != 0);
    for (uint32_t tile = 0; tile < all_tiles; tile += MAX_TILES) {
        const uint32_t tiles = all_tiles - tile < MAX_TILES ? all_tiles - tile : MAX_TILES;
        const uint32_t first = tile * CB_LANES;
        uint32_t i = 0;
        for (; i + 4 <= job->count; i += 4) {
            multiply(job, first, tiles, i, 4, bits);
        }
        for (; i + 2 <= job->count; i += 2) {
            multiply(job, first, tiles, i, 2, bits);
        }
        for (; i < job->count; i++) {
            multiply(job, first, tiles, i, 1, bits);
        }
    }
}

void KERNEL(matmul_q8_g32)(const cb_matmul *job) { matmul(job, 8); }

void KERNEL(matmul_q4_g32)(const cb_matmul *job) { matmul(job, 4); }
