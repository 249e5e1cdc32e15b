/* vec in plain C: what vec.h promises, spelled out lane by lane. */
#ifndef CB_KERNELS_VEC_SCALAR_H
#define CB_KERNELS_VEC_SCALAR_H

#include "kernels/half.h"
#include "kernels/vec.h"

#ifndef VEC_LANES /* math.c takes single floats through the same templates */
#define VEC_LANES 16
#endif

#define VEC_ISA scalar
#define VEC_CHAINS 2
#define VEC_ATTENTION_ROWS 1
#define VEC_ATTENTION_WIDTH 1

typedef struct vec {
    float lane[VEC_LANES];
} vec;

typedef struct vec_mask {
    uint32_t lane[VEC_LANES]; /* 0 or 1 */
} vec_mask;

#define VEC_EACH for (uint32_t i = 0; i < VEC_LANES; i++)

VEC_INLINE vec vec_load(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

VEC_INLINE void vec_store(float *p, vec x) { memcpy(p, &x, sizeof x); }

VEC_INLINE vec vec_load_first(const float *p, uint32_t n) {
    vec x = {{0}};
    memcpy(&x, p, n * sizeof(float));
    return x;
}

VEC_INLINE void vec_store_first(float *p, vec x, uint32_t n) { memcpy(p, &x, n * sizeof(float)); }

VEC_INLINE vec vec_set(float value) {
    vec x;
    VEC_EACH x.lane[i] = value;
    return x;
}

VEC_INLINE vec vec_add(vec a, vec b) {
    VEC_EACH a.lane[i] += b.lane[i];
    return a;
}

VEC_INLINE vec vec_sub(vec a, vec b) {
    VEC_EACH a.lane[i] -= b.lane[i];
    return a;
}

VEC_INLINE vec vec_mul(vec a, vec b) {
    VEC_EACH a.lane[i] *= b.lane[i];
    return a;
}

VEC_INLINE vec vec_div(vec a, vec b) {
    VEC_EACH a.lane[i] /= b.lane[i];
    return a;
}

VEC_INLINE vec vec_fma(vec a, vec b, vec c) {
    VEC_EACH c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

VEC_INLINE vec vec_max(vec a, vec b) {
    VEC_EACH b.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

VEC_INLINE vec vec_min(vec a, vec b) {
    VEC_EACH b.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

VEC_INLINE vec vec_rint(vec x) {
    VEC_EACH x.lane[i] = __builtin_rintf(x.lane[i]);
    return x;
}

VEC_INLINE vec vec_power2(vec x) {
    /* The sum's low bits are x + 127, the biased exponent wanted. */
    VEC_EACH x.lane[i] = cb_float_of_bits(cb_bits_of_float(x.lane[i] + (0x1.8p23f + 127.0f)) << 23);
    return x;
}

VEC_INLINE vec_mask vec_less(vec a, vec b) {
    vec_mask m;
    VEC_EACH m.lane[i] = a.lane[i] < b.lane[i];
    return m;
}

VEC_INLINE vec vec_select(vec_mask m, vec a, vec b) {
    VEC_EACH b.lane[i] = m.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

VEC_INLINE vec vec_load_int8(const int8_t *p) {
    vec x;
    VEC_EACH x.lane[i] = (float)p[i];
    return x;
}

VEC_INLINE void vec_store_int8(int8_t *p, vec x) { VEC_EACH p[i] = (int8_t)__builtin_rintf(x.lane[i]); }

VEC_INLINE vec vec_load_f16(const uint16_t *p) {
    vec x;
    VEC_EACH x.lane[i] = cb_float_of_half(p[i]);
    return x;
}

VEC_INLINE void vec_store_f16(uint16_t *p, vec x) { VEC_EACH p[i] = cb_half_of_float(x.lane[i]); }

VEC_INLINE vec vec_load_bf16(const uint16_t *p) {
    vec x;
    VEC_EACH x.lane[i] = cb_float_of_bits((uint32_t)p[i] << 16);
    return x;
}

VEC_INLINE vec_mask vec_lanes(uint32_t first, uint32_t last) {
    vec_mask m;
    VEC_EACH m.lane[i] = i >= first && i < last;
    return m;
}

VEC_INLINE float vec_sum(vec x) {
    for (uint32_t half = VEC_LANES / 2; half > 0; half /= 2) {
        for (uint32_t i = 0; i < half; i++) {
            x.lane[i] += x.lane[i + half];
        }
    }
    return x.lane[0];
}

VEC_INLINE float vec_largest(vec x) {
    for (uint32_t half = VEC_LANES / 2; half > 0; half /= 2) {
        for (uint32_t i = 0; i < half; i++) {
            x.lane[i] = x.lane[i + half] > x.lane[i] ? x.lane[i + half] : x.lane[i];
        }
    }
    return x.lane[0];
}

VEC_INLINE vec vec_max_magnitude(vec m, vec x) {
    VEC_EACH {
        const uint32_t magnitude = cb_bits_of_float(x.lane[i]) & 0x7fffffffu;
        const uint32_t largest = cb_bits_of_float(m.lane[i]);
        m.lane[i] = cb_float_of_bits(magnitude > largest ? magnitude : largest);
    }
    return m;
}

VEC_INLINE uint32_t vec_largest_magnitude(vec m) {
    uint32_t largest = 0;
    VEC_EACH {
        const uint32_t bits = cb_bits_of_float(m.lane[i]);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

#undef VEC_EACH

#endif
