/* vec in two AVX2 registers (with FMA and F16C). See vec.h for what each function promises. */
#ifndef CB_KERNELS_VEC_AVX2_H
#define CB_KERNELS_VEC_AVX2_H

#include <immintrin.h>

#include "kernels/vec.h"

#define VEC_LANES 16
#define VEC_ISA avx2
#define VEC_CHAINS 4 /* of two registers each: 8 accumulators, latency 4 x 2 fma a cycle */
#define VEC_ATTENTION_ROWS 4
#define VEC_ATTENTION_WIDTH 1
#define VEC_ATTENTION_PAIR_WIDTH 2

typedef struct vec {
    __m256 low, high;
} vec;

typedef vec vec_mask; /* all bits of a lane or none */

VEC_INLINE vec vec_load(const float *p) { return (vec){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }

VEC_INLINE void vec_store(float *p, vec x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}

VEC_INLINE vec_mask vec_lanes_below(uint32_t n) {
    static const int32_t ones_then_zeros[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const float *p = (const float *)(const void *)(ones_then_zeros + 16 - n);
    return vec_load(p);
}

VEC_INLINE vec vec_load_first(const float *p, uint32_t n) {
    const vec_mask m = vec_lanes_below(n);
    return (vec){_mm256_maskload_ps(p, _mm256_castps_si256(m.low)),
                 _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.high))};
}

VEC_INLINE void vec_store_first(float *p, vec x, uint32_t n) {
    const vec_mask m = vec_lanes_below(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.low), x.low);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.high), x.high);
}

VEC_INLINE vec vec_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

VEC_INLINE vec vec_add(vec a, vec b) { return (vec){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }

VEC_INLINE vec vec_sub(vec a, vec b) { return (vec){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }

VEC_INLINE vec vec_mul(vec a, vec b) { return (vec){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }

VEC_INLINE vec vec_div(vec a, vec b) { return (vec){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

VEC_INLINE vec vec_fma(vec a, vec b, vec c) {
    return (vec){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

VEC_INLINE vec vec_max(vec a, vec b) { return (vec){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

VEC_INLINE vec vec_min(vec a, vec b) { return (vec){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

VEC_INLINE vec vec_rint(vec x) {
    return (vec){_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

VEC_INLINE __m256 vec_shift_to_exponent(__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 23));
}

VEC_INLINE vec vec_power2(vec x) {
    /* The sum's low bits are x + 127, the biased exponent wanted. */
    x = vec_add(x, vec_set(0x1.8p23f + 127.0f));
    return (vec){vec_shift_to_exponent(x.low), vec_shift_to_exponent(x.high)};
}

VEC_INLINE vec_mask vec_less(vec a, vec b) {
    return (vec_mask){_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
}

VEC_INLINE vec_mask vec_lanes(uint32_t first, uint32_t last) {
    const vec_mask below = vec_lanes_below(first);
    const vec_mask wanted = vec_lanes_below(last);
    return (vec_mask){_mm256_andnot_ps(below.low, wanted.low), _mm256_andnot_ps(below.high, wanted.high)};
}

VEC_INLINE vec vec_select(vec_mask m, vec a, vec b) {
    return (vec){_mm256_blendv_ps(b.low, a.low, m.low), _mm256_blendv_ps(b.high, a.high, m.high)};
}

VEC_INLINE float vec_sum(vec x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

VEC_INLINE float vec_largest(vec x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(two), two));
}

VEC_INLINE __m256 vec_max_magnitude_half(__m256 m, __m256 x) {
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(m), magnitude));
}

VEC_INLINE vec vec_max_magnitude(vec m, vec x) {
    return (vec){vec_max_magnitude_half(m.low, x.low), vec_max_magnitude_half(m.high, x.high)};
}

VEC_INLINE uint32_t vec_largest_magnitude(vec m) {
    const __m256i eight = _mm256_max_epu32(_mm256_castps_si256(m.low), _mm256_castps_si256(m.high));
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1)));
}

VEC_INLINE vec vec_load_f16(const uint16_t *p) {
    return (vec){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

VEC_INLINE void vec_store_f16(uint16_t *p, vec x) {
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}

VEC_INLINE __m256 vec_widen_bf16(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

VEC_INLINE vec vec_load_bf16(const uint16_t *p) {
    return (vec){vec_widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)p)),
                 vec_widen_bf16(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}

VEC_INLINE vec vec_load_int8(const int8_t *p) {
    const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (vec){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}

VEC_INLINE void vec_store_int8(int8_t *p, vec x) {
    /* packs works within 128-bit halves; the permutation puts the quarters in order again. */
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)p,
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#endif
