/* Matmul and decode_row of every ISA this CPU has against naive.h, bit for bit. */
#include <pthread.h>

#include "kernel_test.h"

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

/* The processor says which registers hold something: AMX tiles left behind would cost every switch of threads 8 KiB,
 * and other code of the program its own tiles. */
static bool tiles_in_use(void) {
    uint32_t in_use = 0;
#ifdef __x86_64__
    if (kernels->isa == CB_ISA_AMX) {
        uint32_t high;
        __asm__ volatile("xgetbv" : "=a"(in_use), "=d"(high) : "c"(1));
    }
#endif
    return (in_use & (1u << 17 | 1u << 18)) != 0;
}

static void test_matmul(uint32_t format, uint32_t rows, uint32_t k, uint32_t count, int code_kind, int scale_kind) {
    naive_matrix w = random_matrix(format, rows, k, code_kind, scale_kind);
    uint8_t *tiles = pack(&w, tile_layout(format));
    cb_rows x = random_rows(count, k, code_kind);
    uint32_t *index = take(count * sizeof *index);
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
        check(!tiles_in_use(), "%s leaves tiles behind", kernels->matmul_name[format]);
        check(same(got, expected, count * stride), "%s rows=%u k=%u count=%u codes=%d scales=%d indexed=%d",
              kernels->matmul_name[format], rows, k, count, code_kind, scale_kind, indexed);
    }
    free(index), free(tiles), free(got), free(expected), free_rows(&x), free_matrix(&w);
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
            test_matmul(format, 20, 130, 31, kinds % CODE_KINDS, kinds / CODE_KINDS);
        }
        for (uint32_t count = 1; count <= 100; count++) {
            test_matmul(format, heights[count % 6], widths[count % 7], count, CODES_RANDOM, SCALES_PLAIN);
        }
        test_matmul(format, 33, 257, 128, CODES_RANDOM, SCALES_PLAIN);
        test_matmul(format, 16, 640, 129, CODES_RANDOM, SCALES_PLAIN);
        test_matmul(format, 40, 129, 200, CODES_RANDOM, SCALES_PLAIN);
        test_matmul(format, 700, 300, 40, CODES_RANDOM, SCALES_PLAIN); /* more tiles than a task of the VM has */
    }
}

/* A thread that never used the registers of an ISA before, as the first task of a worker is. */
static void *test_in_a_new_thread(void *unused) {
    cb_float_enter();
    test_matmul(CB_FORMAT_Q4_G32, 48, 300, 64, CODES_RANDOM, SCALES_PLAIN);
    test_matmul(CB_FORMAT_Q8_G32, 48, 300, 64, CODES_RANDOM, SCALES_PLAIN);
    return unused;
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

static void test_variant(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, test_in_a_new_thread, NULL) != 0 || pthread_join(thread, NULL) != 0) {
        abort();
    }
    test_matmuls();
    test_decode_row();
}

int main(void) { return for_all_variants(test_variant); }
