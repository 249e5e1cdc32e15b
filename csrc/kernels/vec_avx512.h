/* vec in one AVX-512 register (F, BW, VL, DQ). See vec.h for what each function promises. */
#ifndef CB_KERNELS_VEC_AVX512_H
#define CB_KERNELS_VEC_AVX512_H

#include <immintrin.h>

#include "kernels/vec.h"

#define VEC_LANES 16
#define VEC_ISA avx512
#define VEC_CHAINS 16 /* latency 4 x 2 fma a cycle needs 8; 16 load each weight for two rows of tiles */
#define VEC_ATTENTION_ROWS 8
#define VEC_ATTENTION_WIDTH 2
#define VEC_ATTENTION_PAIR_WIDTH 4

typedef __m512 vec;
typedef __mmask16 vec_mask;

VEC_INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }

VEC_INLINE void vec_store(float *p, vec x) { _mm512_storeu_ps(p, x); }

VEC_INLINE vec_mask vec_lanes(uint32_t first, uint32_t last) {
    return (vec_mask)(((1u << last) - 1u) & ~((1u << first) - 1u));
}

VEC_INLINE vec vec_load_first(const float *p, uint32_t n) { return _mm512_maskz_loadu_ps(vec_lanes(0, n), p); }

VEC_INLINE void vec_store_first(float *p, vec x, uint32_t n) { _mm512_mask_storeu_ps(p, vec_lanes(0, n), x); }

VEC_INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }

VEC_INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }

VEC_INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }

VEC_INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }

VEC_INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }

VEC_INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }

VEC_INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }

VEC_INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }

VEC_INLINE vec vec_rint(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

VEC_INLINE vec vec_power2(vec x) {
    /* The sum's low bits are x + 127, the biased exponent wanted. */
    const __m512 sum = _mm512_add_ps(x, _mm512_set1_ps(0x1.8p23f + 127.0f));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(sum), 23));
}

VEC_INLINE vec_mask vec_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }

VEC_INLINE vec vec_select(vec_mask m, vec a, vec b) { return _mm512_mask_blend_ps(m, b, a); }

VEC_INLINE float vec_sum(vec x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

VEC_INLINE float vec_largest(vec x) {
    const __m256 eight = _mm256_max_ps(_mm512_extractf32x8_ps(x, 1), _mm512_castps512_ps256(x));
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}

VEC_INLINE vec vec_max_magnitude(vec m, vec x) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(m), magnitude));
}

VEC_INLINE uint32_t vec_largest_magnitude(vec m) { return _mm512_reduce_max_epu32(_mm512_castps_si512(m)); }

VEC_INLINE vec vec_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}

VEC_INLINE void vec_store_f16(uint16_t *p, vec x) {
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

VEC_INLINE vec vec_load_bf16(const uint16_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

VEC_INLINE vec vec_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}

VEC_INLINE void vec_store_int8(int8_t *p, vec x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

#endif
