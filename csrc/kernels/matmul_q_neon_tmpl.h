/* Quantised matmul for aarch64, compiled for neon (dotprod) and for i8mm. Included with VEC_ISA defined.
 *
 * A step's 64 bytes are four registers of 4 output rows x 4 k. sdot adds to each int32 lane the products of 4 signed
 * codes with 4 activation codes, a chosen quarter of a register that holds 16 k; nothing saturates. smmla multiplies
 * 2 rows x 8 k by 2 rows x 8 k, twice the work: two steps zipped give 2 output rows x 8 k, and two activation rows
 * lie side by side, so it serves activation rows in pairs.
 *
 * 4-bit codes stay 0 .. 15; the zero-point 8 is taken off at the start of a group's sum, which begins with -8 times
 * the sum of the activation codes. Partial sums stay below 32 * 15 * 127 + 8 * 4064 < 2^17, with 8 bits below
 * 32 * 128 * 127 < 2^20. */
#include <arm_neon.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define STEPS (TILE_GROUP / 4)
#define MAX_ROWS 4
#define MAX_TILES 4
#define QUARTERS 2 /* registers of 4 output rows handled together: half a tile, so that all stays in registers */

/* Codes of one group for 4 output rows. */
VEC_INLINE void load_steps(int8x16_t steps[STEPS], const uint8_t *p, const uint32_t bits) {
    if (bits == 8) {
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s++) {
            steps[s] = vreinterpretq_s8_u8(vld1q_u8(p + s * 64));
        }
    } else {
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s += 2) {
            const uint8x16_t pair = vld1q_u8(p + s * 32);
            steps[s] = vreinterpretq_s8_u8(vandq_u8(pair, vdupq_n_u8(15)));
            steps[s + 1] = vreinterpretq_s8_u8(vshrq_n_u8(pair, 4));
        }
    }
}

/* dot[r]: exact dot products of 4 output rows with group `at` of activation row r. */
VEC_INLINE void dot_rows(int32x4_t dot[MAX_ROWS], const int8x16_t steps[STEPS], const quantised_row *x, uint64_t at,
                         const uint32_t rows, const uint32_t bits) {
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r++) {
        const int8x16_t low = vld1q_s8(x[r].codes + at * TILE_GROUP);
        const int8x16_t high = vld1q_s8(x[r].codes + at * TILE_GROUP + 16);
        int32x4_t sum = vdupq_n_s32(bits == 8 ? 0 : -8 * x[r].sums[at]);
        sum = vdotq_laneq_s32(sum, steps[0], low, 0);
        sum = vdotq_laneq_s32(sum, steps[1], low, 1);
        sum = vdotq_laneq_s32(sum, steps[2], low, 2);
        sum = vdotq_laneq_s32(sum, steps[3], low, 3);
        sum = vdotq_laneq_s32(sum, steps[4], high, 0);
        sum = vdotq_laneq_s32(sum, steps[5], high, 1);
        sum = vdotq_laneq_s32(sum, steps[6], high, 2);
        dot[r] = vdotq_laneq_s32(sum, steps[7], high, 3);
    }
}

#ifdef __ARM_FEATURE_MATMUL_INT8

VEC_INLINE int8x16_t zip(int8x16_t a, int8x16_t b, const bool high) {
    const int32x4_t x = vreinterpretq_s32_s8(a), y = vreinterpretq_s32_s8(b);
    return vreinterpretq_s8_s32(high ? vzip2q_s32(x, y) : vzip1q_s32(x, y));
}

/* The same for an even number of activation rows. */
VEC_INLINE void dot_pairs(int32x4_t dot[MAX_ROWS], const int8x16_t steps[STEPS], const quantised_row *x, uint64_t at,
                          const uint32_t rows, const uint32_t bits) {
    VEC_UNROLL
    for (uint32_t r = 0; r < rows; r += 2) {
        const int8_t *codes[2] = {x[r].codes + at * TILE_GROUP, x[r + 1].codes + at * TILE_GROUP};
        /* Row r with output rows 0 and 1, then row r + 1; likewise with output rows 2 and 3. */
        int32x4_t first = vcombine_s32(vdup_n_s32(bits == 8 ? 0 : -8 * x[r].sums[at]),
                                       vdup_n_s32(bits == 8 ? 0 : -8 * x[r + 1].sums[at]));
        int32x4_t second = first;
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s += 2) {
            const int8x16_t pair = vcombine_s8(vld1_s8(codes[0] + s * 4), vld1_s8(codes[1] + s * 4));
            first = vmmlaq_s32(first, pair, zip(steps[s], steps[s + 1], false));
            second = vmmlaq_s32(second, pair, zip(steps[s], steps[s + 1], true));
        }
        dot[r] = vcombine_s32(vget_low_s32(first), vget_low_s32(second));
        dot[r + 1] = vcombine_s32(vget_high_s32(first), vget_high_s32(second));
    }
}

#endif

VEC_INLINE void dot_group(int32x4_t dot[MAX_ROWS], const int8x16_t steps[STEPS], const quantised_row *x, uint64_t at,
                          const uint32_t rows, const uint32_t bits) {
#ifdef __ARM_FEATURE_MATMUL_INT8
    if (rows % 2 == 0) {
        dot_pairs(dot, steps, x, at, rows, bits);
        return;
    }
#endif
    dot_rows(dot, steps, x, at, rows, bits);
}

/* Adds block b of one tile: half of its output rows go through all activation rows in hand, then the other half. */
VEC_INLINE void multiply_block(float32x4_t sum[MAX_ROWS][4], const uint8_t *weights, const quantised_row *x, uint64_t b,
                               const uint32_t rows, const uint32_t bits) {
    for (uint32_t half = 0; half < 4; half += QUARTERS) {
        float32x4_t t[QUARTERS][MAX_ROWS];
        VEC_UNROLL
        for (uint32_t q = 0; q < QUARTERS; q++) {
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++)
                t[q][r] = vdupq_n_f32(0.0f);
        }
        for (uint32_t g = 0; g < TILE_GROUPS; g++) {
            const uint8_t *codes = weights + g * (TILE_CODE_BYTES(bits) / TILE_GROUPS) + half * 16;
            const uint8_t *scales = weights + TILE_CODE_BYTES(bits) + (g * CB_LANES + half * 4) * 2;
            VEC_UNROLL
            for (uint32_t q = 0; q < QUARTERS; q++) {
                const float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(scales + q * 8)));
                int8x16_t steps[STEPS];
                int32x4_t dot[MAX_ROWS];
                load_steps(steps, codes + q * 16, bits);
                dot_group(dot, steps, x, b * TILE_GROUPS + g, rows, bits);
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++)
                    t[q][r] = vfmaq_f32(t[q][r], vcvtq_f32_s32(dot[r]), scale);
            }
        }
        VEC_UNROLL
        for (uint32_t q = 0; q < QUARTERS; q++) {
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++)
                sum[r][half + q] = vfmaq_n_f32(sum[r][half + q], t[q][r], x[r].scales[b]);
        }
    }
}

/* `tiles` tiles from output row `first` on, block by block side by side, times `rows` activation rows from row i on. */
VEC_INLINE void multiply(const cb_matmul *job, uint32_t first, uint32_t tiles, uint32_t i, const uint32_t rows,
                         const uint32_t bits) {
    const uint64_t blocks = blocks_of(job);
    const uint64_t tile_bytes = blocks * TILE_BLOCK_BYTES(bits);
    const uint8_t *block = job->tiles + first / CB_LANES * tile_bytes;
    quantised_row x[MAX_ROWS];
    float32x4_t sum[MAX_TILES][MAX_ROWS][4];
    for (uint32_t r = 0; r < rows; r++) {
        x[r] = row_of(job, i + r);
        for (uint32_t tile = 0; tile < tiles; tile++) {
            for (uint32_t quarter = 0; quarter < 4; quarter++)
                sum[tile][r][quarter] = vdupq_n_f32(0.0f);
        }
    }
    for (uint64_t b = 0; b < blocks; b++, block += TILE_BLOCK_BYTES(bits)) {
        for (uint32_t tile = 0; tile < tiles; tile++) {
            multiply_block(sum[tile], block + tile * tile_bytes, x, b, rows, bits);
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

/* A few tiles go through all activation rows before the next, so that they come from memory once. */
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
