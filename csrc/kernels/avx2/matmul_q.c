/* Quantised matmul for AVX2.
 *
 * A step's 64 bytes are two registers of 8 output rows; each half of a block goes through all activation rows in
 * hand before the other, so that its 8 unpacked steps of a group stay in registers.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds pairs with int16 saturation, which must never happen:
 * - 4 bits: weights are the codes 0..15, a pair is at most 2 * 15 * 127 = 3810, the 8 steps of a group 30480 < 32767,
 *   so a whole group is added in int16. The zero-point 8 is subtracted through the sum of the activation codes.
 * - 8 bits: |weight| (at most 128, as an unsigned byte) times the activation with the weight's sign: a pair is at
 *   most 2 * 128 * 127 = 32512 < 32767, and is widened before it is added. Adding 128 to make weights unsigned,
 *   as is usual elsewhere, would saturate. */
#include <immintrin.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define STEPS (TILE_GROUP / 4)
#define MAX_ROWS 4
#define MAX_TILES 4
#define PREFETCH_BYTES 2048 /* ahead of use: the hardware's own streams stop at the ends of pages */

VEC_INLINE __m256i broadcast(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
}

VEC_INLINE void load_steps(__m256i steps[STEPS], const uint8_t *p, const uint32_t bits) {
    const __m256i nibble = _mm256_set1_epi8(15);
    if (bits == 8) {
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s++) {
            steps[s] = _mm256_loadu_si256((const __m256i *)(const void *)(p + s * 64));
        }
    } else {
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s += 2) {
            const __m256i pair = _mm256_loadu_si256((const __m256i *)(const void *)(p + s * 32));
            steps[s] = _mm256_and_si256(pair, nibble);
            steps[s + 1] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), nibble);
        }
    }
}

/* Exact dot products of 8 output rows with 32 activation codes. */
VEC_INLINE __m256i dot_group(const __m256i steps[STEPS], const int8_t *codes, int16_t sum, const uint32_t bits) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (bits == 8) {
        __m256i dot = _mm256_setzero_si256();
        VEC_UNROLL
        for (uint32_t s = 0; s < STEPS; s++) {
            const __m256i x = _mm256_sign_epi8(broadcast(codes + 4 * s), steps[s]);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(steps[s]), x);
            dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, ones));
        }
        return dot;
    }
    __m256i pairs = _mm256_maddubs_epi16(steps[0], broadcast(codes));
    VEC_UNROLL
    for (uint32_t s = 1; s < STEPS; s++) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(steps[s], broadcast(codes + 4 * s)));
    }
    return _mm256_sub_epi32(_mm256_madd_epi16(pairs, ones), _mm256_set1_epi32(8 * sum));
}

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

void kernel_matmul_q8_g32_avx2(const cb_matmul *job) { matmul(job, 8); }

void kernel_matmul_q4_g32_avx2(const cb_matmul *job) { matmul(job, 4); }
