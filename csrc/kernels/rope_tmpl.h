/* Rotary position embedding. Included after rows_tmpl.h. */
#include "vm/ops_generated.h"

/* Sine and cosine of `angle` in double, good to 1e-12 for |angle| <= 2^24. Larger or non-finite angles give some
 * value, the same everywhere, and are no undefined behaviour. */
static void sine_and_cosine(double angle, double *sine, double *cosine) {
    const double quarter = __builtin_rint(angle * 0x1.45f306dc9c883p-1); /* 2 / pi */
    /* pi / 2 in two parts: the second matters once quarter is large. */
    double r = __builtin_fma(quarter, -0x1.921fb54442d18p+0, angle);
    r = __builtin_fma(quarter, -0x1.1a62633145c07p-54, r);
    const double z = r * r;
    double s = 1.0 / 6227020800.0;
    s = __builtin_fma(s, z, -1.0 / 39916800.0);
    s = __builtin_fma(s, z, 1.0 / 362880.0);
    s = __builtin_fma(s, z, -1.0 / 5040.0);
    s = __builtin_fma(s, z, 1.0 / 120.0);
    s = __builtin_fma(s, z, -1.0 / 6.0);
    s = __builtin_fma(s, z * r, r);
    double c = 1.0 / 479001600.0;
    c = __builtin_fma(c, z, -1.0 / 3628800.0);
    c = __builtin_fma(c, z, 1.0 / 40320.0);
    c = __builtin_fma(c, z, -1.0 / 720.0);
    c = __builtin_fma(c, z, 1.0 / 24.0);
    c = __builtin_fma(c, z, -0.5);
    c = __builtin_fma(c, z, 1.0);
    /* quarter modulo 4 as -2, -1, 0, 1 or 2, without an integer conversion that could overflow */
    const double turn = __builtin_fma(__builtin_rint(quarter * 0.25), -4.0, quarter);
    if (turn == 1.0) {
        *sine = c;
        *cosine = -s;
    } else if (turn == -1.0) {
        *sine = -c;
        *cosine = s;
    } else if (turn == 2.0 || turn == -2.0) {
        *sine = -s;
        *cosine = -c;
    } else {
        *sine = s;
        *cosine = c;
    }
}

void KERNEL(rope_table)(float *table, const float *inverse_frequencies, uint32_t n, uint32_t position, float scale) {
    for (uint32_t i = 0; i < n; i++) {
        const float angle = (float)position * inverse_frequencies[i];
        double sine, cosine;
        sine_and_cosine((double)angle, &sine, &cosine);
        table[i] = (float)cosine * scale;
        table[(uint64_t)n + i] = (float)sine * scale;
    }
}

void KERNEL(rope)(float *y, const float *x, const float *table, uint32_t heads, uint32_t head_dim, uint32_t rotary_dim,
                  uint32_t pairing) {
    const uint32_t n = rotary_dim / 2;
    const float *cosines = table;
    const float *sines = table + n;
    for (uint32_t head = 0; head < heads; head++, x += head_dim, y += head_dim) {
        if (pairing == CB_PAIRING_INTERLEAVED) {
            for (uint32_t i = 0; i < n; i++) {
                const float a = x[2 * i];
                const float b = x[2 * i + 1];
                y[2 * i] = a * cosines[i] - b * sines[i];
                y[2 * i + 1] = b * cosines[i] + a * sines[i];
            }
        } else {
            for (uint32_t i = 0; i < n; i += VEC_LANES) {
                const vec cosine = load_lanes(cosines + i, n - i);
                const vec sine = load_lanes(sines + i, n - i);
                const vec a = load_lanes(x + i, n - i);
                const vec b = load_lanes(x + n + i, n - i);
                store_lanes(y + i, vec_sub(vec_mul(a, cosine), vec_mul(b, sine)), n - i);
                store_lanes(y + n + i, vec_add(vec_mul(b, cosine), vec_mul(a, sine)), n - i);
            }
        }
        if (y != x) {
            memcpy(y + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(float));
        }
    }
}
