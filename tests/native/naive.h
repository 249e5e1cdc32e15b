/* The numeric contract written down the obvious way, one number after the other, with nothing shared with the
 * kernels but cb_exp (tested against libm by itself). Every kernel must give exactly these bits. */
#ifndef NAIVE_H
#define NAIVE_H

#include <math.h>

#include "kernels/kernels.h"

/* A quantised matrix before packing: code[n * cols + k], scale[n * groups + k / 32] as float16 bits. */
typedef struct naive_matrix {
    uint32_t rows, cols, format;
    int16_t *codes;   /* quantised formats: 0..15 or -128..127 */
    uint16_t *scales; /* quantised formats */
    float *values;    /* float formats, already rounded to the format */
    uint16_t *halves; /* bf16, f16: the bits of the values */
} naive_matrix;

static inline uint32_t naive_groups(uint32_t cols) { return (cols + 31) / 32; }

static inline float naive_half(uint16_t half) {
    const int exponent = half >> 10 & 31;
    const double sign = half & 0x8000 ? -1.0 : 1.0;
    const int fraction = half & 1023;
    if (exponent == 31) {
        return fraction ? NAN : (float)(sign * INFINITY);
    }
    return (float)(sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24)));
}

/* Nearest float16 of x, ties to even; NAN where it does not fit. */
static inline float naive_round_half(float x) {
    if (!isfinite(x) || x == 0.0f) {
        return isfinite(x) ? x : NAN;
    }
    const int exponent = ilogbf(x) < -14 ? -14 : ilogbf(x);
    const float rounded = (float)ldexp(rint(ldexp((double)x, 10 - exponent)), exponent - 10);
    return fabsf(rounded) > 65504.0f ? NAN : copysignf(rounded, x);
}

static inline float naive_sum(const float *x, uint32_t n) {
    float partial[16] = {0};
    for (uint32_t i = 0; i < n; i++) {
        partial[i % 16] += x[i];
    }
    for (uint32_t width = 8; width > 0; width /= 2) {
        for (uint32_t i = 0; i < width; i++) {
            partial[i] = partial[i] + partial[i + width];
        }
    }
    return partial[0];
}

static inline float naive_sigmoid(float x) { return 1.0f / (1.0f + cb_exp(-x)); }

static inline bool naive_quantise(const float *x, uint32_t k, int8_t *codes, float *scales, int16_t *sums) {
    const uint32_t padded = (k + 127) / 128 * 128;
    bool finite = true;
    for (uint32_t block = 0; block < padded / 128; block++) {
        const uint32_t end = (block + 1) * 128 < k ? (block + 1) * 128 : k;
        float largest = 0.0f;
        bool good = true;
        for (uint32_t i = block * 128; i < end; i++) {
            good = good && isfinite(x[i]);
            largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        }
        const bool zero = !good || largest < 0x1p-100f;
        scales[block] = zero ? 0.0f : largest / 127.0f;
        for (uint32_t i = block * 128; i < (block + 1) * 128; i++) {
            const float inverse = 127.0f / largest;
            codes[i] = zero || i >= end ? 0 : (int8_t)rintf(x[i] * inverse);
        }
        finite = finite && good;
    }
    for (uint32_t i = 0; i < padded / 32; i++) {
        sums[i] = 0;
        for (uint32_t j = 0; j < 32; j++) {
            sums[i] = (int16_t)(sums[i] + codes[32 * i + j]);
        }
    }
    return finite;
}

static inline float naive_dot(const naive_matrix *w, uint32_t n, const cb_rows *x, uint32_t row) {
    float sum = 0.0f;
    if (w->values) {
        for (uint32_t k = 0; k < w->cols; k++) {
            sum = fmaf(w->values[(size_t)n * w->cols + k], x->values[row * x->stride + k], sum);
        }
        return sum;
    }
    const uint32_t blocks = (w->cols + 127) / 128;
    const int zero = w->format == CB_FORMAT_Q4_G32 ? 8 : 0;
    for (uint32_t block = 0; block < blocks; block++) {
        float t = 0.0f;
        for (uint32_t group = block * 4; group < block * 4 + 4 && group < naive_groups(w->cols); group++) {
            int64_t d = 0;
            for (uint32_t k = group * 32; k < group * 32 + 32 && k < w->cols; k++) {
                d += (w->codes[(size_t)n * w->cols + k] - zero) * x->codes[(size_t)row * blocks * 128 + k];
            }
            t = fmaf((float)d, naive_half(w->scales[n * naive_groups(w->cols) + group]), t);
        }
        sum = fmaf(t, x->scales[row * blocks + block], sum);
    }
    return sum;
}

static inline void naive_rope(float *y, const float *x, const float *table, uint32_t heads, uint32_t head_dim,
                              uint32_t rotary_dim, bool interleaved) {
    const uint32_t n = rotary_dim / 2;
    memcpy(y, x, (size_t)heads * head_dim * sizeof(float));
    for (uint32_t head = 0; head < heads; head++) {
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t a = head * head_dim + (interleaved ? 2 * i : i);
            const uint32_t b = head * head_dim + (interleaved ? 2 * i + 1 : i + n);
            const volatile float a_cos = x[a] * table[i], b_sin = x[b] * table[n + i];
            const volatile float b_cos = x[b] * table[i], a_sin = x[a] * table[n + i];
            y[a] = a_cos - b_sin;
            y[b] = b_cos + a_sin;
        }
    }
}

/* Element `index` of a state block, which belongs to `key`. */
static inline float naive_element(uint32_t format, const void *block, const float *scales, size_t index, uint32_t key) {
    switch (format) {
    case COLIBRI_STATE_F16:
        return naive_half(((const uint16_t *)block)[index]);
    case COLIBRI_STATE_Q8:
        return (float)((const int8_t *)block)[index] * scales[key];
    default:
        return ((const float *)block)[index];
    }
}

static inline void naive_attention(const cb_attention_block *job) {
    for (uint32_t row = 0; row < job->count; row++) {
        float p[64] = {0};
        float *out = job->out + row * job->out_stride;
        float block = -INFINITY;
        bool finite = true;
        if (job->first[row] >= job->last[row]) {
            continue;
        }
        for (uint32_t key = job->first[row]; key < job->last[row]; key++) {
            for (uint32_t d = 0; d < job->key_dim; d++) {
                const float k = naive_element(job->format, job->k, job->key_scales, d * 64 + key, key);
                p[key] = fmaf(k, job->q[row * job->q_stride + d], p[key]);
            }
            p[key] = job->scale * p[key];
            finite = finite && isfinite(p[key]);
            block = p[key] > block ? p[key] : block;
        }
        const float m = block > job->m[row] ? block : job->m[row];
        const float alpha = cb_exp(job->m[row] - m);
        for (uint32_t key = job->first[row]; key < job->last[row]; key++) {
            p[key] = cb_exp(p[key] - m);
        }
        job->m[row] = m;
        job->l[row] = finite ? fmaf(job->l[row], alpha, naive_sum(p, 64)) : NAN;
        for (uint32_t d = 0; d < job->value_dim; d++) {
            float sum = out[d] * alpha;
            for (uint32_t key = job->first[row]; key < job->last[row]; key++) {
                const size_t index = (size_t)key * job->value_dim + d;
                sum = fmaf(p[key], naive_element(job->format, job->v, job->value_scales, index, key), sum);
            }
            out[d] = sum;
        }
    }
}

/* ---- packing, as spec/cbi.md describes the layouts ---- */

static inline void naive_put_half(uint8_t *p, uint16_t half) {
    p[0] = (uint8_t)half;
    p[1] = (uint8_t)(half >> 8);
}

static inline size_t naive_packed_size(const naive_matrix *w, uint32_t layout) {
    const size_t rows = (w->rows + 15) / 16 * 16, cols = (w->cols + 127) / 128 * 128;
    if (w->values) {
        return (layout == CB_LAYOUT_ROWS ? w->rows : rows) * (size_t)w->cols * (w->format == CB_FORMAT_F32 ? 4 : 2);
    }
    const size_t bits = w->format == CB_FORMAT_Q8_G32 ? 8 : 4;
    return (layout == CB_LAYOUT_ROWS ? w->rows : rows) * cols / 128 * (16 * bits + 8);
}

static inline void naive_pack_float(const naive_matrix *w, uint32_t layout, uint8_t *data) {
    memset(data, 0, naive_packed_size(w, layout));
    for (uint32_t n = 0; n < w->rows; n++) {
        for (uint32_t k = 0; k < w->cols; k++) {
            const float value = w->values[(size_t)n * w->cols + k];
            const size_t place =
                layout == CB_LAYOUT_ROWS ? (size_t)n * w->cols + k : ((size_t)(n / 16) * w->cols + k) * 16 + n % 16;
            if (w->format == CB_FORMAT_F32) {
                memcpy(data + place * 4, &value, 4);
            } else {
                naive_put_half(data + place * 2, w->halves[(size_t)n * w->cols + k]);
            }
        }
    }
}

static inline void naive_pack_quantised(const naive_matrix *w, uint32_t layout, uint8_t *data) {
    const bool eight = w->format == CB_FORMAT_Q8_G32;
    const uint32_t lanes = layout == CB_LAYOUT_ROWS ? 1 : 16;
    const uint32_t rows = (w->rows + lanes - 1) / lanes * lanes, cols = (w->cols + 127) / 128 * 128;
    const size_t code_bytes = lanes * (eight ? 128u : 64u), block_bytes = code_bytes + lanes * 8;
    memset(data, 0, naive_packed_size(w, layout));
    for (uint32_t n = 0; n < rows; n++) {
        for (uint32_t k = 0; k < cols; k++) {
            const bool inside = n < w->rows && k < w->cols;
            const int code = inside ? w->codes[(size_t)n * w->cols + k] : eight ? 0 : 8;
            const uint16_t scale = inside ? w->scales[n * naive_groups(w->cols) + k / 32] : 0;
            uint8_t *block = data + ((size_t)(n / lanes) * (cols / 128) + k / 128) * block_bytes;
            const uint32_t in_block = k % 128, step = in_block / 4, lane = n % lanes;
            if (lanes == 16 && eight) {
                block[step * 64 + lane * 4 + k % 4] = (uint8_t)code;
            } else if (lanes == 16) {
                block[step / 2 * 64 + lane * 4 + k % 4] |= (uint8_t)(code << (step % 2 ? 4 : 0));
            } else if (eight) {
                block[in_block] = (uint8_t)code;
            } else {
                block[in_block / 2] |= (uint8_t)(code << (k % 2 ? 4 : 0));
            }
            if (inside || k % 32 == 0) {
                naive_put_half(block + code_bytes + (in_block / 32 * lanes + lane) * 2, scale);
            }
        }
    }
}

#endif
