/* The runtime on a tiny model: equal bits however the work is cut, and every way to end a call.
 *
 *   test_vm tiny.cbi */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "float_mode.h"
#include "runtime/runtime.h"

#define LONG 2100 /* tokens: three attention splits */
#define SHORT 150

static const char *path;
static uint32_t vocabulary;
static uint32_t text[LONG];

typedef struct setup {
    colibri_runtime *runtime;
    colibri_engine *engine;
} setup;

static setup open_setup(uint32_t threads, const char *cpu, uint32_t batch) {
    char message[COLIBRI_MESSAGE_SIZE];
    setup s;
    colibri_runtime_options options = {.threads = threads, .cpu = cpu};
    colibri_engine_options engine_options = {.max_batch_tokens = batch};
    colibri_status status = colibri_init(&options, &s.runtime, message, sizeof message);
    if (status == COLIBRI_OK)
        status = colibri_engine_open(s.runtime, path, &engine_options, &s.engine, message, sizeof message);
    if (status != COLIBRI_OK)
        fprintf(stderr, "%s\n", message);
    CHECK(status == COLIBRI_OK);
    return s;
}

static void close_setup(setup s) {
    CHECK(colibri_free(s.runtime) == COLIBRI_BUSY);
    CHECK(colibri_engine_close(s.engine) == COLIBRI_OK);
    CHECK(colibri_free(s.runtime) == COLIBRI_OK);
}

static colibri_session *open_session(colibri_engine *engine, uint32_t context, uint32_t format) {
    char message[COLIBRI_MESSAGE_SIZE];
    colibri_session *session;
    colibri_session_options options = {context, format};
    CHECK(colibri_session_open(engine, &options, &session, message, sizeof message) == COLIBRI_OK);
    return session;
}

static float *new_logits(uint32_t rows) {
    float *logits = calloc((size_t)rows * vocabulary, sizeof *logits);
    CHECK(logits != NULL);
    return logits;
}

static bool same(const float *a, const float *b, uint32_t rows) {
    return memcmp(a, b, (size_t)rows * vocabulary * sizeof *a) == 0;
}

static colibri_item make_item(colibri_session *session, const uint32_t *tokens, uint32_t count, float *logits) {
    return (colibri_item){.session = session,
                          .tokens = tokens,
                          .token_count = count,
                          .logits_mode = logits != NULL ? COLIBRI_LOGITS_ALL : COLIBRI_LOGITS_NONE,
                          .logits = logits};
}

static void forward(colibri_engine *engine, colibri_session *session, const uint32_t *tokens, uint32_t count,
                    float *logits) {
    colibri_item item = make_item(session, tokens, count, logits);
    CHECK(colibri_forward_batch(engine, &item, 1, NULL, 0) == COLIBRI_OK);
    if (item.status != COLIBRI_OK)
        fprintf(stderr, "%s\n", item.message);
    CHECK(item.status == COLIBRI_OK);
}

/* Logits of text[0..count), computed `chunk` tokens at a time. */
static float *run_text(setup s, uint32_t count, uint32_t chunk, uint32_t format) {
    float *logits = new_logits(count);
    colibri_session *session = open_session(s.engine, count, format);
    for (uint32_t done = 0; done < count; done += chunk) {
        uint32_t n = count - done < chunk ? count - done : chunk;
        forward(s.engine, session, text + done, n, logits + (size_t)done * vocabulary);
        CHECK(colibri_position(session) == done + n);
    }
    CHECK(memcmp(colibri_tokens(session), text, count * sizeof *text) == 0);
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    return logits;
}

static void check_text(const float *expected, setup s, uint32_t count, uint32_t chunk, uint32_t format) {
    float *logits = run_text(s, count, chunk, format);
    CHECK(same(expected, logits, count));
    free(logits);
}

/* ---- equal bits ---- */

static void test_chunks(void) {
    setup s = open_setup(2, NULL, 0), narrow = open_setup(1, NULL, 13);
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        float *whole = run_text(s, SHORT, SHORT, format);
        CHECK(isfinite(whole[0]) && !same(whole, whole + vocabulary, 1));
        check_text(whole, s, SHORT, 7, format);
        check_text(whole, s, SHORT, 1, format);
        check_text(whole, narrow, SHORT, SHORT, format);
        free(whole);
    }
    close_setup(s);
    close_setup(narrow);
}

static void test_threads_and_cpus(void) {
    static const uint32_t threads[] = {1, 2, 3, 8};
    setup s = open_setup(1, "scalar", 0);
    float *expected = run_text(s, SHORT, SHORT, COLIBRI_STATE_F16);
    close_setup(s);
    for (int isa = 0; isa < CB_ISA_COUNT; isa++) {
        cb_error refused;
        if (cb_isa_choose(cb_isa_name((cb_isa)isa), &(cb_isa){0}, &refused) != COLIBRI_OK)
            continue;
        for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
            s = open_setup(threads[i], cb_isa_name((cb_isa)isa), 0);
            CHECK(colibri_thread_count(s.runtime) == threads[i]);
            CHECK(strcmp(colibri_cpu_name(s.runtime), cb_isa_name((cb_isa)isa)) == 0);
            check_text(expected, s, SHORT, 40, COLIBRI_STATE_F16);
            close_setup(s);
        }
    }
    free(expected);
}

/* Prompts take the splits in turn, single tokens side by side on several threads. */
static void test_splits(void) {
    setup one = open_setup(1, NULL, 64), many = open_setup(3, NULL, 0);
    float *expected = run_text(one, LONG, LONG, COLIBRI_STATE_F16);
    check_text(expected, many, LONG, 1000, COLIBRI_STATE_F16);
    colibri_session *session = open_session(many.engine, LONG, COLIBRI_STATE_F16);
    float *logits = new_logits(10);
    forward(many.engine, session, text, LONG - 10, NULL);
    for (uint32_t i = 0; i < 10; i++)
        forward(many.engine, session, text + LONG - 10 + i, 1, logits + (size_t)i * vocabulary);
    CHECK(same(expected + (size_t)(LONG - 10) * vocabulary, logits, 10));
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    free(logits);
    free(expected);
    close_setup(one);
    close_setup(many);
}

static const cb_op *first_attention(setup s) {
    const cb_op *op = s.engine->model->program.ops;
    while (op->opcode != CB_OP_ATTENTION)
        op++;
    return op;
}

static size_t attention_bytes(setup s) {
    return (size_t)LONG * s.engine->model->program.values[first_attention(s)->attention.y].width * sizeof(float);
}

/* Quantised matmuls hide most differences of one bit, so this one looks at attention itself: layer 0's op over
 * LONG positions with queries, keys and values made from the position, `chunk` at a time. */
static float *run_attention(setup s, uint32_t chunk, uint32_t format) {
    cb_vm *vm = s.engine->vm;
    const cb_program *program = &s.engine->model->program;
    const cb_op *op = first_attention(s);
    uint32_t width = program->values[op->attention.y].width;
    float *result = malloc(attention_bytes(s));
    CHECK(result != NULL && op->attention.window == 0);
    colibri_session *session = open_session(s.engine, LONG, format);
    for (uint32_t position = 0; position < LONG; position += chunk) {
        colibri_item item = {.status = COLIBRI_OK};
        uint32_t rows = LONG - position < chunk ? LONG - position : chunk;
        vm->pass.rows = rows;
        vm->pass.segment_count = 1;
        vm->pass.segments[0] = (cb_segment){.item = &item,
                                            .cancel = &session->cancel,
                                            .layout = &session->layout,
                                            .blocks = session->blocks,
                                            .count = rows,
                                            .position = position};
        for (uint32_t row = 0; row < rows; row++) {
            vm->pass.positions[row] = position + row;
            vm->pass.segment_of[row] = 0;
            uint32_t state = position + row;
            for (int operand = 1; operand < 4; operand++) /* q, k, v */
                for (uint32_t i = 0; i < program->values[op->words[operand]].width; i++) {
                    const cb_register *x = &vm->registers[op->words[operand]];
                    state = state * 1664525u + 1013904223u;
                    x->values[row * x->stride + i] = (float)(state >> 8) * 0x1p-23f - 1;
                }
        }
        cb_run_attention(vm, op);
        CHECK(item.status == COLIBRI_OK);
        const cb_register *y = &vm->registers[op->attention.y];
        for (uint32_t row = 0; row < rows; row++)
            memcpy(result + (size_t)(position + row) * width, y->values + row * y->stride, width * sizeof *result);
    }
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    return result;
}

static void test_attention(void) {
    setup one = open_setup(1, "scalar", 0), many = open_setup(3, NULL, 0);
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        static const uint32_t chunks[] = {500, 5, 1};
        float *expected = run_attention(one, 500, format);
        for (int i = 0; i < 3; i++) {
            float *again = run_attention(many, chunks[i], format);
            CHECK(memcmp(expected, again, attention_bytes(one)) == 0);
            free(again);
        }
        free(expected);
    }
    close_setup(one);
    close_setup(many);
}

static void test_batch(void) {
    enum { ITEMS = 7 };
    setup s = open_setup(2, NULL, 100);
    float *alone[ITEMS], *together[ITEMS];
    colibri_session *sessions[ITEMS];
    colibri_item items[ITEMS];
    for (uint32_t i = 0; i < ITEMS; i++) {
        uint32_t count = 1 + 17 * i; /* 364 rows: several passes, items cut anywhere */
        sessions[i] = open_session(s.engine, 200, 1 + i % 3);
        alone[i] = new_logits(count);
        together[i] = new_logits(count);
        forward(s.engine, sessions[i], text + 5 * i, i + 1, NULL);
        forward(s.engine, sessions[i], text + 9 * i, count, alone[i]);
        CHECK(colibri_truncate(sessions[i], i + 1, NULL, 0) == COLIBRI_OK);
        items[i] = make_item(sessions[i], text + 9 * i, count, together[i]);
    }
    items[3].logits_mode = COLIBRI_LOGITS_LAST;
    CHECK(colibri_forward_batch(s.engine, items, ITEMS, NULL, 0) == COLIBRI_OK);
    for (uint32_t i = 0; i < ITEMS; i++) {
        uint32_t count = 1 + 17 * i;
        CHECK(items[i].status == COLIBRI_OK && colibri_position(sessions[i]) == i + 1 + count);
        if (i == 3)
            CHECK(same(alone[i] + (size_t)(count - 1) * vocabulary, together[i], 1));
        else
            CHECK(same(alone[i], together[i], count));
        free(alone[i]);
        free(together[i]);
        CHECK(colibri_session_close(sessions[i]) == COLIBRI_OK);
    }
    close_setup(s);
}

static void test_truncate_and_restore(void) {
    setup s = open_setup(2, NULL, 0);
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++) {
        float *expected = run_text(s, SHORT, SHORT, format), *logits = new_logits(SHORT);
        colibri_session *session = open_session(s.engine, SHORT, format);
        colibri_session *other = open_session(s.engine, SHORT + 500, format);
        char message[COLIBRI_MESSAGE_SIZE];
        forward(s.engine, session, text, 70, NULL);
        forward(s.engine, session, text + 3, 60, NULL);
        CHECK(colibri_truncate(session, 131, message, sizeof message) == COLIBRI_INVALID);
        CHECK(colibri_truncate(session, 70, message, sizeof message) == COLIBRI_OK);

        uint64_t size = colibri_state_size(session);
        uint8_t *saved = malloc(size), *again = malloc(size);
        CHECK(saved != NULL && again != NULL);
        CHECK(colibri_state_save(session, saved, size - 1, message, sizeof message) == COLIBRI_INVALID);
        CHECK(colibri_state_save(session, saved, size, message, sizeof message) == COLIBRI_OK);
        forward(s.engine, session, text + 70, SHORT - 70, logits);
        CHECK(same(expected + (size_t)70 * vocabulary, logits, SHORT - 70));

        forward(s.engine, other, text + 11, 300, NULL);
        CHECK(colibri_state_restore(other, saved, size, message, sizeof message) == COLIBRI_OK);
        CHECK(colibri_position(other) == 70 && colibri_state_size(other) == size);
        CHECK(memcmp(colibri_tokens(other), text, 70 * sizeof *text) == 0);
        CHECK(colibri_state_save(other, again, size, message, sizeof message) == COLIBRI_OK);
        CHECK(memcmp(saved, again, size) == 0);
        forward(s.engine, other, text, 60, NULL);
        CHECK(colibri_truncate(other, 0, NULL, 0) == COLIBRI_OK);
        forward(s.engine, other, text, 70, NULL);
        CHECK(colibri_state_save(other, again, size, message, sizeof message) == COLIBRI_OK);
        CHECK(memcmp(saved, again, size) == 0); /* nothing of what either has truncated is in it */
        memset(logits, 0, (size_t)SHORT * vocabulary * sizeof *logits);
        forward(s.engine, other, text + 70, SHORT - 70, logits);
        CHECK(same(expected + (size_t)70 * vocabulary, logits, SHORT - 70));

        for (uint64_t i = 0; i < size; i += i < 400 ? 1 : 97) { /* any damage is seen and changes nothing */
            saved[i] ^= 0x10;
            CHECK(colibri_state_restore(session, saved, size, message, sizeof message) == COLIBRI_BAD_STATE);
            saved[i] ^= 0x10;
        }
        for (uint64_t cut = 0; cut < size; cut += 61)
            CHECK(colibri_state_restore(session, saved, cut, message, sizeof message) == COLIBRI_BAD_STATE);
        CHECK(colibri_position(session) == SHORT);
        colibri_session *small = open_session(s.engine, 69, format);
        colibri_session *unlike = open_session(s.engine, SHORT, format % 3 + 1);
        CHECK(colibri_state_restore(small, saved, size, message, sizeof message) == COLIBRI_BAD_STATE);
        CHECK(strstr(message, "70") != NULL && strstr(message, "69") != NULL);
        CHECK(colibri_state_restore(unlike, saved, size, message, sizeof message) == COLIBRI_BAD_STATE);
        CHECK(colibri_position(small) == 0 && colibri_position(unlike) == 0);
        CHECK(colibri_session_close(small) == COLIBRI_OK && colibri_session_close(unlike) == COLIBRI_OK);
        CHECK(colibri_session_close(session) == COLIBRI_OK && colibri_session_close(other) == COLIBRI_OK);
        free(saved);
        free(again);
        free(expected);
        free(logits);
    }
    close_setup(s);
}

static void test_float_environment(void) {
    setup s = open_setup(2, NULL, 0);
    float *expected = run_text(s, 40, 40, COLIBRI_STATE_F16);
    const uint64_t before = get_mode();
    set_mode(MODE_HOSTILE);
    float *logits = run_text(s, 40, 1, COLIBRI_STATE_F16);
    const uint64_t after = get_mode();
    set_mode(before);
    CHECK(after == MODE_HOSTILE);
    CHECK(same(expected, logits, 40));
    free(expected);
    free(logits);
    close_setup(s);
}

static void test_scores(void) {
    setup s = open_setup(2, NULL, 50);
    float *logits = run_text(s, SHORT, SHORT, COLIBRI_STATE_F16), scores[SHORT];
    colibri_session *session = open_session(s.engine, SHORT, COLIBRI_STATE_F16);
    colibri_item item = make_item(session, text, SHORT, NULL);
    item.scores = scores;
    CHECK(colibri_forward_batch(s.engine, &item, 1, NULL, 0) == COLIBRI_OK && item.status == COLIBRI_OK);
    CHECK(isnan(scores[SHORT - 1]) && colibri_position(session) == SHORT);
    void *scratch = malloc(colibri_sample_scratch_size(vocabulary));
    CHECK(scratch != NULL);
    for (uint32_t i = 0; i + 1 < SHORT; i++) {
        const float *row = logits + (size_t)i * vocabulary;
        double sum = 0;
        for (uint32_t id = 0; id < vocabulary; id++)
            sum += exp((double)row[id] - row[text[i + 1]]);
        CHECK(fabs(scores[i] + log(sum)) < 1e-5);
        /* The sampler gives the same bits. */
        colibri_sampling sampling = {.top_p = 1, .repetition_penalty = 1, .top_logprobs = 20};
        colibri_sample_result result;
        CHECK(colibri_sample(&sampling, row, vocabulary, NULL, NULL, 0, 0, i, scratch, &result, NULL, 0) == COLIBRI_OK);
        for (uint32_t j = 0; j < 20; j++)
            CHECK(result.top_tokens[j] != text[i + 1] || result.top_logprobs[j] == scores[i]);
    }
    free(scratch);
    free(logits);
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    close_setup(s);
}

/* ---- ways to end ---- */

/* Saves a session, makes a key of it NaN, and restores that. */
static void poison(colibri_session *session) {
    uint64_t size = colibri_state_size(session);
    uint32_t position = colibri_position(session);
    uint8_t *saved = malloc(size);
    CHECK(saved != NULL && colibri_state_save(session, saved, size, NULL, 0) == COLIBRI_OK);
    float nan = NAN;
    memcpy(saved + 64 + position * 4, &nan, sizeof nan); /* f32, layer 0: key 0 of dimension 0 */
    uint32_t crc = cb_crc32c(0, saved, size - 4);
    memcpy(saved + size - 4, &crc, sizeof crc);
    CHECK(colibri_state_restore(session, saved, size, NULL, 0) == COLIBRI_OK);
    free(saved);
}

static void test_failures(void) {
    setup s = open_setup(2, NULL, 64), elsewhere = open_setup(1, NULL, 0);
    float *expected = run_text(s, 100, 100, COLIBRI_STATE_F32), *logits = new_logits(100);
    colibri_session *good = open_session(s.engine, 100, COLIBRI_STATE_F32);
    colibri_session *bad = open_session(s.engine, 100, COLIBRI_STATE_F32);
    colibri_session *full = open_session(s.engine, 20, COLIBRI_STATE_F32);
    colibri_session *stranger = open_session(elsewhere.engine, 20, COLIBRI_STATE_F32);
    colibri_session *stopped = open_session(s.engine, 100, COLIBRI_STATE_F32);
    uint32_t wrong_token = vocabulary;
    forward(s.engine, bad, text, 10, NULL);
    forward(s.engine, full, text, 15, NULL);
    poison(bad);
    colibri_cancel(stopped);
    colibri_item items[] = {
        make_item(bad, text, 80, NULL),     make_item(good, text, 100, logits),     make_item(good, text, 1, NULL),
        make_item(full, text, 6, NULL),     make_item(stranger, text, 1, NULL),     make_item(NULL, text, 1, NULL),
        make_item(stopped, text, 90, NULL), make_item(NULL, &wrong_token, 1, NULL), make_item(NULL, text, 0, NULL),
        make_item(NULL, text, 1, NULL),
    };
    enum { COUNT = sizeof items / sizeof *items };
    colibri_session *spare[3];
    for (int i = 0; i < 3; i++)
        items[7 + i].session = spare[i] = open_session(s.engine, 5, COLIBRI_STATE_DEFAULT);
    items[9].logits_mode = COLIBRI_LOGITS_LAST; /* and no logits */
    static const colibri_status wanted[COUNT] = {
        COLIBRI_NON_FINITE, COLIBRI_OK,        COLIBRI_INVALID, COLIBRI_CONTEXT_FULL, COLIBRI_INVALID,
        COLIBRI_INVALID,    COLIBRI_CANCELLED, COLIBRI_INVALID, COLIBRI_INVALID,      COLIBRI_INVALID};
    CHECK(colibri_forward_batch(s.engine, items, COUNT, NULL, 0) == COLIBRI_OK);
    for (uint32_t i = 0; i < COUNT; i++) {
        if (items[i].status != wanted[i])
            fprintf(stderr, "item %u: status %d, %s\n", i, items[i].status, items[i].message);
        CHECK(items[i].status == wanted[i]);
        CHECK((items[i].message[0] == '\0') == (wanted[i] == COLIBRI_OK));
    }
    CHECK(strstr(items[0].message, "layer 0") != NULL);
    CHECK(strstr(items[3].message, "15") != NULL && strstr(items[3].message, "20") != NULL);
    CHECK(same(expected, logits, 100)); /* unchanged by what failed beside it */
    CHECK(colibri_position(good) == 100 && colibri_position(bad) == 10 && colibri_position(full) == 15);
    CHECK(colibri_position(stopped) == 0);
    forward(s.engine, stopped, text, 90, NULL); /* the flag is used up */
    forward(s.engine, full, text, 5, NULL);
    for (int i = 0; i < 3; i++)
        CHECK(colibri_session_close(spare[i]) == COLIBRI_OK);
    CHECK(colibri_engine_close(s.engine) == COLIBRI_BUSY);
    CHECK(colibri_session_close(good) == COLIBRI_OK && colibri_session_close(bad) == COLIBRI_OK);
    CHECK(colibri_session_close(full) == COLIBRI_OK && colibri_session_close(stopped) == COLIBRI_OK);
    CHECK(colibri_session_close(stranger) == COLIBRI_OK);
    free(expected);
    free(logits);
    close_setup(s);
    close_setup(elsewhere);
}

static void test_arguments(void) {
    char message[COLIBRI_MESSAGE_SIZE];
    colibri_runtime *runtime;
    colibri_engine *engine;
    colibri_session *session;
    colibri_runtime_options options = {.threads = 1, .cpu = "abacus"};
    CHECK(colibri_init(&options, &runtime, message, sizeof message) == COLIBRI_UNSUPPORTED && runtime == NULL);
    CHECK(strstr(message, "abacus") != NULL);
    options = (colibri_runtime_options){.threads = 100000};
    CHECK(colibri_init(&options, &runtime, message, sizeof message) == COLIBRI_INVALID);
    CHECK(colibri_init(NULL, &runtime, NULL, 0) == COLIBRI_OK && colibri_thread_count(runtime) >= 1);
    CHECK(colibri_engine_open(runtime, "/nowhere.cbi", NULL, &engine, message, sizeof message) == COLIBRI_IO);
    CHECK(engine == NULL && strstr(message, "/nowhere.cbi") != NULL);
    colibri_engine_options engine_options = {.max_batch_tokens = 65537};
    CHECK(colibri_engine_open(runtime, path, &engine_options, &engine, message, sizeof message) == COLIBRI_INVALID);
    CHECK(colibri_engine_open(runtime, path, NULL, &engine, NULL, 0) == COLIBRI_OK);
    static const colibri_session_options wrong[] = {{0, 0}, {(1u << 24) + 1, 0}, {1, 4}};
    for (int i = 0; i < 3; i++)
        CHECK(colibri_session_open(engine, &wrong[i], &session, message, sizeof message) == COLIBRI_INVALID);
    CHECK(session == NULL);
    CHECK(colibri_forward_batch(engine, NULL, 1, message, sizeof message) == COLIBRI_INVALID);
    CHECK(colibri_forward_batch(engine, NULL, 0, message, sizeof message) == COLIBRI_OK);
    colibri_expert_set_stats stats;
    CHECK(colibri_get_expert_stats(engine, 1000, &stats, NULL) == COLIBRI_INVALID);
    CHECK(colibri_engine_close(engine) == COLIBRI_OK && colibri_free(runtime) == COLIBRI_OK);
    CHECK(colibri_free(NULL) == COLIBRI_OK && colibri_engine_close(NULL) == COLIBRI_OK);
}

static void test_statistics(void) {
    setup s = open_setup(2, NULL, 60);
    colibri_engine_info info;
    colibri_engine_get_info(s.engine, &info);
    CHECK(info.vocabulary_size == vocabulary && info.max_batch_tokens == 60 && info.expert_bytes < info.weight_bytes);
    CHECK(info.scratch_bytes > 0 && info.expert_set_count == 2);
    free(run_text(s, SHORT, SHORT, COLIBRI_STATE_F32));
    colibri_stats stats;
    colibri_get_stats(s.engine, &stats);
    CHECK(stats.tokens == SHORT && stats.passes == 3 && stats.nanoseconds > 0);
    CHECK(strcmp(stats.cpu, colibri_cpu_name(s.runtime)) == 0);
    CHECK(strcmp(stats.matmul[1], s.runtime->kernels->matmul_name[1]) == 0);
    for (uint32_t set = 0; set < info.expert_set_count; set++) {
        colibri_expert_set_stats one;
        uint64_t counts[64], sum = 0;
        CHECK(colibri_get_expert_stats(s.engine, set, &one, NULL) == COLIBRI_OK && one.expert_count <= 64);
        CHECK(colibri_get_expert_stats(s.engine, set, &one, counts) == COLIBRI_OK);
        for (uint32_t i = 0; i < one.expert_count; i++)
            sum += counts[i];
        CHECK(one.layer == set && sum == one.expert_tokens && sum == 2 * SHORT);
        CHECK(one.experts_computed >= 3 * 2 && one.experts_computed <= 3 * one.expert_count);
    }
    close_setup(s);
}

typedef struct runner {
    colibri_engine *engine;
    colibri_session *session;
    colibri_item item;
    atomic_bool finished;
} runner;

static void *run_item(void *argument) {
    runner *r = argument;
    colibri_forward_batch(r->engine, &r->item, 1, NULL, 0);
    atomic_store(&r->finished, true);
    return NULL;
}

static void test_busy_and_cancel(void) {
    setup s = open_setup(2, "scalar", 0);
    enum { MANY = 60000 };
    uint32_t *tokens = malloc(MANY * sizeof *tokens);
    CHECK(tokens != NULL);
    for (uint32_t i = 0; i < MANY; i++)
        tokens[i] = text[i % LONG];
    runner r = {.engine = s.engine, .session = open_session(s.engine, MANY, COLIBRI_STATE_F16)};
    r.item = make_item(r.session, tokens, MANY, NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run_item, &r) == 0);
    colibri_stats stats = {0};
    while (stats.tokens == 0)
        colibri_get_stats(s.engine, &stats);
    colibri_item item = make_item(r.session, text, 1, NULL);
    CHECK(colibri_truncate(r.session, 0, NULL, 0) == COLIBRI_BUSY);
    CHECK(colibri_session_close(r.session) == COLIBRI_BUSY);
    CHECK(colibri_state_save(r.session, tokens, 0, NULL, 0) == COLIBRI_BUSY);
    CHECK(colibri_state_restore(r.session, tokens, 0, NULL, 0) == COLIBRI_BUSY);
    CHECK(!atomic_load(&r.finished)); /* so it was busy all the time */
    colibri_cancel(r.session);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(r.item.status == COLIBRI_CANCELLED && colibri_position(r.session) == 0);
    CHECK(colibri_forward_batch(s.engine, &item, 1, NULL, 0) == COLIBRI_OK && item.status == COLIBRI_OK);
    CHECK(colibri_session_close(r.session) == COLIBRI_OK);
    free(tokens);
    close_setup(s);
}

/* Several threads call forward on one engine: they queue, and each gets its bits. */
static void test_callers(void) {
    enum { CALLERS = 4 };
    setup s = open_setup(3, NULL, 30);
    float *expected = run_text(s, 90, 90, COLIBRI_STATE_F32);
    runner runners[CALLERS] = {0};
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) {
        runners[i].engine = s.engine;
        runners[i].session = open_session(s.engine, 90, COLIBRI_STATE_F32);
        runners[i].item = make_item(runners[i].session, text, 90, new_logits(90));
        CHECK(pthread_create(&threads[i], NULL, run_item, &runners[i]) == 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(runners[i].item.status == COLIBRI_OK && same(expected, runners[i].item.logits, 90));
        free(runners[i].item.logits);
        CHECK(colibri_session_close(runners[i].session) == COLIBRI_OK);
    }
    free(expected);
    close_setup(s);
}

static void test_fork(void) {
    setup s = open_setup(2, NULL, 0);
    colibri_session *session = open_session(s.engine, 10, COLIBRI_STATE_DEFAULT);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        colibri_item item = make_item(session, text, 1, NULL);
        colibri_engine *engine;
        colibri_session *another;
        colibri_session_options options = {1, 0};
        bool right = colibri_forward_batch(s.engine, &item, 1, NULL, 0) == COLIBRI_FORKED &&
                     item.status == COLIBRI_FORKED && colibri_truncate(session, 0, NULL, 0) == COLIBRI_FORKED &&
                     colibri_engine_open(s.runtime, path, NULL, &engine, NULL, 0) == COLIBRI_FORKED &&
                     colibri_session_open(s.engine, &options, &another, NULL, 0) == COLIBRI_FORKED &&
                     colibri_session_close(session) == COLIBRI_FORKED &&
                     colibri_engine_close(s.engine) == COLIBRI_FORKED && colibri_free(s.runtime) == COLIBRI_FORKED;
        _exit(right ? 0 : 1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    forward(s.engine, session, text, 1, NULL);
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    close_setup(s);
}

static void test_row_chunks(void) {
    for (uint32_t rows = 0; rows <= 5000; rows++) {
        const cb_row_chunks chunks = cb_cut_rows(rows);
        CHECK(chunks.rows <= CB_ROW_CHUNK && chunks.rows % CB_LANES == 0);
        CHECK((uint64_t)chunks.count * chunks.rows >= rows && (rows == 0 || (chunks.count - 1) * chunks.rows < rows));
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: test_vm tiny.cbi\n");
        return 2;
    }
    path = argv[1];
    CHECK(colibri_abi_version() == COLIBRI_ABI_VERSION);
    setup s = open_setup(1, NULL, 0);
    colibri_engine_info info;
    colibri_engine_get_info(s.engine, &info);
    vocabulary = info.vocabulary_size;
    close_setup(s);
    uint32_t state = 1;
    for (uint32_t i = 0; i < LONG; i++) {
        state = state * 1664525u + 1013904223u;
        text[i] = (state >> 16) % vocabulary;
    }
    test_row_chunks();
    test_chunks();
    test_threads_and_cpus();
    test_splits();
    test_attention();
    test_batch();
    test_truncate_and_restore();
    test_float_environment();
    test_scores();
    test_failures();
    test_arguments();
    test_statistics();
    test_busy_and_cancel();
    test_callers();
    test_fork();
    puts("vm: all tests passed");
    return 0;
}
