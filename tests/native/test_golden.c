/* The numeric contract as hashes that every architecture shares: every kernel of every ISA this CPU has on fixed
 * inputs, and a model's logits and drawn tokens, against tests/native/golden.txt.
 *
 *   test_golden golden.txt model.cbi            compares
 *   test_golden golden.txt model.cbi renew      writes the file anew, from the scalar kernels
 *
 * Inputs come from an integer generator and exact scaling alone. Where a result may be NaN, any NaN counts as the
 * same. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "colibri.h"
#include "file/sha256.h"
#include "kernels/kernels.h"
#include "vm/ops_generated.h"

#define MOST_NAMES 64
#define NAME_SIZE 48

typedef struct golden {
    char name[NAME_SIZE];
    char hash[65];
} golden;

static golden known[MOST_NAMES];
static uint32_t known_count;
static bool seen[MOST_NAMES];
static bool renewing;
static unsigned failures;

static const cb_kernels *kernels; /* the variant under test */
static uint64_t random_state;

static void give_up(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    exit(2);
}

/* ---- inputs ---- */

static uint32_t random_u32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

/* In [-2, 2), a multiple of 2^-23: exact, whatever the rounding. */
static float random_float(void) { return (float)((int32_t)random_u32() >> 7) * 0x1p-23f; }

enum { PLAIN, SMALL, DENORMAL, LARGE, ZEROS, ANY_BITS, KINDS };

static void fill(float *x, size_t n, int kind) {
    for (size_t i = 0; i < n; i++) {
        const float value = random_float();
        const uint32_t bits = random_u32();
        x[i] = kind == SMALL      ? value * 0x1p-20f
               : kind == DENORMAL ? (float)((int32_t)(bits >> 12) - (1 << 19)) * 0x1p-149f
               : kind == LARGE    ? value * 0x1p100f
               : kind == ZEROS    ? (bits & 1 ? -0.0f : 0.0f)
                                  : value;
        if (kind == ANY_BITS) {
            memcpy(&x[i], &bits, 4);
        }
    }
}

/* ---- hashing ---- */

static cb_sha256 hash;

static void start(const char *name) {
    cb_sha256_start(&hash);
    random_state = 0x9e3779b97f4a7c15u;
    for (const char *c = name; *c; c++) { /* other inputs for each name, the same on every run */
        random_state = (random_state ^ (uint8_t)*c) * 0x100000001b3u;
    }
}

static void add_floats(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        bits = isnan(x[i]) ? 0x7fc00000u : bits;
        const uint8_t bytes[4] = {(uint8_t)bits, (uint8_t)(bits >> 8), (uint8_t)(bits >> 16), (uint8_t)(bits >> 24)};
        cb_sha256_add(&hash, bytes, 4);
    }
}

static void add_number(uint32_t value) {
    const uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16), (uint8_t)(value >> 24)};
    cb_sha256_add(&hash, bytes, 4);
}

static void finish(const char *name, const char *variant) {
    uint8_t digest[32];
    char text[65];
    cb_sha256_finish(&hash, digest);
    for (int i = 0; i < 32; i++) {
        snprintf(text + 2 * i, 3, "%02x", digest[i]);
    }
    uint32_t i = 0;
    while (i < known_count && strcmp(known[i].name, name) != 0) {
        i++;
    }
    if (i == known_count && renewing && known_count < MOST_NAMES) {
        snprintf(known[known_count].name, NAME_SIZE, "%s", name);
        snprintf(known[known_count++].hash, 65, "%s", text);
    } else if (i == known_count) {
        printf("FAIL %s: %s is not in the file of hashes\n", variant, name);
        failures++;
        return;
    }
    seen[i] = true;
    if (strcmp(known[i].hash, text) != 0) {
        printf("FAIL %s: %s has other bits: %s, expected %s\n", variant, name, text, known[i].hash);
        failures++;
    }
}

/* ---- kernels ---- */

static const uint32_t lengths[] = {1, 7, 16, 31, 128, 300};

static void elementwise(const char *name, int which) {
    float x[300], a[300], b[300];
    start(name);
    for (uint32_t i = 0; i < 6 * KINDS; i++) {
        const uint32_t n = lengths[i % 6];
        const int kind = (int)i / 6;
        fill(x, n, kind), fill(a, n, kind == LARGE ? PLAIN : kind), fill(b, n, PLAIN);
        const float scalar = random_float() * 8;
        switch (which) {
        case 0:
            kernels->add(x, a, b, n);
            break;
        case 1:
            kernels->clamp(a, x, -0.5f, 0.25f, n);
            add_floats(a, n);
            kernels->clamp(x, x, 0.0f, -0.0f, n); /* zeros of both signs pass as they are */
            break;
        case 2:
            kernels->silu_mul(x, x, b, n);
            break;
        case 3:
            kernels->sigmoid_scale(x, x, scalar, n);
            break;
        case 4:
            kernels->add_scaled(x, a, scalar, n);
            break;
        case 5:
            kernels->rms_norm(x, x, b, n, 1e-6f);
            break;
        default:
            kernels->softmax(x, n);
        }
        add_floats(x, n);
    }
    finish(name, cb_isa_name(kernels->isa));
}

static void rows(void) {
    static const char *const names[] = {"add",        "clamp",    "silu_mul", "sigmoid_scale",
                                        "add_scaled", "rms_norm", "softmax"};
    float x[300], scales[3];
    int8_t codes[384];
    int16_t sums[12];
    for (int which = 0; which < 7; which++) {
        elementwise(names[which], which);
    }
    start("quantise_row");
    for (uint32_t i = 0; i < 6 * KINDS; i++) {
        const uint32_t n = lengths[i % 6], blocks = (n + 127) / 128;
        fill(x, n, (int)i / 6);
        add_number(kernels->quantise_row(x, n, codes, scales, sums));
        add_number(kernels->all_finite(x, n));
        add_floats(scales, blocks);
        cb_sha256_add(&hash, codes, (uint64_t)blocks * 128);
        for (uint32_t j = 0; j < blocks * 4; j++) {
            add_number((uint32_t)sums[j]);
        }
    }
    finish("quantise_row", cb_isa_name(kernels->isa));
}

/* exp where x * log2(e) lies halfway between whole numbers, or next to it. */
static void exponent_halves(void) {
    float x[5], ones[5] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    start("silu_mul at halves");
    for (int n = -120; n <= 120; n++) {
        for (int i = 0; i < 5; i++) {
            const float near = ((float)n + 0.5f) / 0x1.715476p+0f;
            uint32_t bits;
            memcpy(&bits, &near, 4);
            bits += (uint32_t)(i - 2);
            memcpy(&x[i], &bits, 4);
        }
        kernels->silu_mul(x, x, ones, 5);
        add_floats(x, 5);
    }
    finish("silu_mul at halves", cb_isa_name(kernels->isa));
}

static void rope(void) {
    float frequencies[20], table[40], x[3 * 48];
    start("rope");
    for (uint32_t i = 0; i < 40; i++) {
        for (uint32_t j = 0; j < 20; j++) {
            frequencies[j] = (float)(random_u32() >> 8) * 0x1p-24f;
        }
        const uint32_t number = random_u32(), position = number >> (8 + random_u32() % 24);
        kernels->rope_table(table, frequencies, 20, position, 1.25f);
        add_floats(table, 40);
        fill(x, 3 * 48, PLAIN);
        kernels->rope(x, x, table, 3, 48, 40, i % 2 ? CB_PAIRING_HALF : CB_PAIRING_INTERLEAVED);
        add_floats(x, 3 * 48);
    }
    finish("rope", cb_isa_name(kernels->isa));
}

static const char *const state_names[] = {
    [COLIBRI_STATE_F32] = "f32", [COLIBRI_STATE_F16] = "f16", [COLIBRI_STATE_Q8] = "q8"};

/* What rows become in a block. */
static void state(uint32_t format) {
    enum { DIM = 36 };
    static uint8_t keys[64 * DIM * 4], values[64 * DIM * 4];
    float row[DIM], key_scales[64] = {0}, value_scales[64] = {0};
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "state %s", state_names[format]);
    start(name);
    memset(keys, 0, sizeof keys), memset(values, 0, sizeof values);
    for (uint32_t slot = 0; slot < 64; slot++) {
        fill(row, DIM, (int)(slot % KINDS));
        if (slot % KINDS == SMALL) { /* where float16 becomes denormal, ties included */
            for (uint32_t d = 0; d < DIM; d++) {
                row[d] = (float)((int32_t)(random_u32() % 8192) - 4096) * 0x1p-26f;
            }
        }
        add_number(kernels->put_key(format, keys, key_scales, slot, row, DIM));
        add_number(kernels->put_value(format, values, value_scales, slot, row, DIM));
    }
    cb_sha256_add(&hash, keys, sizeof keys), cb_sha256_add(&hash, values, sizeof values);
    add_floats(key_scales, 64), add_floats(value_scales, 64);
    finish(name, cb_isa_name(kernels->isa));
}

/* Two splits of three blocks, merged. */
static void attention(uint32_t format) {
    enum { ROWS = 9, KEY = 20, VALUE = 36 };
    static uint8_t k[KEY * 64 * 4], v[64 * VALUE * 4];
    float q[ROWS * KEY], key_scales[64], value_scales[64], x[VALUE];
    float out[2][ROWS * VALUE], m[2][ROWS], l[2][ROWS];
    uint8_t first[ROWS], last[ROWS];
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "attention %s", state_names[format]);
    start(name);
    for (uint32_t round = 0; round < 4; round++) {
        fill(q, ROWS * KEY, PLAIN);
        for (int split = 0; split < 2; split++) {
            memset(out[split], 0, sizeof out[split]);
            for (uint32_t row = 0; row < ROWS; row++) {
                m[split][row] = -INFINITY, l[split][row] = 0.0f;
            }
            for (uint32_t block = 0; block < 3; block++) {
                for (uint32_t row = 0; row < ROWS; row++) {
                    first[row] = (uint8_t)(round == 0 ? 0 : random_u32() % 40);
                    last[row] = (uint8_t)(round == 0 ? 64 : random_u32() % 65);
                }
                for (uint32_t slot = 0; slot < 64; slot++) {
                    fill(x, VALUE, PLAIN);
                    kernels->put_key(format, k, key_scales, slot, x, KEY);
                    kernels->put_value(format, v, value_scales, slot, x, VALUE);
                }
                const cb_attention_block job = {.q = q,
                                                .q_stride = KEY,
                                                .k = k,
                                                .v = v,
                                                .key_dim = KEY,
                                                .value_dim = VALUE,
                                                .scale = round == 3 ? 40.0f : 0.25f,
                                                .count = ROWS,
                                                .first = first,
                                                .last = last,
                                                .m = m[split],
                                                .l = l[split],
                                                .out = out[split],
                                                .out_stride = VALUE,
                                                .format = format,
                                                .key_scales = key_scales,
                                                .value_scales = value_scales};
                kernels->attention_block(&job);
            }
            add_floats(m[split], ROWS), add_floats(l[split], ROWS), add_floats(out[split], ROWS * VALUE);
        }
        for (uint32_t row = 0; row < ROWS; row++) {
            kernels->attention_merge(&m[0][row], &l[0][row], out[0] + row * VALUE, m[1][row], l[1][row],
                                     out[1] + row * VALUE, VALUE);
            kernels->attention_finish(out[0] + row * VALUE, out[0] + row * VALUE, l[0][row], VALUE);
        }
        add_floats(m[0], ROWS), add_floats(l[0], ROWS), add_floats(out[0], ROWS * VALUE);
    }
    finish(name, cb_isa_name(kernels->isa));
}

/* Random bytes are a matrix in every format; scales and halves only lose their largest exponents. */
static void matmul(uint32_t format) {
    enum { OUT = 70, IN = 300, COUNT = 11, BLOCKS = 3, TILES = 5 };
    static uint8_t tiles[TILES * 16 * IN * 4 + 64];
    static float values[COUNT * IN], scales[COUNT * BLOCKS], out[COUNT * OUT], decoded[IN];
    static int8_t codes[COUNT * BLOCKS * 128];
    static int16_t sums[COUNT * BLOCKS * 4];
    static const uint32_t index[COUNT] = {3, 3, 0, 10, 7, 1, 2, 9, 5, 4, 6};
    const uint32_t bits = cb_format_table[format].bits;
    const bool quantised = cb_format_table[format].group != 0;
    const uint32_t code_bytes = 16 * 128 * bits / 8, block_bytes = code_bytes + 4 * 16 * 2;
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "matmul %s", cb_format_table[format].name);
    start(name);
    if (bits != 32 && bits != 16 && cb_format_table[format].group != 32) {
        give_up("test_golden makes no matrix of format %s yet", cb_format_table[format].name);
    }
    for (uint32_t i = 0; i < TILES * 16 * IN; i++) {
        float value;
        fill(&value, 1, i % 50 == 0 ? DENORMAL : PLAIN);
        const uint32_t half = format == CB_FORMAT_F16 ? random_u32() & 0xbfff : 0;
        uint32_t word;
        memcpy(&word, &value, 4);
        word = format == CB_FORMAT_BF16 ? word >> 16 : format == CB_FORMAT_F16 ? half : word;
        if (!quantised) {
            memcpy(tiles + (size_t)i * bits / 8, &word, bits / 8);
        }
    }
    for (uint32_t i = 0; quantised && i < TILES * BLOCKS * block_bytes; i++) {
        const uint32_t place = i % block_bytes;
        const bool high = place >= code_bytes && place % 2 == 1; /* of a scale: below 2, some denormal */
        tiles[i] = (uint8_t)(random_u32() & (high ? 0xbf : 0xff));
    }
    for (uint32_t row = 0; row < COUNT; row++) {
        fill(values + row * IN, IN, row % 4 == 3 ? SMALL : PLAIN);
        cb_kernels_get(CB_ISA_SCALAR)
            ->quantise_row(values + row * IN, IN, codes + row * BLOCKS * 128, scales + row * BLOCKS,
                           sums + row * BLOCKS * 4);
    }
    const cb_rows x = {values, IN, codes, scales, sums};
    for (uint32_t count = 1; count <= COUNT; count++) {
        const cb_matmul job = {tiles, OUT, IN, &x, count % 2 ? NULL : index, count, out, OUT};
        kernels->matmul[format](&job);
        add_floats(out, (size_t)count * OUT);
    }
    for (uint32_t row = 0; row < OUT; row++) {
        kernels->decode_row(format, quantised ? CB_LAYOUT_TILED16X4 : CB_LAYOUT_TILED16, tiles, IN, row, decoded);
        add_floats(decoded, IN);
    }
    finish(name, cb_isa_name(kernels->isa));
}

static void scalar_functions(void) {
    float result[2];
    start("exp and log");
    for (uint32_t i = 0; i < 20000; i++) {
        result[0] = cb_exp(random_float() * 50.0f);
        uint32_t bits = random_u32() & 0x7fffffff;
        memcpy(&result[1], &bits, 4);
        result[1] = cb_log(result[1]);
        add_floats(result, 2);
    }
    finish("exp and log", "core");
}

/* A kernel that was added to the table is not forgotten here. */
_Static_assert(sizeof(cb_kernels) == (1 + 2 * CB_FORMAT_LIMIT + 17) * sizeof(void *), "new kernels need inputs here");

static void all_kernels(void) {
    rows();
    exponent_halves();
    rope();
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        state(format);
        attention(format);
    }
    for (uint32_t format = 0; format < CB_FORMAT_LIMIT; format++) {
        if (kernels->matmul[format] != NULL) {
            matmul(format);
        }
    }
}

/* ---- a model ---- */

static void expect(colibri_status status, const char *message) {
    if (status != COLIBRI_OK) {
        give_up("%s", message);
    }
}

/* A prompt at once, then tokens drawn one by one: every logit, and every token. */
static void model(const char *path, const char *cpu, uint32_t threads) {
    enum { PROMPT = 20, DRAWN = 8 };
    char message[COLIBRI_MESSAGE_SIZE] = "";
    const colibri_runtime_options options = {.threads = threads, .cpu = cpu};
    colibri_runtime *runtime;
    colibri_engine *engine;
    colibri_engine_info info;
    expect(colibri_init(&options, &runtime, message, sizeof message), message);
    expect(colibri_engine_open(runtime, path, NULL, &engine, message, sizeof message), message);
    colibri_engine_get_info(engine, &info);
    const uint64_t n = info.vocabulary_size;
    float *logits = malloc(PROMPT * n * sizeof *logits);
    void *scratch = malloc(colibri_sample_scratch_size(info.vocabulary_size));
    if (logits == NULL || scratch == NULL) {
        give_up("out of memory");
    }
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        char name[NAME_SIZE];
        snprintf(name, sizeof name, "model %s state", state_names[format]);
        const colibri_session_options session_options = {.context = PROMPT + DRAWN, .state_format = format};
        const colibri_sampling sampling = {
            .temperature = 1.0f, .top_p = 0.95f, .repetition_penalty = 1.1f, .top_logprobs = 3, .seed = 7};
        colibri_session *session;
        uint32_t tokens[PROMPT + DRAWN];
        start(name);
        for (uint32_t i = 0; i < PROMPT; i++) {
            tokens[i] = random_u32() % info.vocabulary_size;
        }
        expect(colibri_session_open(engine, &session_options, &session, message, sizeof message), message);
        for (uint32_t position = 0; position < PROMPT + DRAWN;) {
            const uint32_t count = position == 0 ? PROMPT : 1;
            colibri_item item = {.session = session,
                                 .tokens = tokens + position,
                                 .token_count = count,
                                 .logits_mode = COLIBRI_LOGITS_ALL,
                                 .logits = logits};
            colibri_sample_result drawn;
            expect(colibri_forward_batch(engine, &item, 1, message, sizeof message), message);
            expect(item.status, item.message);
            add_floats(logits, count * n);
            position += count;
            expect(colibri_sample(&sampling, logits + (count - 1) * n, info.vocabulary_size, NULL, tokens, position,
                                  PROMPT, position, scratch, &drawn, message, sizeof message),
                   message);
            add_number(drawn.token);
            add_floats(&drawn.logprob, 1);
            add_floats(drawn.top_logprobs, 3);
            if (position < PROMPT + DRAWN) {
                tokens[position] = drawn.token;
            }
        }
        finish(name, cpu);
        expect(colibri_session_close(session), "a session cannot be closed");
    }
    free(logits), free(scratch);
    expect(colibri_engine_close(engine), "the engine cannot be closed");
    expect(colibri_free(runtime), "the runtime cannot be closed");
}

/* ---- the file ---- */

static void read_known(const char *path) {
    char line[256];
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        give_up("%s cannot be read", path);
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (line[0] == '#') {
            continue;
        }
        golden *g = &known[known_count];
        if (known_count == MOST_NAMES || sscanf(line, "%64[0-9a-f] %47[^\n]", g->hash, g->name) != 2) {
            give_up("%s: '%s' is not a hash and a name, or there are more than %d", path, line, MOST_NAMES);
        }
        known_count++;
    }
    fclose(file);
}

static void write_known(const char *path) {
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        give_up("%s cannot be written", path);
    }
    fprintf(file,
            "# SHA-256 of what each kernel and the demo model give on fixed inputs, the same on every CPU. Made by\n"
            "# `test_golden <this file> <demo.cbi> renew`; docs/numerics.md says when that is right.\n");
    for (uint32_t i = 0; i < known_count; i++) {
        fprintf(file, "%s %s\n", known[i].hash, known[i].name);
    }
    if (fclose(file) != 0) {
        give_up("%s cannot be written", path);
    }
}

int main(int argument_count, char **arguments) {
    renewing = argument_count == 4 && strcmp(arguments[3], "renew") == 0;
    if (argument_count != 3 && !renewing) {
        give_up("usage: test_golden golden.txt model.cbi [renew]");
    }
    if (!renewing) {
        read_known(arguments[1]);
    }
    const int last = renewing ? CB_ISA_SCALAR : CB_ISA_COUNT - 1;
    for (int isa = CB_ISA_SCALAR; isa <= last; isa++) {
        cb_isa chosen;
        cb_error refusal;
        if (cb_isa_choose(cb_isa_name((cb_isa)isa), &chosen, &refusal) != COLIBRI_OK) {
            printf("not tested: %s\n", refusal.message);
            continue;
        }
        kernels = cb_kernels_get((cb_isa)isa);
        const cb_float_environment environment = cb_float_enter();
        if (isa == CB_ISA_SCALAR) {
            scalar_functions();
        }
        all_kernels();
        cb_float_leave(environment);
        model(arguments[2], cb_isa_name((cb_isa)isa), isa == CB_ISA_SCALAR ? 2 : 1 + (uint32_t)isa % 3);
        printf("%s: done\n", cb_isa_name((cb_isa)isa));
    }
    for (uint32_t i = 0; i < known_count; i++) {
        if (!seen[i]) {
            printf("FAIL: nothing makes '%s' any more; renew the file\n", known[i].name);
            failures++;
        }
    }
    if (renewing) {
        write_known(arguments[1]);
    }
    cb_isa best;
    cb_error error;
    if (cb_isa_choose(NULL, &best, &error) != COLIBRI_OK) {
        give_up("%s", error.message);
    }
    printf("chosen: %s\n%u failures\n", cb_isa_name(best), failures);
    return failures != 0;
}
