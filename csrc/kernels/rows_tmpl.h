/* Kernels on whole rows of floats. Included after a vec_<isa>.h and math_tmpl.h.
 *
 * Elementwise kernels allow y to be one of their inputs. Reductions keep VEC_LANES strided partial sums: lane i
 * takes elements i, i + 16, ... A tail is padded with +0, which changes no partial sum: they start at +0 and so are
 * never -0. */
#include "kernels/variants.h"
#include "kernels/half.h"

VEC_INLINE uint32_t lanes_of(uint64_t left) { return left < VEC_LANES ? (uint32_t)left : VEC_LANES; }

VEC_INLINE vec load_lanes(const float *p, uint64_t left) {
    return left < VEC_LANES ? vec_load_first(p, (uint32_t)left) : vec_load(p);
}

VEC_INLINE void store_lanes(float *p, vec x, uint64_t left) {
    if (left < VEC_LANES) {
        vec_store_first(p, x, (uint32_t)left);
    } else {
        vec_store(p, x);
    }
}

static uint32_t largest_magnitude(const float *x, uint64_t n) {
    vec m = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        m = vec_max_magnitude(m, load_lanes(x + i, n - i));
    }
    return vec_largest_magnitude(m);
}

/* For the result of vec_max_magnitude. */
VEC_INLINE bool finite_magnitude(vec m) { return vec_largest_magnitude(m) < 0x7f800000u; }

bool KERNEL(all_finite)(const float *x, uint64_t n) { return largest_magnitude(x, n) < 0x7f800000u; }

bool KERNEL(quantise_row)(const float *x, uint32_t k, int8_t *codes, float *scales, int16_t *sums) {
    bool finite = true;
    for (uint64_t first = 0; first < k; first += CB_ACTIVATION_BLOCK) {
        const uint64_t left = k - first;
        const uint64_t n = left < CB_ACTIVATION_BLOCK ? left : CB_ACTIVATION_BLOCK;
        const uint32_t bits = largest_magnitude(x + first, n);
        float scale = 0.0f;
        finite = finite && bits < 0x7f800000u;
        if (bits >= 0x7f800000u || bits < (127u - 100u) << 23) { /* 2^-100: 127 / m must not overflow */
            memset(codes + first, 0, CB_ACTIVATION_BLOCK);
        } else {
            const float largest = cb_float_of_bits(bits);
            const vec inverse = vec_set(127.0f / largest);
            scale = largest / 127.0f;
            for (uint32_t i = 0; i < CB_ACTIVATION_BLOCK; i += VEC_LANES) {
                const vec part = i < n ? load_lanes(x + first + i, n - i) : vec_set(0.0f);
                vec_store_int8(codes + first + i, vec_mul(part, inverse));
            }
        }
        scales[first / CB_ACTIVATION_BLOCK] = scale;
        for (uint32_t i = 0; i < CB_ACTIVATION_BLOCK; i += 32) {
            int32_t sum = 0; /* at most 32 * 127 = 4064: fits int16 */
            for (uint32_t j = 0; j < 32; j++) {
                sum += codes[first + i + j];
            }
            sums[(first + i) / 32] = (int16_t)sum;
        }
    }
    return finite;
}

bool KERNEL(rms_norm)(float *y, const float *x, const float *weight, uint32_t n, float epsilon) {
    vec squares = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = load_lanes(x + i, n - i);
        squares = vec_fma(part, part, squares);
    }
    const float sum = vec_sum(squares);
    const float mean = sum / (float)n;
    const vec factor = vec_set(1.0f / __builtin_sqrtf(mean + epsilon));
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = vec_mul(load_lanes(x + i, n - i), factor);
        store_lanes(y + i, vec_mul(part, load_lanes(weight + i, n - i)), n - i);
    }
    return __builtin_isfinite(sum);
}

bool KERNEL(add)(float *y, const float *a, const float *b, uint64_t n) {
    vec m = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec sum = vec_add(load_lanes(a + i, n - i), load_lanes(b + i, n - i));
        m = vec_max_magnitude(m, sum);
        store_lanes(y + i, sum, n - i);
    }
    return finite_magnitude(m);
}

bool KERNEL(clamp)(float *y, const float *x, float low, float high, uint64_t n) {
    vec m = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = load_lanes(x + i, n - i);
        m = vec_max_magnitude(m, part);
        store_lanes(y + i, vec_min(vec_set(high), vec_max(vec_set(low), part)), n - i);
    }
    return finite_magnitude(m);
}

void KERNEL(silu_mul)(float *y, const float *gate, const float *up, uint64_t n) {
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec g = load_lanes(gate + i, n - i);
        const vec silu = vec_mul(g, vec_sigmoid(g));
        store_lanes(y + i, vec_mul(silu, load_lanes(up + i, n - i)), n - i);
    }
}

void KERNEL(sigmoid_scale)(float *y, const float *x, float gate, uint64_t n) {
    const vec factor = vec_sigmoid(vec_set(gate));
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        store_lanes(y + i, vec_mul(factor, load_lanes(x + i, n - i)), n - i);
    }
}

bool KERNEL(add_scaled)(float *y, const float *x, float weight, uint64_t n) {
    vec m = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = load_lanes(x + i, n - i);
        m = vec_max_magnitude(m, part);
        store_lanes(y + i, vec_fma(vec_set(weight), part, load_lanes(y + i, n - i)), n - i);
    }
    return finite_magnitude(m);
}

void KERNEL(softmax)(float *x, uint32_t n) {
    const vec lowest = vec_set(-__builtin_inff());
    vec largest = lowest;
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = vec_select(vec_lanes(0, lanes_of(n - i)), load_lanes(x + i, n - i), lowest);
        largest = vec_max(part, largest);
    }
    const vec base = vec_set(vec_largest(largest));
    vec sums = vec_set(0.0f);
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        const vec part = vec_exp(vec_sub(load_lanes(x + i, n - i), base));
        sums = vec_add(sums, vec_select(vec_lanes(0, lanes_of(n - i)), part, vec_set(0.0f)));
        store_lanes(x + i, part, n - i);
    }
    const vec sum = vec_set(vec_sum(sums));
    for (uint64_t i = 0; i < n; i += VEC_LANES) {
        store_lanes(x + i, vec_div(load_lanes(x + i, n - i), sum), n - i);
    }
}
