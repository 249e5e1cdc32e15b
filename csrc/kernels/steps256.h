/* Steps of tiled16x4 in 256-bit registers: what a matmul of the AVX2 kind builds its dot product from. */
#ifndef CB_KERNELS_STEPS256_H
#define CB_KERNELS_STEPS256_H

#include <immintrin.h>

#include "kernels/tile.h"
#include "kernels/vec.h"

#define STEPS (TILE_GROUP / 4)

VEC_INLINE __m256i broadcast(const void *p) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return _mm256_set1_epi32(value);
}

/* The codes of 8 output rows in a group, as they are stored. */
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

#endif
