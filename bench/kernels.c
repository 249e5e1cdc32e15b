/* Times every kernel of every ISA that this CPU has; CSV on standard output.
 *
 *   kernels [--threads N] [--isa NAME] [--op NAME] [--format NAME] [--rows N] [--mib N]
 *
 * Matrices are larger than the caches for few rows (decoding reads them from memory: GB/s count), and 32 MiB for many
 * (prompts are bound by arithmetic: GOPS count, 2 for a multiplication and addition). They are read in the VM's
 * portions of a few tiles, on its own thread pool. Everything else runs on one thread over rows that fit the cache.
 * Each figure is the best of several passes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/kernels.h"
#include "vm/ops_generated.h"

enum { WIDTH = 2048, PORTION = 16, MANY = 16, MOST_ROWS = 64, HEAD_DIM = 128, HEADS = 16 };

static const struct {
    uint32_t id;
    const char *name;
} formats[] = {{CB_FORMAT_F32, "f32"},
               {CB_FORMAT_BF16, "bf16"},
               {CB_FORMAT_F16, "f16"},
               {CB_FORMAT_Q8_G32, "q8_g32"},
               {CB_FORMAT_Q4_G32, "q4_g32"}};
#define FORMATS (sizeof formats / sizeof *formats)

typedef struct choice {
    const char *isa, *op, *format; /* NULL: all */
    uint32_t rows;                 /* 0: all */
    uint32_t threads, mebibytes;
} choice;

static const cb_kernels *kernels;
static cb_pool *pool;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *take(uint64_t bytes) {
    void *memory = cb_alloc(bytes);
    if (!memory) {
        fprintf(stderr, "kernels: no memory for %llu bytes\n", (unsigned long long)bytes);
        exit(1);
    }
    return memory;
}

static uint32_t random_u32(void) {
    static uint64_t state = 0x9e3779b97f4a7c15u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static float *random_floats(uint64_t count) {
    float *x = take(count * sizeof(float));
    for (uint64_t i = 0; i < count; i++)
        x[i] = (float)(int32_t)random_u32() * 0x1p-31f;
    return x;
}

static void report(const char *op, const char *kernel, uint32_t rows, uint32_t threads, double taken, double bytes,
                   double operations) {
    printf("%s,%s,%s,%u,%u,%.4f,%.3f,%.2f\n", cb_isa_name(kernels->isa), op, kernel, rows, threads, taken * 1e6,
           bytes / taken * 1e-9, operations / taken * 1e-9);
    fflush(stdout);
}

/* ---- matmul ---- */

typedef struct product {
    const uint8_t *tiles;
    uint64_t portion_bytes;
    uint32_t format, count;
    const cb_rows *x;
    float *out; /* [thread][MOST_ROWS][16 * PORTION] */
} product;

static void multiply_portion(void *context, uint32_t task, uint32_t worker) {
    const product *p = context;
    const cb_matmul job = {.tiles = p->tiles + task * p->portion_bytes,
                           .rows = CB_LANES * PORTION,
                           .k = WIDTH,
                           .x = p->x,
                           .count = p->count,
                           .out = p->out + (uint64_t)worker * MOST_ROWS * CB_LANES * PORTION,
                           .out_stride = CB_LANES * PORTION};
    kernels->matmul[p->format](&job);
}

static uint64_t tile_bytes(uint32_t format) {
    const uint64_t weights = (uint64_t)CB_LANES * WIDTH;
    const uint64_t bits = cb_format_table[format].bits;
    return weights * bits / 8 + (cb_format_table[format].group ? weights / cb_format_table[format].group * 2 : 0);
}

static void time_matmul(uint32_t f, const choice *choice, uint32_t count, const cb_rows *x, float *out) {
    const uint32_t format = formats[f].id;
    uint64_t bytes = (uint64_t)(count >= MANY ? (choice->mebibytes < 32 ? choice->mebibytes : 32) : choice->mebibytes)
                     << 20;
    if (kernels->isa == CB_ISA_SCALAR)
        bytes /= 32;
    product p = {.portion_bytes = tile_bytes(format) * PORTION, .format = format, .count = count, .x = x, .out = out};
    const uint32_t portions = (uint32_t)(bytes / p.portion_bytes + 1);
    uint8_t *tiles = take(portions * p.portion_bytes);
    for (uint64_t i = 0; i < portions * p.portion_bytes; i += 2) { /* any numbers that are no denormals */
        tiles[i] = (uint8_t)(i * 2654435761u >> 16);
        tiles[i + 1] = 0x2c;
    }
    p.tiles = tiles;
    double best = 1e9;
    const double begin = seconds();
    for (int pass = 0; pass < 5 && (pass < 2 || seconds() - begin < 1); pass++) {
        const double start = seconds();
        cb_pool_run(pool, portions, multiply_portion, &p);
        const double taken = seconds() - start;
        best = taken < best ? taken : best;
    }
    const double weights = (double)portions * PORTION * CB_LANES * WIDTH;
    report("matmul", kernels->matmul_name[format], count, choice->threads, best,
           (double)portions * (double)p.portion_bytes, weights * 2 * count);
    cb_free(tiles);
}

static void time_matmuls(const choice *choice) {
    static const uint32_t counts[] = {1, 2, 4, 8, 16, 32, 64};
    float *values = random_floats((uint64_t)MOST_ROWS * WIDTH);
    float *out = take((uint64_t)choice->threads * MOST_ROWS * CB_LANES * PORTION * sizeof(float));
    int8_t *codes = take((uint64_t)MOST_ROWS * WIDTH);
    float *scales = take(MOST_ROWS * (WIDTH / CB_ACTIVATION_BLOCK) * sizeof(float));
    int16_t *sums = take(MOST_ROWS * (WIDTH / 32) * sizeof(int16_t));
    for (uint32_t i = 0; i < MOST_ROWS; i++)
        kernels->quantise_row(values + i * WIDTH, WIDTH, codes + i * WIDTH, scales + i * (WIDTH / CB_ACTIVATION_BLOCK),
                              sums + i * (WIDTH / 32));
    const cb_rows x = {.values = values, .stride = WIDTH, .codes = codes, .scales = scales, .sums = sums};
    for (uint32_t f = 0; f < FORMATS; f++)
        for (uint32_t i = 0; i < sizeof counts / sizeof *counts; i++)
            if ((choice->rows == 0 || choice->rows == counts[i]) &&
                (!choice->format || strcmp(choice->format, formats[f].name) == 0))
                time_matmul(f, choice, counts[i], &x, out);
    cb_free(values), cb_free(out), cb_free(codes), cb_free(scales), cb_free(sums);
}

/* ---- everything else ---- */

typedef struct buffers {
    float *x, *y, *z, *q, *m, *l;
    int8_t *codes;
    float *scales;
    int16_t *sums;
    void *keys, *values; /* a state block in its format */
    uint8_t *first, *last;
} buffers;

/* Best seconds of one execution of `body`, from passes of about a millisecond. */
#define TIME(result, body)                                                                                             \
    do {                                                                                                               \
        double best_ = 1e9;                                                                                            \
        uint32_t repeats_ = 1;                                                                                         \
        for (int pass_ = 0; pass_ < 12;) {                                                                             \
            const double start_ = seconds();                                                                           \
            for (uint32_t repeat_ = 0; repeat_ < repeats_; repeat_++) {                                                \
                body;                                                                                                  \
            }                                                                                                          \
            const double taken_ = seconds() - start_;                                                                  \
            if (taken_ < 1e-3) {                                                                                       \
                repeats_ *= 2;                                                                                         \
                continue;                                                                                              \
            }                                                                                                          \
            best_ = taken_ / repeats_ < best_ ? taken_ / repeats_ : best_;                                             \
            pass_++;                                                                                                   \
        }                                                                                                              \
        (result) = best_;                                                                                              \
    } while (0)

static bool wanted(const choice *choice, const char *op) { return !choice->op || strcmp(choice->op, op) == 0; }

static void time_rows(const choice *choice, const buffers *b) {
    double t;
    const double floats = sizeof(float);
    if (wanted(choice, "rms_norm")) {
        TIME(t, kernels->rms_norm(b->y, b->x, b->z, WIDTH, 1e-6f));
        report("rms_norm", "", 1, 1, t, 3 * WIDTH * floats, 0);
    }
    if (wanted(choice, "quantise_row")) {
        TIME(t, kernels->quantise_row(b->x, WIDTH, b->codes, b->scales, b->sums));
        report("quantise_row", "", 1, 1, t, WIDTH * (floats + 1), 0);
    }
    if (wanted(choice, "all_finite")) {
        TIME(t, kernels->all_finite(b->x, WIDTH));
        report("all_finite", "", 1, 1, t, WIDTH * floats, 0);
    }
    if (wanted(choice, "add")) {
        TIME(t, kernels->add(b->y, b->x, b->z, WIDTH));
        report("add", "", 1, 1, t, 3 * WIDTH * floats, 0);
    }
    if (wanted(choice, "clamp")) {
        TIME(t, kernels->clamp(b->y, b->x, -0.5f, 0.5f, WIDTH));
        report("clamp", "", 1, 1, t, 2 * WIDTH * floats, 0);
    }
    if (wanted(choice, "silu_mul")) {
        TIME(t, kernels->silu_mul(b->y, b->x, b->z, WIDTH));
        report("silu_mul", "", 1, 1, t, 3 * WIDTH * floats, 0);
    }
    if (wanted(choice, "sigmoid_scale")) {
        TIME(t, kernels->sigmoid_scale(b->y, b->x, 0.5f, WIDTH));
        report("sigmoid_scale", "", 1, 1, t, 2 * WIDTH * floats, 0);
    }
    if (wanted(choice, "add_scaled")) {
        TIME(t, kernels->add_scaled(b->y, b->x, 1e-9f, WIDTH));
        report("add_scaled", "", 1, 1, t, 3 * WIDTH * floats, 0);
    }
    if (wanted(choice, "softmax")) { /* of what it gave before: all the same to it */
        TIME(t, kernels->softmax(b->z, WIDTH));
        report("softmax", "", 1, 1, t, 2 * WIDTH * floats, 0);
    }
    if (wanted(choice, "rope_table")) {
        TIME(t, kernels->rope_table(b->y, b->x, HEAD_DIM / 2, 1000, 1.0f));
        report("rope_table", "", 1, 1, t, HEAD_DIM * floats, 0);
    }
    if (wanted(choice, "rope")) {
        TIME(t, kernels->rope(b->y, b->x, b->q, HEADS, HEAD_DIM, HEAD_DIM, CB_PAIRING_HALF));
        report("rope", "", 1, 1, t, 2 * HEADS * HEAD_DIM * floats, 0);
    }
}

static const struct {
    uint32_t id;
    const char *name;
    double bytes;
} state_formats[] = {{COLIBRI_STATE_F32, "f32", 4}, {COLIBRI_STATE_F16, "f16", 2}, {COLIBRI_STATE_Q8, "q8", 1}};

/* One block of keys and values in each format of the state. */
static void time_state(const choice *choice, const buffers *b, uint32_t f) {
    const uint32_t format = state_formats[f].id;
    const double row_bytes = HEAD_DIM * state_formats[f].bytes;
    double t;
    for (uint32_t slot = 0; slot < CB_KEY_BLOCK; slot++) {
        kernels->put_key(format, b->keys, b->scales, slot, b->q + slot * HEAD_DIM, HEAD_DIM);
        kernels->put_value(format, b->values, b->scales + CB_KEY_BLOCK, slot, b->q + slot * HEAD_DIM, HEAD_DIM);
    }
    if (wanted(choice, "put_key")) {
        TIME(t, kernels->put_key(format, b->keys, b->scales, 5, b->q, HEAD_DIM));
        report("put_key", state_formats[f].name, 1, 1, t, row_bytes + HEAD_DIM * sizeof(float), 0);
    }
    if (wanted(choice, "put_value")) {
        TIME(t, kernels->put_value(format, b->values, b->scales + CB_KEY_BLOCK, 5, b->q, HEAD_DIM));
        report("put_value", state_formats[f].name, 1, 1, t, row_bytes + HEAD_DIM * sizeof(float), 0);
    }
    for (uint32_t rows = 1; rows <= MOST_ROWS && wanted(choice, "attention_block"); rows *= 2) {
        if (choice->rows && choice->rows != rows)
            continue;
        const cb_attention_block job = {.q = b->q,
                                        .q_stride = HEAD_DIM,
                                        .k = b->keys,
                                        .v = b->values,
                                        .key_dim = HEAD_DIM,
                                        .value_dim = HEAD_DIM,
                                        .scale = 0.1f,
                                        .count = rows,
                                        .first = b->first,
                                        .last = b->last,
                                        .m = b->m,
                                        .l = b->l,
                                        .out = b->y,
                                        .out_stride = HEAD_DIM,
                                        .format = format,
                                        .key_scales = b->scales,
                                        .value_scales = b->scales + CB_KEY_BLOCK};
        memset(b->y, 0, (size_t)rows * HEAD_DIM * sizeof(float));
        for (uint32_t i = 0; i < rows; i++)
            b->first[i] = 0, b->last[i] = CB_KEY_BLOCK, b->m[i] = -1.0f, b->l[i] = 1.0f;
        TIME(t, kernels->attention_block(&job));
        report("attention_block", state_formats[f].name, rows, 1, t, 2 * CB_KEY_BLOCK * row_bytes,
               4.0 * CB_KEY_BLOCK * HEAD_DIM * rows);
    }
}

static void time_attention(const choice *choice, const buffers *b) {
    double t;
    for (uint32_t f = 0; f < sizeof state_formats / sizeof *state_formats; f++)
        time_state(choice, b, f);
    if (wanted(choice, "attention_merge")) {
        float m = 0, l = 1;
        TIME(t, kernels->attention_merge(&m, &l, b->y, -1.0f, 1.0f, b->q, HEAD_DIM));
        report("attention_merge", "", 1, 1, t, 3 * HEAD_DIM * sizeof(float), 0);
    }
    if (wanted(choice, "attention_finish")) {
        TIME(t, kernels->attention_finish(b->y, b->q, 3.0f, HEAD_DIM));
        report("attention_finish", "", 1, 1, t, 2 * HEAD_DIM * sizeof(float), 0);
    }
}

static void time_variant(const choice *choice, const buffers *b) {
    if (wanted(choice, "matmul"))
        time_matmuls(choice);
    time_rows(choice, b);
    time_attention(choice, b);
}

static bool parse(int count, char **arguments, choice *choice) {
    for (int i = 1; i < count; i += 2) {
        const char *value = i + 1 < count ? arguments[i + 1] : "";
        char *end;
        const unsigned long number = strtoul(value, &end, 10);
        const bool is_number = *value >= '0' && *value <= '9' && !*end && number > 0 && number <= 1u << 16;
        if (strcmp(arguments[i], "--isa") == 0 && *value)
            choice->isa = value;
        else if (strcmp(arguments[i], "--op") == 0 && *value)
            choice->op = value;
        else if (strcmp(arguments[i], "--format") == 0 && *value)
            choice->format = value;
        else if (strcmp(arguments[i], "--rows") == 0 && is_number)
            choice->rows = (uint32_t)number;
        else if (strcmp(arguments[i], "--threads") == 0 && is_number)
            choice->threads = (uint32_t)number;
        else if (strcmp(arguments[i], "--mib") == 0 && is_number)
            choice->mebibytes = (uint32_t)number;
        else
            return false;
    }
    return true;
}

int main(int argument_count, char **arguments) {
    choice choice = {.threads = 1, .mebibytes = 256};
    if (!parse(argument_count, arguments, &choice)) {
        fprintf(stderr, "usage: kernels [--threads N] [--isa NAME] [--op NAME] [--format NAME] [--rows N] [--mib N]\n");
        return 2;
    }
    cb_error error;
    if (cb_pool_open(choice.threads, NULL, &pool, &error) != COLIBRI_OK) {
        fprintf(stderr, "kernels: %s\n", error.message);
        return 1;
    }
    const uint64_t floats = (uint64_t)MOST_ROWS * HEAD_DIM * CB_KEY_BLOCK;
    buffers b = {.x = random_floats(floats),
                 .y = random_floats(floats),
                 .z = random_floats(floats),
                 .q = random_floats(floats),
                 .m = random_floats(MOST_ROWS),
                 .l = random_floats(MOST_ROWS),
                 .codes = take(WIDTH),
                 .scales = take(WIDTH * sizeof(float)),
                 .sums = take(WIDTH * sizeof(int16_t)),
                 .keys = take(CB_KEY_BLOCK * HEAD_DIM * sizeof(float)),
                 .values = take(CB_KEY_BLOCK * HEAD_DIM * sizeof(float)),
                 .first = take(MOST_ROWS),
                 .last = take(MOST_ROWS)};
    const cb_float_environment environment = cb_float_enter();
    printf("isa,op,kernel,rows,threads,microseconds,gb_per_s,gops\n");
    bool any = false;
    for (int i = 0; i < CB_ISA_COUNT; i++) {
        cb_isa isa;
        /* Choosing, not only asking what the CPU has: some instructions need the kernel's permission. */
        if ((choice.isa && strcmp(choice.isa, cb_isa_name((cb_isa)i)) != 0) ||
            cb_isa_choose(cb_isa_name((cb_isa)i), &isa, &error) != COLIBRI_OK)
            continue;
        kernels = cb_kernels_get(isa);
        time_variant(&choice, &b);
        any = true;
    }
    cb_float_leave(environment);
    cb_pool_close(pool);
    cb_free(b.x), cb_free(b.y), cb_free(b.z), cb_free(b.q), cb_free(b.m), cb_free(b.l), cb_free(b.codes);
    cb_free(b.scales), cb_free(b.sums), cb_free(b.keys), cb_free(b.values), cb_free(b.first), cb_free(b.last);
    if (!any)
        fprintf(stderr, "kernels: this CPU has no %s\n", choice.isa);
    return any ? 0 : 1;
}
