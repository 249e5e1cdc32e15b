/* exp and sigmoid on lanes: fixed sequences (docs/numerics.md). Included after a vec_<isa>.h. */
#include "kernels/vec.h"

VEC_INLINE vec vec_exp(vec x) {
    /* Beyond these bounds the result is infinite or 0 anyway; the order of the operands lets NaN pass. */
    x = vec_min(vec_set(89.0f), x);
    x = vec_max(vec_set(-88.0f), x);
    const vec n = vec_rint(vec_mul(x, vec_set(0x1.715476p+0f))); /* log2(e) */
    /* ln(2) in two parts; the first product is exact, so r is good to 2^-24 of itself. */
    vec r = vec_fma(n, vec_set(-0x1.62e430p-1f), x);
    r = vec_fma(n, vec_set(0x1.05c610p-29f), r);
    vec p = vec_set(1.0f / 5040.0f);
    p = vec_fma(p, r, vec_set(1.0f / 720.0f));
    p = vec_fma(p, r, vec_set(1.0f / 120.0f));
    p = vec_fma(p, r, vec_set(1.0f / 24.0f));
    p = vec_fma(p, r, vec_set(1.0f / 6.0f));
    p = vec_fma(p, r, vec_set(0.5f));
    p = vec_fma(p, vec_mul(r, r), r);
    p = vec_add(p, vec_set(1.0f));
    /* 2^n in two factors: n reaches 128, and -127 on the way to 0. */
    const vec half = vec_rint(vec_mul(n, vec_set(0.5f)));
    p = vec_mul(vec_mul(p, vec_power2(half)), vec_power2(vec_sub(n, half)));
    return vec_select(vec_less(p, vec_set(0x1p-126f)), vec_set(0.0f), p);
}

VEC_INLINE vec vec_sigmoid(vec x) {
    const vec one = vec_set(1.0f);
    return vec_div(one, vec_add(one, vec_exp(vec_sub(vec_set(0.0f), x))));
}
