/* Every kernel of every ISA this CPU has against naive.h, bit for bit. `test_kernels bench [MiB]` measures
 * instead: GB/s for one activation row over that many MiB of weights, and GOPS (2 for a multiplication and addition)
 * for 64 rows. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "naive.h"
#include "vm/ops_generated.h"

static const cb_kernels *kernels; /* the variant under test */
static unsigned failures;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static void check(bool good, const char *format, ...) {
    va_list arguments;
    if (good || failures++ > 50) {
        return;
    }
    va_start(arguments, format);
    printf("FAIL %s: ", cb_isa_name(kernels->isa));
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

static uint32_t random_u32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

static float random_float(void) { return (float)(int32_t)random_u32() * 0x1p-30f; }

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Bits equal, or both NaN: which NaN is not part of the contract. */
static bool same(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, 4) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            printf("  [%zu] got %a, expected %a\n", i, (double)a[i], (double)b[i]);
            return false;
        }
    }
    return true;
}

/* Exactly n floats, so that the address sanitizer sees any step beyond. */
static void *take(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        abort();
    }
    return p;
}

static float *floats(size_t n) { return take(n * sizeof(float)); }

enum { PLAIN, TINY, HUGE_VALUES, ZEROS, WITH_NAN, WITH_INFINITY, ANY_BITS, FLOAT_KINDS };

static void fill(float *x, size_t n, int kind) {
    for (size_t i = 0; i < n; i++) {
        const float value = random_float();
        x[i] = kind == TINY          ? value * 0x1p-126f
               : kind == HUGE_VALUES ? value * 0x1p126f
               : kind == ZEROS       ? (random_u32() & 1 ? -0.0f : 0.0f)
               : kind == ANY_BITS    ? float_of(random_u32())
                                     : value;
    }
    if (n && (kind == WITH_NAN || kind == WITH_INFINITY)) {
        x[random_u32() % n] = kind == WITH_NAN ? NAN : (random_u32() & 1 ? -INFINITY : INFINITY);
    }
}

static float *filled(size_t n, int kind) {
    float *x = floats(n);
    fill(x, n, kind);
    return x;
}

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
    kernels->add_scaled(got, x, gate, n);
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

/* ---- matmul and decode_row ---- */

enum { CODES_RANDOM, CODES_LOWEST, CODES_HIGHEST, CODES_MINUS_127, CODE_KINDS };
enum { SCALES_PLAIN, SCALES_ZERO, SCALES_DENORMAL, SCALES_LARGEST, SCALES_ANY, SCALE_KINDS };

static naive_matrix random_matrix(uint32_t format, uint32_t rows, uint32_t cols, int code_kind, int scale_kind) {
    naive_matrix w = {.rows = rows, .cols = cols, .format = format};
    const size_t n = (size_t)rows * cols;
    if (format == CB_FORMAT_F32 || format == CB_FORMAT_BF16 || format == CB_FORMAT_F16) {
        w.halves = take(n * 2);
        w.values = filled(n, scale_kind == SCALES_ANY ? TINY : PLAIN);
        for (size_t i = 0; i < n && format != CB_FORMAT_F32; i++) {
            uint32_t bits;
            memcpy(&bits, &w.values[i], 4);
            w.halves[i] = (uint16_t)(format == CB_FORMAT_BF16 ? bits >> 16 : random_u32() & 0xbfffu);
            w.values[i] = format == CB_FORMAT_BF16 ? float_of(bits & 0xffff0000u) : naive_half(w.halves[i]);
        }
        return w;
    }
    const bool eight = format == CB_FORMAT_Q8_G32;
    w.codes = take(n * 2);
    w.scales = take((size_t)rows * naive_groups(cols) * 2);
    for (size_t i = 0; i < n; i++) {
        const int random = eight ? (int)(random_u32() % 256) - 128 : (int)(random_u32() % 16);
        w.codes[i] = (int16_t)(code_kind == CODES_RANDOM    ? random
                               : code_kind == CODES_LOWEST  ? (eight ? -128 : 0)
                               : code_kind == CODES_HIGHEST ? (eight ? 127 : 15)
                                                            : (eight ? -127 : 8));
    }
    for (size_t i = 0; i < (size_t)rows * naive_groups(cols); i++) {
        const uint16_t sign = random_u32() & 1 ? 0x8000 : 0;
        w.scales[i] = (uint16_t)(sign | (scale_kind == SCALES_ZERO       ? 0
                                         : scale_kind == SCALES_DENORMAL ? random_u32() % 1024
                                         : scale_kind == SCALES_LARGEST  ? 0x7bff
                                         : scale_kind == SCALES_ANY      ? random_u32() & 0x7fff
                                                                         : 0x2000 + random_u32() % 0x1000));
    }
    return w;
}

static void free_matrix(naive_matrix *w) { free(w->codes), free(w->scales), free(w->values), free(w->halves); }

static uint8_t *pack(const naive_matrix *w, uint32_t layout) {
    uint8_t *data = take(naive_packed_size(w, layout));
    (w->values ? naive_pack_float : naive_pack_quantised)(w, layout, data);
    return data;
}

static uint32_t tile_layout(uint32_t format) {
    return format <= CB_FORMAT_F16 ? CB_LAYOUT_TILED16 : CB_LAYOUT_TILED16X4;
}

/* code_kind also says what the activations are: extremes of one sign make the largest sums possible. */
static cb_rows random_rows(uint32_t count, uint32_t k, int code_kind) {
    const size_t blocks = (k + 127) / 128;
    cb_rows x = {.stride = k + 3};
    float *values = floats(count * x.stride), *scales = floats(count * blocks);
    int8_t *codes = take(count * blocks * 128);
    int16_t *sums = take(count * blocks * 4 * 2);
    fill(values, count * x.stride, PLAIN);
    for (uint32_t row = 0; row < count; row++) {
        float *values_of_row = values + row * x.stride;
        for (uint32_t i = 0; i < k && code_kind != CODES_RANDOM; i++) {
            values_of_row[i] = (row % 2 ? -1.0f : 1.0f) * (code_kind == CODES_MINUS_127 && i % 2 ? 0.5f : 1.0f);
        }
        naive_quantise(values_of_row, k, codes + row * blocks * 128, scales + row * blocks, sums + row * blocks * 4);
    }
    x.values = values, x.scales = scales, x.codes = codes, x.sums = sums;
    return x;
}

static void free_rows(cb_rows *x) {
    free((void *)(uintptr_t)x->values), free((void *)(uintptr_t)x->scales);
    free((void *)(uintptr_t)x->codes), free((void *)(uintptr_t)x->sums);
}

static void test_matmul(uint32_t format, uint32_t rows, uint32_t k, uint32_t count, int code_kind, int scale_kind) {
    naive_matrix w = random_matrix(format, rows, k, code_kind, scale_kind);
    uint8_t *tiles = pack(&w, tile_layout(format));
    cb_rows x = random_rows(count, k, code_kind);
    uint32_t index[32];
    const uint64_t stride = rows + 5;
    float *got = floats(count * stride), *expected = floats(count * stride);
    for (uint32_t i = 0; i < count; i++) {
        index[i] = random_u32() % count;
    }
    for (int indexed = 0; indexed < 2; indexed++) {
        memset(got, 0x55, count * stride * sizeof(float));
        memset(expected, 0x55, count * stride * sizeof(float)); /* nothing beyond `rows` may be written */
        for (uint32_t i = 0; i < count; i++) {
            for (uint32_t n = 0; n < rows; n++) {
                expected[i * stride + n] = naive_dot(&w, n, &x, indexed ? index[i] : i);
            }
        }
        const cb_matmul job = {tiles, rows, k, &x, indexed ? index : NULL, count, got, stride};
        kernels->matmul[format](&job);
        check(same(got, expected, count * stride), "%s rows=%u k=%u count=%u codes=%d scales=%d indexed=%d",
              kernels->matmul_name[format], rows, k, count, code_kind, scale_kind, indexed);
    }
    free(tiles), free(got), free(expected), free_rows(&x), free_matrix(&w);
}

static const uint32_t formats[] = {CB_FORMAT_F32, CB_FORMAT_BF16, CB_FORMAT_F16, CB_FORMAT_Q8_G32, CB_FORMAT_Q4_G32};

static void test_matmuls(void) {
    static const uint32_t widths[] = {1, 3, 40, 127, 128, 129, 300, 1024};
    static const uint32_t heights[] = {1, 15, 16, 17, 48, 150};
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 7, 8, 9, 17};
    for (uint32_t f = 0; f < 5; f++) {
        const uint32_t format = formats[f];
        for (uint32_t i = 0; i < 8 * 6 * 9; i++) {
            const uint32_t k = widths[i % 8], rows = heights[i / 8 % 6], count = counts[i / 48];
            test_matmul(format, rows, k, count, CODES_RANDOM, SCALES_PLAIN);
        }
        for (int kinds = 0; kinds < CODE_KINDS * SCALE_KINDS; kinds++) {
            test_matmul(format, 20, 130, 11, kinds % CODE_KINDS, kinds / CODE_KINDS);
        }
    }
}

static void test_decode_row(void) {
    for (uint32_t f = 0; f < 5; f++) {
        for (uint32_t i = 0; i < 12; i++) {
            const uint32_t rows = i % 3 == 0 ? 1 : i % 3 == 1 ? 16 : 35, cols = i / 3 == 0 ? 1 : i / 3 * 67;
            naive_matrix w = random_matrix(formats[f], rows, cols, CODES_RANDOM, SCALES_PLAIN);
            float *got = floats(cols), *expected = floats(cols);
            for (int tiled = 0; tiled < 2; tiled++) {
                const uint32_t layout = tiled ? tile_layout(w.format) : CB_LAYOUT_ROWS;
                uint8_t *data = pack(&w, layout);
                for (uint32_t n = 0; n < rows; n++) {
                    for (uint32_t k = 0; k < cols; k++) {
                        const size_t place = (size_t)n * cols + k;
                        expected[k] = w.values ? w.values[place]
                                               : (float)(w.codes[place] - (w.format == CB_FORMAT_Q4_G32 ? 8 : 0)) *
                                                     naive_half(w.scales[n * naive_groups(cols) + k / 32]);
                    }
                    kernels->decode_row(w.format, layout, data, cols, n, got);
                    check(same(got, expected, cols), "decode_row %s layout=%u rows=%u cols=%u row=%u",
                          cb_format_table[w.format].name, layout, rows, cols, n);
                }
                free(data);
            }
            free(got), free(expected), free_matrix(&w);
        }
    }
    uint16_t *halves = take(65536 * 2); /* every float16 there is */
    float *got = floats(65536), *expected = floats(65536);
    for (uint32_t i = 0; i < 65536; i++) {
        halves[i] = (uint16_t)i;
        expected[i] = naive_half((uint16_t)i);
    }
    kernels->decode_row(CB_FORMAT_F16, CB_LAYOUT_ROWS, (const uint8_t *)halves, 65536, 0, got);
    check(same(got, expected, 65536), "widening float16");
    free(halves), free(got), free(expected);
}

/* ---- attention ---- */

enum { RANGE_ALL, RANGE_CAUSAL, RANGE_WINDOW, RANGE_MIXED, RANGE_KINDS };

/* Random elements of a format and their scales, NaN where `values` is NaN; f32: the values themselves. */
static const void *stored(uint32_t format, const float *values, size_t n, uint8_t *block, float *scales,
                          const bool *seen) {
    if (format == COLIBRI_STATE_F32) {
        return values;
    }
    for (uint32_t key = 0; key < 64; key++) {
        scales[key] = seen[key] ? random_float() / 127.0f : NAN;
    }
    for (size_t i = 0; i < n; i++) {
        if (format == COLIBRI_STATE_F16) { /* below 2, some denormal */
            ((uint16_t *)(void *)block)[i] = isnan(values[i]) ? 0x7e00 : (uint16_t)(random_u32() & 0xbfff);
        } else {
            block[i] = (uint8_t)random_u32();
        }
    }
    return block;
}

static void test_attention(uint32_t format, uint32_t key_dim, uint32_t value_dim, uint32_t count, int range, int kind) {
    enum { BLOCKS = 3 };
    const uint64_t q_stride = key_dim + 2, out_stride = value_dim + 1;
    float *q = filled(count * q_stride, PLAIN), *k = floats((size_t)key_dim * 64), *v = floats(64 * (size_t)value_dim);
    uint8_t *stored_k = take((size_t)key_dim * 64 * 2), *stored_v = take(64 * (size_t)value_dim * 2);
    float key_scales[64], value_scales[64];
    bool seen[64];
    float *out[2], *m[2], *l[2];
    uint8_t *first = take(count), *last = take(count);
    cb_attention_block job = {.q = q,
                              .q_stride = q_stride,
                              .key_dim = key_dim,
                              .value_dim = value_dim,
                              .scale = 0.37f,
                              .count = count,
                              .first = first,
                              .last = last,
                              .out_stride = out_stride,
                              .format = format,
                              .key_scales = key_scales,
                              .value_scales = value_scales};
    for (int i = 0; i < 2; i++) {
        out[i] = floats(count * out_stride), m[i] = floats(count), l[i] = floats(count);
        memset(out[i], 0, count * out_stride * sizeof(float));
        for (uint32_t row = 0; row < count; row++) {
            m[i][row] = -INFINITY, l[i][row] = 0.0f;
        }
    }
    for (uint32_t block = 0; block < BLOCKS; block++) {
        uint32_t lowest = 64, highest = 0;
        for (uint32_t row = 0; row < count; row++) {
            const uint32_t a = random_u32() % 65, b = random_u32() % 65;
            first[row] = (uint8_t)(range == RANGE_WINDOW ? (row < 20 ? row : 20) : range == RANGE_MIXED ? a : 0);
            last[row] = (uint8_t)(range == RANGE_CAUSAL   ? (row * 7) % 65
                                  : range == RANGE_WINDOW ? 30 + row % 34
                                  : range == RANGE_MIXED  ? b
                                                          : 64);
            if (first[row] < last[row]) {
                lowest = first[row] < lowest ? first[row] : lowest;
                highest = last[row] > highest ? last[row] : highest;
            }
        }
        fill(k, (size_t)key_dim * 64, kind == ZEROS ? ZEROS : PLAIN);
        fill(v, 64 * (size_t)value_dim, kind == ZEROS ? ZEROS : PLAIN);
        for (uint32_t key = 0; key < 64; key++) { /* what no row sees was never written */
            seen[key] = key >= lowest && key < highest;
            for (uint32_t d = 0; !seen[key] && d < key_dim; d++) {
                k[d * 64 + key] = NAN;
            }
            for (uint32_t d = 0; !seen[key] && d < value_dim; d++) {
                v[key * value_dim + d] = NAN;
            }
        }
        if (kind == HUGE_VALUES) {
            for (size_t i = 0; i < (size_t)key_dim * 64; i++) {
                k[i] *= 300.0f; /* scores hundreds apart: most p vanish */
            }
        }
        if (kind == WITH_NAN && block == 1 && lowest < highest) {
            k[lowest] = NAN;
        }
        if (kind == WITH_INFINITY && lowest < highest) {
            v[lowest * value_dim] = INFINITY; /* seen by some rows alone; the others must not meet 0 * inf */
        }
        job.k = stored(format, k, (size_t)key_dim * 64, stored_k, key_scales, seen);
        job.v = stored(format, v, 64 * (size_t)value_dim, stored_v, value_scales, seen);
        job.m = m[1], job.l = l[1], job.out = out[1];
        naive_attention(&job);
        job.m = m[0], job.l = l[0], job.out = out[0];
        kernels->attention_block(&job);
    }
    check(same(m[0], m[1], count), "attention m format=%u %u %u count=%u range=%d kind=%d", format, key_dim, value_dim,
          count, range, kind);
    check(same(l[0], l[1], count), "attention l format=%u %u %u count=%u range=%d kind=%d", format, key_dim, value_dim,
          count, range, kind);
    check(same(out[0], out[1], count * out_stride), "attention out format=%u %u %u count=%u range=%d kind=%d", format,
          key_dim, value_dim, count, range, kind);
    for (int i = 0; i < 2; i++) {
        free(out[i]), free(m[i]), free(l[i]);
    }
    free(q), free(k), free(v), free(first), free(last), free(stored_k), free(stored_v);
}

/* The online form against softmax(scale q k) v in double, over several blocks. */
static void test_attention_means_softmax(void) {
    enum { DIM = 24, BLOCKS = 4, ROWS = 6 };
    float q[ROWS][DIM], k[BLOCKS][DIM][64], v[BLOCKS][64][DIM], out[ROWS][DIM] = {{0}}, m[ROWS], l[ROWS] = {0};
    uint8_t first[ROWS] = {0}, last[ROWS];
    fill(&q[0][0], ROWS * DIM, PLAIN), fill(&k[0][0][0], sizeof k / 4, PLAIN), fill(&v[0][0][0], sizeof v / 4, PLAIN);
    memset(last, 64, sizeof last);
    for (int row = 0; row < ROWS; row++) {
        m[row] = -INFINITY;
    }
    for (int block = 0; block < BLOCKS; block++) {
        const cb_attention_block job = {&q[0][0],
                                        DIM,
                                        &k[block][0][0],
                                        &v[block][0][0],
                                        DIM,
                                        DIM,
                                        0.5f,
                                        ROWS,
                                        first,
                                        last,
                                        m,
                                        l,
                                        &out[0][0],
                                        DIM,
                                        COLIBRI_STATE_F32,
                                        NULL,
                                        NULL};
        kernels->attention_block(&job);
    }
    for (int row = 0; row < ROWS; row++) {
        double sum = 0, expected[DIM] = {0};
        float y[DIM];
        for (int key = 0; key < BLOCKS * 64; key++) {
            double score = 0;
            for (int d = 0; d < DIM; d++) {
                score += (double)q[row][d] * (double)k[key / 64][d][key % 64];
            }
            sum += exp(0.5 * score);
            for (int d = 0; d < DIM; d++) {
                expected[d] += exp(0.5 * score) * (double)v[key / 64][key % 64][d];
            }
        }
        check(kernels->attention_finish(y, out[row], l[row], DIM), "attention_finish is finite");
        for (int d = 0; d < DIM; d++) {
            check(y[d] == out[row][d] * (1.0f / l[row]), "attention_finish");
            check(fabs((double)y[d] - expected[d] / sum) < 2e-6, "attention is not softmax: %a %a", (double)y[d],
                  expected[d] / sum);
        }
    }
}

/* One score of many that is not finite shows in the result, also where its weight would be 0, unless it is not seen. */
static void test_attention_hides_nothing(void) {
    enum { DIM = 16 };
    static const float bad[] = {NAN, INFINITY, -INFINITY, -3e38f};
    for (uint32_t i = 0; i < 4 * 64; i++) {
        const uint32_t place = i % 64;
        float q[DIM] = {2.0f}, k[DIM][64], v[64][DIM], out[DIM] = {0}, y[DIM], m = -INFINITY, l = 0.0f;
        fill(&k[0][0], DIM * 64, PLAIN), fill(&v[0][0], 64 * DIM, PLAIN);
        k[0][place] = bad[i / 64]; /* -3e38 times 2 overflows */
        const uint8_t first = 3, last = 60;
        const cb_attention_block job = {.q = q,
                                        .q_stride = DIM,
                                        .k = &k[0][0],
                                        .v = &v[0][0],
                                        .key_dim = DIM,
                                        .value_dim = DIM,
                                        .scale = 0.5f,
                                        .count = 1,
                                        .first = &first,
                                        .last = &last,
                                        .m = &m,
                                        .l = &l,
                                        .out = out,
                                        .out_stride = DIM};
        kernels->attention_block(&job);
        const bool seen = place >= first && place < last;
        check((bool)isnan(l) == seen, "attention with %g at key %u", (double)bad[i / 64], place);
        check(kernels->attention_finish(y, out, l, DIM) != seen, "attention_finish with %g", (double)bad[i / 64]);
        float out2[DIM] = {1.0f}, m2 = 0.0f, l2 = 1.0f; /* and a merge, from either side, keeps it */
        memcpy(y, out, sizeof y);
        kernels->attention_merge(&m2, &l2, out2, m, l, out, DIM);
        check((bool)isnan(l2) == seen, "attention_merge of %g", (double)bad[i / 64]);
        kernels->attention_merge(&m, &l, y, 0.0f, 1.0f, out2, DIM);
        check((bool)isnan(l) == seen, "attention_merge into %g", (double)bad[i / 64]);
    }
}

static void test_attention_merge(uint32_t n) {
    float *out = filled(n, ZEROS), *out2 = filled(n, PLAIN), *expected = floats(n);
    float m = -INFINITY, l = 0.0f;
    memset(out, 0, n * sizeof(float));
    out2[0] = -0.0f;
    kernels->attention_merge(&m, &l, out, 3.0f, 2.0f, out2, n);
    check(m == 3.0f && l == 2.0f && same(out, out2, n), "attention_merge into nothing changes bits, n=%u", n);
    kernels->attention_merge(&m, &l, out, -INFINITY, 0.0f, out2, n);
    check(m == 3.0f && l == 2.0f && same(out, out2, n), "attention_merge of nothing changes bits, n=%u", n);
    for (int i = 0; i < 50; i++) {
        const float m1 = random_float() * 30, l1 = 1 + fabsf(random_float()), m2 = random_float() * 30;
        const float l2 = 1 + fabsf(random_float());
        const float top = m2 > m1 ? m2 : m1, a = cb_exp(m1 - top), b = cb_exp(m2 - top);
        fill(out, n, PLAIN), fill(out2, n, PLAIN);
        for (uint32_t d = 0; d < n; d++) {
            const volatile float second = out2[d] * b;
            expected[d] = fmaf(out[d], a, second);
        }
        m = m1, l = l1;
        kernels->attention_merge(&m, &l, out, m2, l2, out2, n);
        check(m == top && l == fmaf(l1, a, l2 * b) && same(out, expected, n), "attention_merge n=%u", n);
    }
    m = -INFINITY, l = NAN, out[0] = NAN; /* a split whose scores were NaN is not taken for an empty one */
    kernels->attention_merge(&m, &l, out, 1.0f, 1.0f, out2, n);
    check(isnan(l) && isnan(out[0]), "attention_merge loses NaN");
    free(out), free(out2), free(expected);
}

static void test_attentions(void) {
    static const uint32_t dims[] = {1, 7, 16, 20, 64, 80, 128, 144};
    static const uint32_t counts[] = {1, 2, 3, 4, 5, 9, 33};
    static const int kinds[] = {PLAIN, ZEROS, HUGE_VALUES, WITH_NAN, WITH_INFINITY};
    for (uint32_t i = 0; i < 8 * 7 * RANGE_KINDS * 5; i++) {
        const int range = (int)(i / 56 % RANGE_KINDS);
        const int kind = kinds[i / 56 / RANGE_KINDS];
        for (uint32_t format = COLIBRI_STATE_F32; format <= (kind == PLAIN ? COLIBRI_STATE_Q8 : COLIBRI_STATE_F32);
             format++) {
            test_attention(format, dims[i % 8], dims[(i + i / 8) % 8], counts[i / 8 % 7], range, kind);
        }
    }
    for (uint32_t i = 0; i < 8; i++) {
        test_attention_merge(dims[i]);
    }
    test_attention_means_softmax();
    test_attention_hides_nothing();
}

/* ---- state ---- */

static void test_state(uint32_t format, uint32_t dim) {
    const size_t size = format == COLIBRI_STATE_F32 ? 4 : format == COLIBRI_STATE_F16 ? 2 : 1;
    uint8_t *key_block = take(64 * dim * size), *value_block = take(64 * dim * size);
    float *key_scales = filled(64, ZEROS), *value_scales = filled(64, ZEROS), *row = floats(dim);
    float *expected = floats(64 * (size_t)dim);
    memset(key_block, 0, 64 * dim * size), memset(value_block, 0, 64 * dim * size);
    for (uint32_t slot = 0; slot < 64; slot++) {
        const int kind = slot % 8 == 1 ? TINY : slot % 8 == 2 ? ZEROS : PLAIN;
        fill(row, dim, kind);
        if (slot % 4 == 3) {
            for (uint32_t d = 0; d < dim; d++) { /* around float16's normal and denormal steps, ties included */
                row[d] = (float)ldexp((double)(int32_t)(random_u32() % 8192) - 4096, -(int)(random_u32() % 28));
            }
        }
        float largest = 0.0f;
        for (uint32_t d = 0; d < dim; d++) {
            largest = fabsf(row[d]) > largest ? fabsf(row[d]) : largest;
        }
        for (uint32_t d = 0; d < dim; d++) {
            const float code = largest < 0x1p-100f ? 0.0f : rintf(row[d] * (127.0f / largest)) + 0.0f;
            expected[slot * dim + d] = format == COLIBRI_STATE_F32   ? row[d]
                                       : format == COLIBRI_STATE_F16 ? naive_round_half(row[d])
                                       : largest < 0x1p-100f         ? 0.0f
                                                                     : code * (largest / 127.0f);
        }
        check(kernels->put_key(format, key_block, key_scales, slot, row, dim), "put_key refuses, format %u", format);
        check(kernels->put_value(format, value_block, value_scales, slot, row, dim), "put_value refuses, format %u",
              format);
        for (uint32_t d = 0; d < dim; d++) {
            const float key = naive_element(format, key_block, key_scales, d * 64 + slot, slot);
            const float value = naive_element(format, value_block, value_scales, (size_t)slot * dim + d, slot);
            check(same(&key, &expected[slot * dim + d], 1), "put_key format=%u dim=%u slot=%u", format, dim, slot);
            check(same(&value, &expected[slot * dim + d], 1), "put_value format=%u dim=%u slot=%u", format, dim, slot);
        }
    }
    static const float misfits[] = {NAN, INFINITY, -INFINITY, 65520.0f, -65520.0f, 65519.996f};
    for (uint32_t i = 0; i < 6; i++) {
        const bool fits = isfinite(misfits[i]) && (format != COLIBRI_STATE_F16 || fabsf(misfits[i]) < 65520.0f);
        fill(row, dim, PLAIN);
        row[dim - 1] = misfits[i];
        check(kernels->put_key(format, key_block, key_scales, 0, row, dim) == fits &&
                  kernels->put_value(format, value_block, value_scales, 0, row, dim) == fits,
              "putting %a, format %u", (double)misfits[i], format);
    }
    free(key_block), free(value_block), free(key_scales), free(value_scales), free(row), free(expected);
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
    test_matmuls();
    test_decode_row();
    test_attentions();
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        for (uint32_t dim = 1; dim <= 130; dim += dim < 20 ? 5 : 37) {
            test_state(format, dim);
        }
    }
}

/* Of this thread alone, so that other programs disturb less. */
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Best of several runs over a matrix of about `bytes`, one thread, in the VM's portions of a few tiles. */
static double time_matmul(uint32_t format, uint64_t bytes, uint32_t count, uint64_t *total_bytes, uint64_t *weights) {
    enum { K = 2048, PORTION = 16 };
    naive_matrix shape = {.rows = 16 * PORTION, .cols = K, .format = format};
    shape.values = format <= CB_FORMAT_F16 ? (float *)(uintptr_t)64 : NULL; /* only its presence is looked at */
    const uint64_t portion_bytes = naive_packed_size(&shape, tile_layout(format));
    const uint64_t portions = bytes / portion_bytes + 1;
    uint8_t *data = cb_alloc(portions * portion_bytes);
    float *out = floats((size_t)count * 16 * PORTION);
    cb_rows x = random_rows(count, K, CODES_RANDOM);
    double best = 1e9;
    if (!data) {
        abort();
    }
    for (uint64_t i = 0; i < portions * portion_bytes; i += 2) { /* any numbers that are no denormals */
        data[i] = (uint8_t)random_u32();
        data[i + 1] = 0x2c;
    }
    for (int run = 0; run < 5; run++) {
        const double start = seconds();
        for (uint64_t portion = 0; portion < portions; portion++) {
            const cb_matmul job = {data + portion * portion_bytes, 16 * PORTION, K, &x, NULL, count, out, 16 * PORTION};
            kernels->matmul[format](&job);
        }
        const double taken = seconds() - start;
        best = taken < best ? taken : best;
    }
    *total_bytes = portions * portion_bytes;
    *weights = portions * 16 * PORTION * K;
    cb_free(data), free(out), free_rows(&x);
    return best;
}

static void bench_variant(uint64_t bytes_read) {
    const bool scalar = kernels->isa == CB_ISA_SCALAR;
    for (uint32_t f = 0; f < 5; f++) {
        uint64_t bytes, weights;
        const double one = time_matmul(formats[f], scalar ? bytes_read / 32 : bytes_read, 1, &bytes, &weights);
        printf("%-32s %8.2f GB/s", kernels->matmul_name[formats[f]], (double)bytes / one * 1e-9);
        const double many = time_matmul(formats[f], scalar ? 1u << 19 : 8u << 20, 64, &bytes, &weights);
        printf(" %8.1f GOPS\n", (double)weights * 2 * 64 / many * 1e-9);
    }
}

int main(int argument_count, char **arguments) {
    const bool bench = argument_count > 1 && strcmp(arguments[1], "bench") == 0;
    const uint64_t mebibytes = argument_count > 2 ? strtoull(arguments[2], NULL, 10) : 256;
    const cb_float_environment environment = cb_float_enter();
    kernels = cb_kernels_get(CB_ISA_SCALAR);
    if (!bench) {
        test_exp_and_log();
    }
    for (int isa = CB_ISA_SCALAR; isa < CB_ISA_COUNT; isa++) {
        if (!cb_isa_supported((cb_isa)isa)) {
            printf("%s: not supported by this CPU, not tested\n", cb_isa_name((cb_isa)isa));
            continue;
        }
        kernels = cb_kernels_get((cb_isa)isa);
        if (bench) {
            bench_variant(mebibytes << 20);
        } else {
            test_variant();
            printf("%s: done\n", cb_isa_name((cb_isa)isa));
        }
    }
    cb_float_leave(environment);
    if (!bench) {
        printf("%u failures\n", failures);
    }
    return failures != 0;
}
