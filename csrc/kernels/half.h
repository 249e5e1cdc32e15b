/* float16 <-> float32 in bit arithmetic: exact, to nearest even, denormals kept, whatever the CPU has. */
#ifndef CB_KERNELS_HALF_H
#define CB_KERNELS_HALF_H

#include <stdint.h>
#include <string.h>

static inline float cb_float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t cb_bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float cb_float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude < 0x0400u) { /* zero or denormal: magnitude * 2^-24 is exact */
        return cb_float_of_bits(cb_bits_of_float((float)magnitude * 0x1p-24f) | sign);
    }
    if (magnitude >= 0x7c00u) { /* infinity; NaN becomes quiet, as the F16C instruction does */
        return cb_float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 |
                                (magnitude > 0x7c00u ? 0x400000u : 0));
    }
    return cb_float_of_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

static inline uint16_t cb_half_of_float(float x) {
    const uint32_t bits = cb_bits_of_float(x);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    }
    if (magnitude >= 0x477ff000u) { /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: the sum's last bit is worth 2^-24, so the addition rounds */
        const float sum = cb_float_of_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (cb_bits_of_float(sum) - 0x3f000000u));
    }
    /* 13 bits go; adding 0xfff and the last bit kept rounds to nearest even, a carry goes into the exponent. */
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | ((rounded - ((127u - 15u) << 23)) >> 13));
}

static inline uint16_t cb_load_u16(const void *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

#endif
