/* Quantised matmul for AVX2.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds pairs with int16 saturation, which must never happen:
 * - 4 bits: weights are the codes 0..15, a pair is at most 2 * 15 * 127 = 3810, the 8 steps of a group 30480 < 32767,
 *   so a whole group is added in int16. The zero-point 8 is subtracted through the sum of the activation codes.
 * - 8 bits: |weight| (at most 128, as an unsigned byte) times the activation with the weight's sign: a pair is at
 *   most 2 * 128 * 127 = 32512 < 32767, and is widened before it is added. Adding 128 to make weights unsigned,
 *   as is usual elsewhere, would saturate. */
#define VEC_ISA avx2
#include "kernels/steps256.h"

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

#include "kernels/matmul_q256_tmpl.h"
