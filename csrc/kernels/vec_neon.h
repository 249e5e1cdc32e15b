/* vec in four NEON registers. See vec.h for what each function promises.
 *
 * fmax and fmin of this ISA treat NaN and -0 otherwise than the contract, so a comparison chooses. */
#ifndef CB_KERNELS_VEC_NEON_H
#define CB_KERNELS_VEC_NEON_H

#include <arm_neon.h>

#include "kernels/vec.h"

#define VEC_LANES 16
#define VEC_ISA neon
#define VEC_CHAINS 4 /* of four registers each: 16 accumulators, latency 4 x 4 fma a cycle on the widest cores */
#define VEC_ATTENTION_ROWS 4
#define VEC_ATTENTION_WIDTH 1
#define VEC_ATTENTION_PAIR_WIDTH 2

typedef struct vec {
    float32x4_t a, b, c, d;
} vec;

typedef struct vec_mask { /* all bits of a lane or none */
    uint32x4_t a, b, c, d;
} vec_mask;

#define VEC_EACH(type, f, x) ((type){f((x).a), f((x).b), f((x).c), f((x).d)})
#define VEC_EACH_PAIR(type, f, x, y) ((type){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)})

VEC_INLINE vec vec_load(const float *p) {
    return (vec){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}

VEC_INLINE void vec_store(float *p, vec x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

VEC_INLINE vec vec_load_first(const float *p, uint32_t n) {
    float lanes[VEC_LANES] = {0};
    memcpy(lanes, p, n * sizeof(float));
    return vec_load(lanes);
}

VEC_INLINE void vec_store_first(float *p, vec x, uint32_t n) {
    float lanes[VEC_LANES];
    vec_store(lanes, x);
    memcpy(p, lanes, n * sizeof(float));
}

VEC_INLINE vec vec_set(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return (vec){all, all, all, all};
}

VEC_INLINE vec vec_add(vec x, vec y) { return VEC_EACH_PAIR(vec, vaddq_f32, x, y); }

VEC_INLINE vec vec_sub(vec x, vec y) { return VEC_EACH_PAIR(vec, vsubq_f32, x, y); }

VEC_INLINE vec vec_mul(vec x, vec y) { return VEC_EACH_PAIR(vec, vmulq_f32, x, y); }

VEC_INLINE vec vec_div(vec x, vec y) { return VEC_EACH_PAIR(vec, vdivq_f32, x, y); }

VEC_INLINE vec vec_fma(vec x, vec y, vec z) {
    return (vec){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                 vfmaq_f32(z.d, x.d, y.d)};
}

VEC_INLINE float32x4_t vec_max_quarter(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }

VEC_INLINE float32x4_t vec_min_quarter(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }

VEC_INLINE vec vec_max(vec x, vec y) { return VEC_EACH_PAIR(vec, vec_max_quarter, x, y); }

VEC_INLINE vec vec_min(vec x, vec y) { return VEC_EACH_PAIR(vec, vec_min_quarter, x, y); }

VEC_INLINE vec vec_rint(vec x) { return VEC_EACH(vec, vrndnq_f32, x); }

VEC_INLINE float32x4_t vec_power2_quarter(float32x4_t x) {
    /* The sum's low bits are x + 127, the biased exponent wanted. */
    const float32x4_t sum = vaddq_f32(x, vdupq_n_f32(0x1.8p23f + 127.0f));
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(sum), 23));
}

VEC_INLINE vec vec_power2(vec x) { return VEC_EACH(vec, vec_power2_quarter, x); }

VEC_INLINE vec_mask vec_less(vec x, vec y) { return VEC_EACH_PAIR(vec_mask, vcltq_f32, x, y); }

VEC_INLINE uint32x4_t vec_lanes_quarter(uint32_t first, uint32_t last, uint32_t from) {
    static const uint32_t places[4] = {0, 1, 2, 3};
    const uint32x4_t lane = vaddq_u32(vld1q_u32(places), vdupq_n_u32(from));
    return vandq_u32(vcgeq_u32(lane, vdupq_n_u32(first)), vcltq_u32(lane, vdupq_n_u32(last)));
}

VEC_INLINE vec_mask vec_lanes(uint32_t first, uint32_t last) {
    return (vec_mask){vec_lanes_quarter(first, last, 0), vec_lanes_quarter(first, last, 4),
                      vec_lanes_quarter(first, last, 8), vec_lanes_quarter(first, last, 12)};
}

VEC_INLINE vec vec_select(vec_mask m, vec x, vec y) {
    return (vec){vbslq_f32(m.a, x.a, y.a), vbslq_f32(m.b, x.b, y.b), vbslq_f32(m.c, x.c, y.c),
                 vbslq_f32(m.d, x.d, y.d)};
}

VEC_INLINE float vec_sum(vec x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

VEC_INLINE float vec_largest(vec x) {
    const float32x4_t four = vec_max_quarter(vec_max_quarter(x.d, x.b), vec_max_quarter(x.c, x.a));
    const float32x2_t high = vget_high_f32(four), low = vget_low_f32(four);
    const float32x2_t two = vbsl_f32(vcgt_f32(high, low), high, low);
    const float first = vget_lane_f32(two, 0), second = vget_lane_f32(two, 1);
    return second > first ? second : first;
}

VEC_INLINE float32x4_t vec_max_magnitude_quarter(float32x4_t m, float32x4_t x) {
    const uint32x4_t magnitude = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff));
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(m), magnitude));
}

VEC_INLINE vec vec_max_magnitude(vec m, vec x) { return VEC_EACH_PAIR(vec, vec_max_magnitude_quarter, m, x); }

VEC_INLINE uint32_t vec_largest_magnitude(vec m) {
    const uint32x4_t ab = vmaxq_u32(vreinterpretq_u32_f32(m.a), vreinterpretq_u32_f32(m.b));
    const uint32x4_t cd = vmaxq_u32(vreinterpretq_u32_f32(m.c), vreinterpretq_u32_f32(m.d));
    return vmaxvq_u32(vmaxq_u32(ab, cd));
}

/* Conversions between float16 and float32 belong to every aarch64; f16 arithmetic does not, and is not used. */
VEC_INLINE float32x4_t vec_widen_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

VEC_INLINE vec vec_load_f16(const uint16_t *p) {
    return (vec){vec_widen_f16(p), vec_widen_f16(p + 4), vec_widen_f16(p + 8), vec_widen_f16(p + 12)};
}

VEC_INLINE void vec_store_f16(uint16_t *p, vec x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.a)));
    vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
    vst1_u16(p + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.c)));
    vst1_u16(p + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.d)));
}

VEC_INLINE float32x4_t vec_widen_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

VEC_INLINE vec vec_load_bf16(const uint16_t *p) {
    return (vec){vec_widen_bf16(p), vec_widen_bf16(p + 4), vec_widen_bf16(p + 8), vec_widen_bf16(p + 12)};
}

VEC_INLINE vec vec_load_int8(const int8_t *p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}

VEC_INLINE void vec_store_int8(int8_t *p, vec x) {
    const int16x8_t low = vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(x.a)), vcvtnq_s32_f32(x.b));
    const int16x8_t high = vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(x.c)), vcvtnq_s32_f32(x.d));
    vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
}

#undef VEC_EACH
#undef VEC_EACH_PAIR

#endif
