/* exp and sigmoid on lanes: fixed sequences (docs/numerics.md). Included after a vec_<isa>.h. */
#include "kernels/vec.h"

VEC_INLINE vec vec_exp(vec x) {
    /* The last float whose exp reaches 2^-126. Below it the result is +0; taking those lanes out first also spares
     * the CPU denormal products, which are slow. The order of operands lets NaN pass. */
    const vec lowest = vec_set(-0x1.5d589ep+6f);
    const vec_mask vanishes = vec_less(x, lowest);
    x = vec_min(vec_set(89.0f), vec_max(lowest, x));             /* exp(89) is infinite */
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
    /* 2^n in two factors: n reaches 128. */
    const vec half = vec_rint(vec_mul(n, vec_set(0.5f)));
    p = vec_mul(vec_mul(p, vec_power2(half)), vec_power2(vec_sub(n, half)));
    return vec_select(vanishes, vec_set(0.0f), p);
}

VEC_INLINE vec vec_sigmoid(vec x) {
    const vec one = vec_set(1.0f);
    return vec_div(one, vec_add(one, vec_exp(vec_sub(vec_set(0.0f), x))));
}
