/* exp and log of single floats, for the sampler. */
#define VEC_LANES 1
#include "kernels/vec_scalar.h"

#include "kernels/math_tmpl.h"
#include "kernels/kernels.h"

float cb_exp(float x) { return vec_exp(vec_set(x)).lane[0]; }

float cb_log(float x) {
    const double wide = (double)x; /* every float32, denormals too, is a normal double */
    uint64_t bits;
    double mantissa;
    if (!(x > 0.0f)) {
        return x == 0.0f ? -__builtin_inff() : x < 0.0f ? __builtin_nanf("") : x;
    }
    if (cb_bits_of_float(x) == 0x7f800000u) {
        return x;
    }
    /* x = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)) */
    memcpy(&bits, &wide, sizeof bits);
    const uint64_t shifted = bits - 0x3fe6a09e667f3bcdu;
    const int32_t exponent = (int32_t)((int64_t)shifted >> 52);
    bits -= (uint64_t)exponent << 52;
    memcpy(&mantissa, &bits, sizeof mantissa);
    /* log(m) = 2 (s + s^3/3 + s^5/5 + ...), s = (m - 1) / (m + 1) */
    const double s = (mantissa - 1.0) / (mantissa + 1.0);
    const double z = s * s;
    double p = 2.0 / 15.0;
    p = __builtin_fma(p, z, 2.0 / 13.0);
    p = __builtin_fma(p, z, 2.0 / 11.0);
    p = __builtin_fma(p, z, 2.0 / 9.0);
    p = __builtin_fma(p, z, 2.0 / 7.0);
    p = __builtin_fma(p, z, 2.0 / 5.0);
    p = __builtin_fma(p, z, 2.0 / 3.0);
    p = __builtin_fma(p, z, 2.0);
    return (float)__builtin_fma((double)exponent, 0x1.62e42fefa39efp-1, p * s);
}
