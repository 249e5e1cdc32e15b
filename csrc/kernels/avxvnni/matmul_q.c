/* Quantised matmul for AVX-VNNI: AVX2 with vpdpbusd, on CPUs without AVX-512.
 *
 * vpdpbusd multiplies 4 unsigned codes of each output row with 4 signed activation codes and adds into int32 without
 * saturation. Codes are made unsigned: 4 bits are 0..15 as stored, 8 bits are stored xor 0x80 (code + 128). What
 * that adds, 8 or 128 times the sum of the activation codes, is taken off first. |values| < 2^21 all along. */
#define VEC_ISA avxvnni
#include "kernels/steps256.h"

/* Exact dot products of 8 output rows with 32 activation codes. */
VEC_INLINE __m256i dot_group(const __m256i steps[STEPS], const int8_t *codes, int16_t sum, const uint32_t bits) {
    const __m256i sign = _mm256_set1_epi8(bits == 8 ? (char)0x80 : 0);
    __m256i dot = _mm256_set1_epi32((bits == 8 ? -128 : -8) * sum);
    VEC_UNROLL
    for (uint32_t s = 0; s < STEPS; s++) {
        dot = _mm256_dpbusd_avx_epi32(dot, _mm256_xor_si256(steps[s], sign), broadcast(codes + 4 * s));
    }
    return dot;
}

#include "kernels/matmul_q256_tmpl.h"
