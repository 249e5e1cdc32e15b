/* Quantised matmul for AVX-512 with VNNI.
 *
 * A step's 64 bytes are one register: vpdpbusd multiplies its 4 unsigned codes of each output row with 4 signed
 * activation codes broadcast to all rows, and adds into int32 without saturation. Codes are made unsigned: 4 bits
 * are 0..15 as stored, 8 bits are stored xor 0x80 (code + 128). What that adds, 8 or 128 times the sum of the
 * activation codes, is taken off first by one vpdpwssd: it multiplies a broadcast pair of int16 sums with
 * (-zero, 0) or (0, -zero), as the group is the first or second of the pair. |values| < 2^21 all along. */
#include <immintrin.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define STEPS (TILE_GROUP / 4)
#define MAX_ROWS 8
#define MAX_TILES 4
#define PREFETCH_BYTES 2048 /* ahead of use: the hardware's own streams stop at the ends of pages */

VEC_INLINE __m512i broadcast(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm512_set1_epi32(value);
}

/* Step s of a group, its codes unsigned. */
VEC_INLINE __m512i load_step(const uint8_t *p, uint32_t s, const uint32_t bits) {
    const __m512i nibble = _mm512_set1_epi8(15);
    if (bits == 8) {
        return _mm512_xor_si512(_mm512_loadu_si512(p + s * 64), _mm512_set1_epi8((char)0x80));
    }
    const __m512i pair = _mm512_loadu_si512(p + s / 2 * 64);
    return _mm512_and_si512(s % 2 ? _mm512_srli_epi16(pair, 4) : pair, nibble);
}

/* Tiles that are taken side by side, block by block: `count` of them, from tile `first` on, `step` apart. */
typedef struct tile_set {
    uint32_t first, count, step;
} tile_set;

/* Tiles times `rows` activation rows from row i on. */
VEC_INLINE void multiply(const cb_matmul *job, const tile_set *tiles, uint32_t i, const uint32_t rows,
                         const uint32_t bits) {
    const uint64_t blocks = blocks_of(job);
    const uint64_t tile_bytes = blocks * TILE_BLOCK_BYTES(bits);
    const int32_t zero = bits == 8 ? 128 : 8;
    const uint8_t *block = job->tiles + tiles->first * tile_bytes;
    quantised_row x[MAX_ROWS];
    __m512 sum[MAX_TILES][MAX_ROWS];
    for (uint32_t r = 0; r < rows; r++) {
        x[r] = row_of(job, i + r);
        for (uint32_t tile = 0; tile < tiles->count; tile++) {
            sum[tile][r] = _mm512_setzero_ps();
        }
    }
    for (uint64_t b = 0; b < blocks; b++, block += TILE_BLOCK_BYTES(bits)) {
        for (uint32_t tile = 0; tile < tiles->count; tile++) {
            const uint8_t *weights = block + tile * tiles->step * tile_bytes;
            __m512 t[MAX_ROWS];
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++)
                t[r] = _mm512_setzero_ps();
            if (rows < MAX_ROWS) {
                for (uint32_t line = 0; line < TILE_BLOCK_BYTES(bits); line += 64) {
                    _mm_prefetch((const char *)((uintptr_t)weights + PREFETCH_BYTES + line), _MM_HINT_T0);
                }
            }
            for (uint32_t g = 0; g < TILE_GROUPS; g++) {
                const uint64_t at = b * TILE_GROUPS + g;
                const __m512i correction = _mm512_set1_epi32(g % 2 ? -zero * 65536 : 65536 - zero);
                const void *scales = weights + TILE_CODE_BYTES(bits) + g * CB_LANES * 2;
                const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
                const uint8_t *codes = weights + g * (TILE_CODE_BYTES(bits) / TILE_GROUPS);
                __m512i dot[MAX_ROWS];
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++) {
                    const __m512i pair = broadcast(x[r].sums + (at - g % 2));
                    dot[r] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), correction, pair);
                }
                VEC_UNROLL
                for (uint32_t s = 0; s < STEPS; s++) {
                    const __m512i step = load_step(codes, s, bits);
                    VEC_UNROLL
                    for (uint32_t r = 0; r < rows; r++) {
                        dot[r] = _mm512_dpbusd_epi32(dot[r], step, broadcast(x[r].codes + at * TILE_GROUP + 4 * s));
                    }
                }
                VEC_UNROLL
                for (uint32_t r = 0; r < rows; r++) {
                    t[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), scale, t[r]);
                }
            }
            VEC_UNROLL
            for (uint32_t r = 0; r < rows; r++) {
                sum[tile][r] = _mm512_fmadd_ps(t[r], _mm512_set1_ps(x[r].scales[b]), sum[tile][r]);
            }
        }
    }
    for (uint32_t tile = 0; tile < tiles->count; tile++) {
        const uint32_t row = (tiles->first + tile * tiles->step) * CB_LANES;
        const uint32_t lanes = job->rows - row;
        const __mmask16 stored = lanes < CB_LANES ? (__mmask16)((1u << lanes) - 1) : (__mmask16)0xffff;
        for (uint32_t r = 0; r < rows; r++) {
            _mm512_mask_storeu_ps(job->out + (i + r) * job->out_stride + row, stored, sum[tile][r]);
        }
    }
}

VEC_INLINE void multiply_all(const cb_matmul *job, const tile_set *tiles, const uint32_t bits) {
    uint32_t i = 0;
    for (; i + 8 <= job->count; i += 8) {
        multiply(job, tiles, i, 8, bits);
    }
    for (; i + 4 <= job->count; i += 4) {
        multiply(job, tiles, i, 4, bits);
    }
    for (; i + 2 <= job->count; i += 2) {
        multiply(job, tiles, i, 2, bits);
    }
    for (; i < job->count; i++) {
        multiply(job, tiles, i, 1, bits);
    }
}

/* A few tiles go through all activation rows before the next, so that they come from memory once. Reading them side by
 * side makes several streams, which memory serves faster than one, and faster the longer they are: each goes through a
 * part of the matrix from end to end. */
VEC_INLINE void matmul(const cb_matmul *job, const uint32_t bits) {
    const uint32_t all_tiles = job->rows / CB_LANES + (job->rows % CB_LANES != 0);
    const uint32_t each = all_tiles / MAX_TILES;
    for (uint32_t tile = 0; tile < each; tile++) {
        const tile_set tiles = {tile, MAX_TILES, each};
        multiply_all(job, &tiles, bits);
    }
    const tile_set rest = {each * MAX_TILES, all_tiles % MAX_TILES, 1};
    if (rest.count > 0) {
        multiply_all(job, &rest, bits);
    }
}

void kernel_matmul_q8_g32_avx512(const cb_matmul *job) { matmul(job, 8); }

void kernel_matmul_q4_g32_avx512(const cb_matmul *job) { matmul(job, 4); }
