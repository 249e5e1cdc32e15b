/* The kernels that take rows of floats, in every ISA this CPU has, against naive.h, bit for bit; exp, log, sine and
 * cosine against libm. */
#include "kernel_test.h"
#include "vm/ops_generated.h"

/* ---- exp, log, sine, cosine against libm ---- */

static double error_in_ulp(float got, double exact) {
    const float nearest = (float)exact;
    const double ulp = ldexp(1.0, (nearest == 0.0f || ilogbf(nearest) < -126 ? -126 : ilogbf(nearest)) - 23);
    return fabs((double)got - exact) / ulp;
}

static void test_exp_and_log(void) {
    double worst_exp = 0, worst_log = 0;
    for (uint32_t i = 0; i < 2000000; i++) {
        const float x = i % 2 ? random_float() * 45.0f : float_of(0x3f800000u / 2000000 * i) * (i % 4 ? 1.0f : -1.0f);
        const double exact = exp((double)x);
        const float got = cb_exp(x);
        if (exact < 0x1p-126) {
            check(got == 0.0f && !signbit(got), "exp(%a) = %a below 2^-126", (double)x, (double)got);
        } else if (exact < 0x1.fffffep127) {
            const double error = error_in_ulp(got, exact);
            worst_exp = error > worst_exp ? error : worst_exp;
        }
        const float y = float_of(random_u32() % 0x7f800000u);
        const double error = error_in_ulp(cb_log(y), log((double)y));
        worst_log = y > 0 && error > worst_log ? error : worst_log;
        const float near_one = 1.0f + (float)(int32_t)(i - 1000000) * 0x1p-24f;
        const double error_near_one = error_in_ulp(cb_log(near_one), log((double)near_one));
        worst_log = error_near_one > worst_log ? error_near_one : worst_log;
    }
    printf("largest error: exp %.3f ulp, log %.3f ulp\n", worst_exp, worst_log);
    check(worst_exp < 1.1, "exp is off by %.3f ulp", worst_exp);
    check(worst_log < 0.51, "log is off by %.3f ulp", worst_log);
    check(cb_exp(0.0f) == 1.0f && cb_exp(-0.0f) == 1.0f, "exp(0) is not 1");
    check(cb_exp(88.72283f) > 3.4e38f && isfinite(cb_exp(88.72283f)), "exp overflows too early");
    check(isinf(cb_exp(88.7229f)) && isinf(cb_exp(INFINITY)) && isinf(cb_exp(3e38f)), "exp does not overflow");
    check(cb_exp(-0x1.5d58a0p+6f) == 0.0f && cb_exp(-0x1.5d589ep+6f) >= 0x1p-126f, "exp does not end at 2^-126");
    check(cb_exp(-INFINITY) == 0.0f && !signbit(cb_exp(-INFINITY)) && cb_exp(-3e38f) == 0.0f, "exp(-inf) is not +0");
    check(isnan(cb_exp(NAN)) && isnan(cb_log(NAN)) && isnan(cb_log(-1.0f)), "NaN is lost");
    check(cb_log(0.0f) == -INFINITY && cb_log(-0.0f) == -INFINITY && cb_log(INFINITY) == INFINITY, "log at its ends");
    check(cb_log(1.0f) == 0.0f && cb_log(0x1p-149f) == (float)log(0x1p-149), "log(1) or of a denormal");
}

static void test_rope_table(void) {
    static const uint32_t counts[] = {1, 5, 16, 20, 64};
    for (uint32_t round = 0; round < 3000; round++) {
        const uint32_t n = counts[round % 5];
        const uint32_t position = round < 5 ? round : random_u32() >> (8 + random_u32() % 24);
        float *frequencies = floats(n), *table = floats(2 * (size_t)n);
        for (uint32_t i = 0; i < n; i++) {
            frequencies[i] = i == 0 ? 1.0f : fabsf(random_float()) * 0.5f;
        }
        kernels->rope_table(table, frequencies, n, position, 1.0f);
        for (uint32_t i = 0; i < n; i++) {
            const float angle = (float)position * frequencies[i];
            const float cosine = (float)cos((double)angle), sine = (float)sin((double)angle);
            check(fabsf(table[i] - cosine) < 1e-7f && fabsf(table[n + i] - sine) < 1e-7f,
                  "rope_table at angle %a: %a %a", (double)angle, (double)table[i], (double)table[n + i]);
        }
        float *scaled = floats(2 * (size_t)n), *scalar = floats(2 * (size_t)n);
        kernels->rope_table(scaled, frequencies, n, position, 1.2345f);
        cb_kernels_get(CB_ISA_SCALAR)->rope_table(scalar, frequencies, n, position, 1.2345f);
        check(same(scaled, scalar, 2 * (size_t)n), "rope_table differs from scalar, position %u", position);
        for (uint32_t i = 0; i < 2 * n; i++) {
            check(scaled[i] == table[i] * 1.2345f, "rope_table scale");
        }
        free(frequencies), free(table), free(scaled), free(scalar);
    }
    const float strange[4] = {NAN, INFINITY, -INFINITY, 3e38f};
    float table[8], scalar[8];
    kernels->rope_table(table, strange, 4, 12345, 1.0f);
    cb_kernels_get(CB_ISA_SCALAR)->rope_table(scalar, strange, 4, 12345, 1.0f);
    check(same(table, scalar, 8), "rope_table of values that are not finite");
}

/* The fixed sequences themselves: FNV-1a over many results. Other numbers here mean another contract version. */
static void test_bits_of_the_contract(void) {
    uint64_t hash[3] = {0xcbf29ce484222325u, 0xcbf29ce484222325u, 0xcbf29ce484222325u};
    float table[128], frequencies[64];
    for (uint32_t i = 0; i < 64; i++) {
        frequencies[i] = (float)(i + 1) / 64.0f;
    }
    for (uint32_t i = 0; i < 200000; i++) {
        const float exponential = cb_exp((float)i * 0x1p-10f - 95.0f), logarithm = cb_log((float)(i + 1) * 0x1p-12f);
        uint32_t bits[3];
        if (i % 128 == 0) {
            kernels->rope_table(table, frequencies, 64, i * 83, 1.0f);
        }
        memcpy(&bits[0], &exponential, 4), memcpy(&bits[1], &logarithm, 4), memcpy(&bits[2], &table[i % 128], 4);
        for (int j = 0; j < 3; j++) {
            hash[j] = (hash[j] ^ bits[j]) * 0x100000001b3u;
        }
    }
    check(hash[0] == 0xb5b190269453c8ecu, "exp has other bits: %016llx", (unsigned long long)hash[0]);
    check(hash[1] == 0x4aaf3f9c54ba987cu, "log has other bits: %016llx", (unsigned long long)hash[1]);
    check(hash[2] == 0xb152b3f37c04018du, "rope_table has other bits: %016llx", (unsigned long long)hash[2]);
}

/* ---- rows ---- */

static bool all_finite(const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            return false;
        }
    }
    return true;
}

static void test_rows(uint32_t n, int kind) {
    float *x = filled(n, kind), *w = filled(n, PLAIN), *got = floats(n), *expected = floats(n);
    const char *names[] = {"plain", "tiny", "huge", "zeros", "nan", "infinity", "any bits"};

    for (uint32_t i = 0; i < n; i++) {
        expected[i] = x[i] + w[i];
    }
    bool finite = kernels->add(got, x, w, n);
    check(finite == all_finite(expected, n), "add tells if it is finite n=%u %s", n, names[kind]);
    check(same(got, expected, n), "add n=%u %s", n, names[kind]);
    memcpy(got, x, n * sizeof(float));
    kernels->add(got, got, w, n);
    check(same(got, expected, n), "add in place n=%u %s", n, names[kind]);

    for (uint32_t i = 0; i < n; i++) {
        expected[i] = x[i] < -0.5f ? -0.5f : x[i] > 0.25f ? 0.25f : x[i];
    }
    finite = kernels->clamp(got, x, -0.5f, 0.25f, n);
    check(finite == all_finite(x, n), "clamp tells if x is finite n=%u %s", n, names[kind]);
    check(same(got, expected, n), "clamp n=%u %s", n, names[kind]);

    for (uint32_t i = 0; i < n; i++) {
        expected[i] = x[i] * naive_sigmoid(x[i]);
        expected[i] = expected[i] * w[i];
    }
    kernels->silu_mul(got, x, w, n);
    check(same(got, expected, n), "silu_mul n=%u %s", n, names[kind]);

    const float gate = n % 3 ? random_float() * 20 : x[0];
    for (uint32_t i = 0; i < n; i++) {
        expected[i] = naive_sigmoid(gate) * x[i];
    }
    kernels->sigmoid_scale(got, x, gate, n);
    check(same(got, expected, n), "sigmoid_scale n=%u %s", n, names[kind]);

    for (uint32_t i = 0; i < n; i++) {
        got[i] = w[i];
        expected[i] = fmaf(gate, x[i], w[i]);
    }
    finite = kernels->add_scaled(got, x, gate, n);
    check(finite == all_finite(x, n), "add_scaled tells if x is finite n=%u %s", n, names[kind]);
    check(same(got, expected, n), "add_scaled n=%u %s", n, names[kind]);

    float partial[16] = {0};
    for (uint32_t i = 0; i < n; i++) {
        partial[i % 16] = fmaf(x[i], x[i], partial[i % 16]);
    }
    const float squares = naive_sum(partial, 16), factor = 1.0f / sqrtf(squares / (float)n + 1e-6f);
    for (uint32_t i = 0; i < n; i++) {
        expected[i] = x[i] * factor;
        expected[i] = expected[i] * w[i];
    }
    finite = kernels->rms_norm(got, x, w, n, 1e-6f);
    check(finite == (bool)isfinite(squares), "rms_norm tells of the sum of squares n=%u %s", n, names[kind]);
    check(same(got, expected, n), "rms_norm n=%u %s", n, names[kind]);

    float largest = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        largest = x[i] > largest ? x[i] : largest;
    }
    for (uint32_t i = 0; i < n; i++) {
        expected[i] = cb_exp(x[i] - largest);
    }
    const float sum = naive_sum(expected, n);
    for (uint32_t i = 0; i < n; i++) {
        expected[i] = expected[i] / sum;
    }
    memcpy(got, x, n * sizeof(float));
    kernels->softmax(got, n);
    check(same(got, expected, n), "softmax n=%u %s", n, names[kind]);

    finite = true;
    for (uint32_t i = 0; i < n; i++) {
        finite = finite && isfinite(x[i]);
    }
    check(kernels->all_finite(x, n) == finite, "all_finite n=%u %s", n, names[kind]);

    const size_t padded = (n + 127) / 128 * 128;
    int8_t *codes = take(2 * padded);
    int16_t *sums = take(2 * padded / 32 * 2);
    float *scales = floats(2 * padded / 128);
    const bool good = kernels->quantise_row(x, n, codes, scales, sums);
    check(good == naive_quantise(x, n, codes + padded, scales + padded / 128, sums + padded / 32) && good == finite,
          "quantise_row result n=%u %s", n, names[kind]);
    check(memcmp(codes, codes + padded, padded) == 0, "quantise_row codes n=%u %s", n, names[kind]);
    check(memcmp(sums, sums + padded / 32, padded / 32 * 2) == 0, "quantise_row sums n=%u %s", n, names[kind]);
    check(same(scales, scales + padded / 128, padded / 128), "quantise_row scales n=%u %s", n, names[kind]);
    free(codes), free(sums), free(scales);
    free(x), free(w), free(got), free(expected);
}

static void test_all_finite_finds_each_place(void) {
    float x[40] = {0};
    for (uint32_t i = 0; i < 40; i++) {
        x[i] = i % 2 ? -INFINITY : NAN;
        check(!kernels->all_finite(x, 40) && kernels->all_finite(x, i), "all_finite misses place %u", i);
        x[i] = 3.4028235e38f;
    }
}

static void test_quantise_edges(void) {
    static const float largest[] = {0x1p-100f, 0x0.ffffffp-100f, 0x1p-149f, 3.4028235e38f, 127.0f, 0.1f};
    float x[128], scale;
    int8_t codes[128];
    int16_t sums[4];
    for (uint32_t i = 0; i < 6; i++) {
        for (uint32_t j = 0; j < 128; j++) {
            x[j] = j % 2 ? largest[i] : -largest[i];
        }
        const int expected = largest[i] < 0x1p-100f ? 0 : 127;
        check(kernels->quantise_row(x, 128, codes, &scale, sums), "quantise_row refuses %a", (double)largest[i]);
        for (uint32_t j = 0; j < 128; j++) {
            check(codes[j] == (j % 2 ? expected : -expected), "quantise_row of %a: code %d", (double)x[j], codes[j]);
        }
    }
    for (uint32_t j = 0; j < 128; j++) { /* scale 1: halves must go to the even neighbour */
        x[j] = (float)j - 63.5f;
    }
    x[127] = 127.0f;
    kernels->quantise_row(x, 128, codes, &scale, sums);
    for (uint32_t j = 0; j < 127; j++) {
        check(codes[j] == (int)rint((double)x[j]) && codes[j] % 2 == 0, "quantise_row rounds %a to %d", (double)x[j],
              codes[j]);
    }
}

static void test_rope(void) {
    static const uint32_t shapes[][2] = {{2, 2}, {8, 4}, {64, 64}, {128, 128}, {80, 40}, {34, 34}, {7, 6}, {5, 0}};
    for (uint32_t i = 0; i < 8; i++) {
        for (uint32_t heads = 1; heads <= 3; heads++) {
            const uint32_t dim = shapes[i][0], rotary = shapes[i][1];
            const size_t n = (size_t)heads * dim;
            float *x = filled(n, PLAIN), *table = filled(rotary, PLAIN), *got = floats(n), *expected = floats(n);
            for (uint32_t pairing = CB_PAIRING_HALF; pairing <= CB_PAIRING_INTERLEAVED; pairing++) {
                naive_rope(expected, x, table, heads, dim, rotary, pairing == CB_PAIRING_INTERLEAVED);
                kernels->rope(got, x, table, heads, dim, rotary, pairing);
                check(same(got, expected, n), "rope dim=%u rotary=%u pairing=%u", dim, rotary, pairing);
                memcpy(got, x, n * sizeof(float));
                kernels->rope(got, got, table, heads, dim, rotary, pairing);
                check(same(got, expected, n), "rope in place dim=%u rotary=%u pairing=%u", dim, rotary, pairing);
            }
            free(x), free(table), free(got), free(expected);
        }
    }
}

/* ---- main ---- */

static void test_variant(void) {
    static const uint32_t lengths[] = {1, 2, 15, 16, 17, 31, 64, 100, 127, 128, 129, 300, 1024};
    for (uint32_t i = 0; i < 13 * FLOAT_KINDS * 4; i++) {
        test_rows(lengths[i % 13], (int)(i / 13 % FLOAT_KINDS));
    }
    test_all_finite_finds_each_place();
    test_quantise_edges();
    test_rope_table();
    test_bits_of_the_contract();
    test_rope();
}

int main(void) {
    kernels = cb_kernels_get(CB_ISA_SCALAR);
    test_exp_and_log();
    return for_all_variants(test_variant);
}
