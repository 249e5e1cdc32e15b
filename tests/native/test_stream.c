/* A model in less memory than its experts take: equal bits however little, and failures that reach only whom they
 * concern.
 *
 *   test_stream tiny.cbi FOLDER   FOLDER: for a copy that is damaged */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "runtime/runtime.h"

#define TOKENS 90

static const char *path;
static uint32_t vocabulary;
static uint32_t text[TOKENS];
static colibri_memory_plan plan;

typedef struct setup {
    colibri_runtime *runtime;
    colibri_engine *engine;
} setup;

static setup open_setup(const char *file, uint32_t threads, const colibri_engine_options *options) {
    char message[COLIBRI_MESSAGE_SIZE];
    setup s;
    colibri_runtime_options runtime_options = {.threads = threads};
    CHECK(colibri_init(&runtime_options, &s.runtime, message, sizeof message) == COLIBRI_OK);
    if (colibri_engine_open(s.runtime, file, options, &s.engine, message, sizeof message) != COLIBRI_OK) {
        fprintf(stderr, "%s\n", message);
        exit(1);
    }
    return s;
}

static void close_setup(setup s) {
    CHECK(colibri_engine_close(s.engine) == COLIBRI_OK);
    CHECK(colibri_free(s.runtime) == COLIBRI_OK);
}

static colibri_session *open_session(colibri_engine *engine, uint32_t format) {
    colibri_session *session;
    colibri_session_options options = {TOKENS, format};
    CHECK(colibri_session_open(engine, &options, &session, NULL, 0) == COLIBRI_OK);
    return session;
}

/* Logits of the text, computed `chunk` tokens at a time. */
static float *run_text(colibri_engine *engine, uint32_t chunk, uint32_t format) {
    float *logits = calloc((size_t)TOKENS * vocabulary, sizeof *logits);
    CHECK(logits != NULL);
    colibri_session *session = open_session(engine, format);
    for (uint32_t done = 0; done < TOKENS; done += chunk) {
        colibri_item item = {.session = session,
                             .tokens = text + done,
                             .token_count = TOKENS - done < chunk ? TOKENS - done : chunk,
                             .logits_mode = COLIBRI_LOGITS_ALL,
                             .logits = logits + (size_t)done * vocabulary};
        CHECK(colibri_forward_batch(engine, &item, 1, NULL, 0) == COLIBRI_OK);
        if (item.status != COLIBRI_OK)
            fprintf(stderr, "%s\n", item.message);
        CHECK(item.status == COLIBRI_OK);
    }
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    return logits;
}

static void check_text(const float *expected, colibri_engine *engine, uint32_t chunk, uint32_t format) {
    float *logits = run_text(engine, chunk, format);
    CHECK(memcmp(expected, logits, (size_t)TOKENS * vocabulary * sizeof *logits) == 0);
    free(logits);
}

static colibri_expert_set_stats sum_stats(const colibri_engine *engine) {
    colibri_expert_set_stats sum = {0}, one;
    for (uint32_t set = 0; colibri_get_expert_stats(engine, set, &one, NULL) == COLIBRI_OK; set++) {
        sum.hits += one.hits;
        sum.misses += one.misses;
        sum.bytes_read += one.bytes_read;
        sum.experts_computed += one.experts_computed;
        sum.prefetched += one.prefetched;
        sum.predictable += one.predictable;
        sum.predicted += one.predicted;
        sum.recalled += one.recalled;
        uint64_t loads[64] = {0}, times[64] = {0}, read = 0;
        CHECK(colibri_get_expert_loads(engine, set, loads, times) == COLIBRI_OK);
        for (uint32_t i = 0; i < one.expert_count; i++) {
            CHECK((loads[i] > 0) == (times[i] > 0));
            read += loads[i] * engine->model->sets[set].experts[i].size;
        }
        CHECK(read == one.bytes_read);
    }
    CHECK(colibri_get_expert_loads(engine, 1000, NULL, NULL) == COLIBRI_INVALID);
    return sum;
}

/* ---- equal bits ---- */

static void test_sizes(void) {
    static const uint32_t io_threads[] = {1, 2, 8}, chunks[] = {TOKENS, 7, 1};
    setup all = open_setup(path, 1, NULL);
    float *expected[4] = {NULL};
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++)
        expected[format] = run_text(all.engine, TOKENS, format);
    colibri_stats stats;
    colibri_get_stats(all.engine, &stats);
    CHECK(stats.resident == 1 && stats.predicted_passes == 0 && sum_stats(all.engine).misses == 0);
    close_setup(all);
    uint32_t round = 0;
    for (uint64_t bytes = plan.least_expert_bytes; bytes < plan.all_expert_bytes; bytes += plan.least_expert_bytes)
        for (int t = 0; t < 3; t++)
            for (uint32_t depth = 0; depth < 3; depth++, round++) {
                colibri_engine_options options = {.expert_bytes = bytes,
                                                  .io_threads = io_threads[t],
                                                  .prefetch_depth = depth,
                                                  .io = round % 3,
                                                  .verify = round % 3};
                setup s = open_setup(path, 1 + round % 3, &options);
                for (int i = 0; i < 3; i++) /* the first meets an empty store */
                    check_text(expected[1 + (round + i) % 3], s.engine, chunks[i], 1 + (round + i) % 3);
                colibri_expert_set_stats sum = sum_stats(s.engine);
                colibri_get_stats(s.engine, &stats);
                CHECK(stats.resident == 0 && sum.misses > 0 && sum.bytes_read > 0);
                CHECK(sum.hits + sum.misses == sum.experts_computed);
                CHECK((depth > 0) == (stats.predicted_passes > 0 && stats.unpredicted_passes > 0));
                CHECK((depth > 0) == (sum.predicted > 0 && sum.predictable > 0));
                CHECK(sum.recalled <= sum.predicted && sum.recalled <= sum.predictable);
                CHECK(depth > 0 || sum.prefetched == 0);
                close_setup(s);
            }
    for (uint32_t format = COLIBRI_STATE_F32; format <= COLIBRI_STATE_Q8; format++)
        free(expected[format]);
}

/* All rows of a pass go through a layer together: every expert is read once, however few have room. */
static void test_prompt_reads_once(void) {
    colibri_engine_options options = {.expert_bytes = plan.least_expert_bytes};
    setup s = open_setup(path, 2, &options);
    free(run_text(s.engine, TOKENS, COLIBRI_STATE_F32));
    CHECK(sum_stats(s.engine).misses <= plan.expert_count);
    CHECK(sum_stats(s.engine).misses == sum_stats(s.engine).experts_computed);
    close_setup(s);
}

static void test_warm(void) {
    char message[COLIBRI_MESSAGE_SIZE];
    uint32_t experts[] = {2, 0, 1};
    colibri_engine_options options = {.expert_bytes = plan.all_expert_bytes - 1};
    setup s = open_setup(path, 1, &options);
    CHECK(colibri_engine_warm(s.engine, 0, experts, 3, message, sizeof message) == COLIBRI_OK);
    for (int i = 0; i < 1000 && sum_stats(s.engine).bytes_read == 0; i++)
        usleep(10000);
    CHECK(sum_stats(s.engine).bytes_read > 0);
    CHECK(colibri_engine_warm(s.engine, 2, experts, 3, message, sizeof message) == COLIBRI_INVALID);
    CHECK(strstr(message, "set is 2") != NULL);
    experts[1] = 3;
    CHECK(colibri_engine_warm(s.engine, 1, experts, 3, message, sizeof message) == COLIBRI_INVALID);
    CHECK(strstr(message, "experts[1] is 3") != NULL);
    CHECK(colibri_engine_warm(s.engine, 0, NULL, 1, message, sizeof message) == COLIBRI_INVALID);
    close_setup(s);
}

/* ---- memory ---- */

static void test_options(void) {
    static const struct {
        const char *field;
        colibri_engine_options options;
    } wrong[] = {
        {"max_batch_tokens is 65537", {.max_batch_tokens = 65537}},
        {"io_threads is 17", {.io_threads = 17}},
        {"io is 3", {.io = 3}},
        {"verify is 3", {.verify = 3}},
        {"huge_pages is 4", {.huge_pages = 4}},
        {"prefetch_depth is 9", {.prefetch_depth = 9}},
        {"lock_memory is 2", {.lock_memory = 2}},
        {"guard is 2", {.guard = 2}},
        {"bytes for experts", {.expert_bytes = 1}},
    };
    colibri_runtime *runtime;
    char message[COLIBRI_MESSAGE_SIZE];
    CHECK(colibri_init(NULL, &runtime, NULL, 0) == COLIBRI_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        colibri_engine *engine;
        CHECK(colibri_engine_open(runtime, path, &wrong[i].options, &engine, message, sizeof message) ==
              COLIBRI_INVALID);
        CHECK(engine == NULL && strstr(message, wrong[i].field) != NULL);
    }
    colibri_session_options session = {.context = 0};
    colibri_memory_plan nothing;
    CHECK(colibri_plan_memory(runtime, path, NULL, &session, &nothing, message, sizeof message) == COLIBRI_INVALID);
    CHECK(strstr(message, "context is 0") != NULL);
    session.context = 1;
    CHECK(colibri_plan_memory(runtime, path, &wrong[1].options, &session, &nothing, message, sizeof message) ==
          COLIBRI_INVALID);
    CHECK(colibri_plan_memory(runtime, "/nowhere.cbi", NULL, &session, &nothing, message, sizeof message) ==
          COLIBRI_IO);
    CHECK(colibri_plan_memory(runtime, path, NULL, NULL, &nothing, message, sizeof message) == COLIBRI_INVALID);
    CHECK(colibri_free(runtime) == COLIBRI_OK);
}

static void test_plan(void) {
    static const uint32_t rows[] = {1, 64, 5000, 65536};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int streams = 0; streams < 2; streams++) {
            colibri_engine_options options = {.max_batch_tokens = rows[i],
                                              .prefetch_depth = 1,
                                              .expert_bytes = streams ? plan.least_expert_bytes : 0};
            colibri_session_options session_options = {.context = TOKENS, .state_format = COLIBRI_STATE_F32};
            colibri_memory_plan planned;
            setup s = open_setup(path, 3, &options);
            CHECK(colibri_plan_memory(s.runtime, path, &options, &session_options, &planned, NULL, 0) == COLIBRI_OK);
            colibri_engine_info info;
            colibri_engine_get_info(s.engine, &info);
            CHECK(planned.scratch_bytes == cb_alloc_bytes(info.scratch_bytes));
            CHECK(planned.tensor_bytes == cb_alloc_bytes(info.weight_bytes - info.expert_bytes));
            CHECK(info.expert_bytes <= (streams ? planned.least_expert_bytes : planned.all_expert_bytes));
            CHECK(planned.expert_count == plan.expert_count && planned.expert_set_count == info.expert_set_count);
            colibri_session *session = open_session(s.engine, COLIBRI_STATE_F32);
            CHECK(planned.session_bytes == atomic_load(&s.engine->state_bytes));
            CHECK(planned.session_bytes > session->block_count * session->layout.block_bytes);
            CHECK(colibri_session_close(session) == COLIBRI_OK);
            if (rows[i] >= TOKENS) /* all of a large arena is there */
                free(run_text(s.engine, TOKENS, COLIBRI_STATE_F32));
            close_setup(s);
        }
}

static void test_state_limit(void) {
    colibri_session_options small = {TOKENS, COLIBRI_STATE_F16}, large = {TOKENS, COLIBRI_STATE_F32};
    colibri_memory_plan of_small, of_large;
    char message[COLIBRI_MESSAGE_SIZE], figure[32];
    setup s = open_setup(path, 1, NULL);
    CHECK(colibri_plan_memory(s.runtime, path, NULL, &small, &of_small, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_plan_memory(s.runtime, path, NULL, &large, &of_large, NULL, 0) == COLIBRI_OK);
    CHECK(of_small.session_bytes < of_large.session_bytes);
    close_setup(s);
    colibri_engine_options options = {.state_bytes = 2 * of_small.session_bytes};
    s = open_setup(path, 1, &options);
    colibri_session *sessions[3];
    for (int round = 0; round < 3; round++) {
        CHECK(colibri_session_open(s.engine, &small, &sessions[0], NULL, 0) == COLIBRI_OK);
        CHECK(colibri_session_open(s.engine, &large, &sessions[1], message, sizeof message) == COLIBRI_OUT_OF_MEMORY);
        snprintf(figure, sizeof figure, "%llu", (unsigned long long)of_large.session_bytes);
        CHECK(sessions[1] == NULL && strstr(message, figure) != NULL);
        snprintf(figure, sizeof figure, "%llu", (unsigned long long)options.state_bytes);
        CHECK(strstr(message, figure) != NULL);
        CHECK(colibri_session_open(s.engine, &small, &sessions[1], NULL, 0) == COLIBRI_OK);
        CHECK(colibri_session_open(s.engine, &small, &sessions[2], NULL, 0) == COLIBRI_OUT_OF_MEMORY);
        CHECK(colibri_session_close(sessions[0]) == COLIBRI_OK && colibri_session_close(sessions[1]) == COLIBRI_OK);
        CHECK(atomic_load(&s.engine->state_bytes) == 0);
    }
    close_setup(s);
}

/* ---- failures ---- */

static void copy_file(const char *from, const char *to) {
    char buffer[4096];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    CHECK(in != NULL && out != NULL);
    for (size_t got; (got = fread(buffer, 1, sizeof buffer, in)) > 0;)
        CHECK(fwrite(buffer, 1, got, out) == got);
    CHECK(fclose(in) == 0 && fclose(out) == 0);
}

static void flip(const char *file, uint64_t offset) {
    uint8_t byte;
    int fd = open(file, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= 0x20;
    CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1 && close(fd) == 0);
}

static colibri_item one_token(colibri_session *session, const uint32_t *token, float *logits) {
    return (colibri_item){
        .session = session, .token_count = 1, .tokens = token, .logits_mode = COLIBRI_LOGITS_LAST, .logits = logits};
}

/* Which experts of layer 0 a first token chooses. */
static void experts_of(colibri_engine *engine, uint32_t token, bool *chosen, uint32_t count) {
    uint64_t before[64], after[64];
    float *logits = calloc(vocabulary, sizeof *logits);
    colibri_session *session = open_session(engine, COLIBRI_STATE_F32);
    colibri_item item = one_token(session, &token, logits);
    colibri_expert_set_stats stats;
    CHECK(colibri_get_expert_stats(engine, 0, &stats, before) == COLIBRI_OK);
    CHECK(colibri_forward_batch(engine, &item, 1, NULL, 0) == COLIBRI_OK && item.status == COLIBRI_OK);
    CHECK(colibri_get_expert_stats(engine, 0, &stats, after) == COLIBRI_OK);
    for (uint32_t i = 0; i < count; i++)
        chosen[i] = after[i] != before[i];
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    free(logits);
}

/* A record is damaged on the disk after the engine has opened: tokens that need the expert end, others beside them
 * get their bits, and the engine goes on when the file is whole again. */
static void test_damage(const char *folder) {
    char file[4096];
    snprintf(file, sizeof file, "%s/damaged-%d.cbi", folder, (int)getpid());
    copy_file(path, file);
    colibri_engine_options options = {
        .expert_bytes = plan.least_expert_bytes, .prefetch_depth = 1, .io = COLIBRI_IO_BUFFERED};
    setup s = open_setup(file, 2, &options);
    const cb_expert_set *set = &s.engine->model->sets[0];
    bool chosen[64][64];
    CHECK(vocabulary <= 64 && set->count <= 64);
    uint32_t expert = 0, with = UINT32_MAX, without = UINT32_MAX;
    for (uint32_t token = 0; token < vocabulary; token++)
        experts_of(s.engine, token, chosen[token], set->count);
    for (; expert < set->count && (with == UINT32_MAX || without == UINT32_MAX); expert++) {
        with = without = UINT32_MAX;
        for (uint32_t token = 0; token < vocabulary; token++)
            *(chosen[token][expert] ? &with : &without) = token;
    }
    expert--;
    CHECK(with != UINT32_MAX && without != UINT32_MAX);

    float *expected = calloc(vocabulary, sizeof *expected), *logits = calloc(vocabulary, sizeof *logits);
    float *unused = calloc(vocabulary, sizeof *unused);
    CHECK(expected != NULL && logits != NULL && unused != NULL);
    colibri_session *a = open_session(s.engine, COLIBRI_STATE_F32), *b = open_session(s.engine, COLIBRI_STATE_F32);
    colibri_item items[] = {one_token(a, &without, expected), {0}};
    CHECK(colibri_forward_batch(s.engine, items, 1, NULL, 0) == COLIBRI_OK && items[0].status == COLIBRI_OK);
    CHECK(colibri_truncate(a, 0, NULL, 0) == COLIBRI_OK);
    /* Whatever memory the expert still has is taken by the other one. */
    uint64_t at = set->experts[expert].offset + set->experts[expert].part[1];
    flip(file, at);
    for (int round = 0; round < 2; round++) {
        items[0] = one_token(b, &with, unused);
        items[1] = one_token(a, &without, logits);
        CHECK(colibri_forward_batch(s.engine, items, 2, NULL, 0) == COLIBRI_OK);
        if (round == 0) {
            char wanted[64], offset[64];
            snprintf(wanted, sizeof wanted, "expert %u of layer 0", expert);
            snprintf(offset, sizeof offset, "at offset %llu differs", (unsigned long long)set->experts[expert].offset);
            CHECK(items[0].status == COLIBRI_BAD_FILE && strstr(items[0].message, wanted) != NULL);
            CHECK(strstr(items[0].message, offset) != NULL && strstr(items[0].message, file) != NULL);
            flip(file, at);
        } else {
            CHECK(items[0].status == COLIBRI_OK);
        }
        CHECK(items[1].status == COLIBRI_OK && memcmp(expected, logits, vocabulary * sizeof *logits) == 0);
        CHECK(colibri_position(b) == (uint32_t)round && colibri_position(a) == 1);
        CHECK(colibri_truncate(a, 0, NULL, 0) == COLIBRI_OK);
    }
    CHECK(truncate(file, (off_t)at) == 0); /* and now the file is cut */
    CHECK(colibri_truncate(b, 0, NULL, 0) == COLIBRI_OK);
    items[0] = one_token(b, &without, unused);
    colibri_forward_batch(s.engine, items, 1, NULL, 0);
    items[0] = one_token(b, &with, unused);
    CHECK(colibri_truncate(b, 0, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_forward_batch(s.engine, items, 1, NULL, 0) == COLIBRI_OK);
    CHECK(items[0].status == COLIBRI_IO && strstr(items[0].message, file) != NULL && colibri_position(b) == 0);
    CHECK(colibri_session_close(a) == COLIBRI_OK && colibri_session_close(b) == COLIBRI_OK);
    free(expected);
    free(logits);
    free(unused);
    close_setup(s);
    CHECK(unlink(file) == 0);
}

typedef struct runner {
    colibri_engine *engine;
    colibri_item item;
} runner;

static void *run_item(void *argument) {
    runner *r = argument;
    colibri_forward_batch(r->engine, &r->item, 1, NULL, 0);
    return NULL;
}

static void test_cancel(void) {
    enum { MANY = 40000 };
    colibri_engine_options options = {
        .expert_bytes = plan.least_expert_bytes, .max_batch_tokens = 1, .prefetch_depth = 2};
    setup s = open_setup(path, 2, &options);
    colibri_session_options session_options = {MANY, COLIBRI_STATE_F16};
    colibri_session *session;
    uint32_t *tokens = malloc(MANY * sizeof *tokens);
    CHECK(tokens != NULL);
    for (uint32_t i = 0; i < MANY; i++)
        tokens[i] = text[i % TOKENS];
    CHECK(colibri_session_open(s.engine, &session_options, &session, NULL, 0) == COLIBRI_OK);
    runner r = {s.engine, {.session = session, .tokens = tokens, .token_count = MANY}};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run_item, &r) == 0);
    colibri_stats stats = {0};
    while (stats.tokens < 20)
        colibri_get_stats(s.engine, &stats);
    colibri_cancel(session);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(r.item.status == COLIBRI_CANCELLED && colibri_position(session) == 0);
    CHECK(colibri_session_close(session) == COLIBRI_OK);
    free(tokens);
    close_setup(s);
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: test_stream tiny.cbi FOLDER\n");
        return 2;
    }
    path = argv[1];
    setup s = open_setup(path, 1, NULL);
    colibri_session_options session = {.context = TOKENS};
    CHECK(colibri_plan_memory(s.runtime, path, NULL, &session, &plan, NULL, 0) == COLIBRI_OK);
    vocabulary = plan.vocabulary_size;
    close_setup(s);
    uint32_t state = 1;
    for (uint32_t i = 0; i < TOKENS; i++) {
        state = state * 1664525u + 1013904223u;
        text[i] = (state >> 16) % vocabulary;
    }
    CHECK(plan.least_expert_bytes > 0 && plan.least_expert_bytes < plan.all_expert_bytes);
    CHECK(plan.token_expert_bytes > 0 && plan.largest_layer_bytes <= plan.all_expert_bytes);
    test_sizes();
    test_prompt_reads_once();
    test_warm();
    test_options();
    test_plan();
    test_state_limit();
    test_damage(argv[2]);
    test_cancel();
    puts("stream: all tests passed");
    return 0;
}
