/* Attention and its state, in every ISA this CPU has, against naive.h, bit for bit. */
#include "kernel_test.h"

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
                                        NULL,
                                        block + 1 < BLOCKS ? k[block + 1] : NULL};
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
    static const uint32_t counts[] = {1, 2, 3, 5, 7, 9, 33};
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
    test_attentions();
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        for (uint32_t dim = 1; dim <= 130; dim += dim < 20 ? 5 : 37) {
            test_state(format, dim);
        }
    }
}

int main(void) { return for_all_variants(test_variant); }
