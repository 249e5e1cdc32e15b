/* Speed of a model with the experts of a layer grouped, or (built with EXPERTS_AT_ONCE=1) one by one:
 *
 *     grouped MODEL.cbi THREADS PROMPT BATCH STEPS
 *
 * prints one JSON object: seconds of the prompt, of all decode steps, and a sum over the bits of the last logits,
 * which both builds must agree on. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "colibri.h"

static void check(colibri_status status, const char *message) {
    if (status == COLIBRI_OK)
        return;
    fprintf(stderr, "%s\n", message);
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint32_t random_token(uint32_t vocabulary) {
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((state >> 33) % vocabulary);
}

static void forward(colibri_engine *engine, colibri_item *items, uint32_t count) {
    char message[COLIBRI_MESSAGE_SIZE];
    check(colibri_forward_batch(engine, items, count, message, sizeof message), message);
    for (uint32_t i = 0; i < count; i++)
        check(items[i].status, items[i].message);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s MODEL.cbi THREADS PROMPT BATCH STEPS\n", argv[0]);
        return 2;
    }
    char message[COLIBRI_MESSAGE_SIZE];
    const colibri_runtime_options options = {.threads = (uint32_t)atoi(argv[2])};
    const uint32_t prompt = (uint32_t)atoi(argv[3]), batch = (uint32_t)atoi(argv[4]), steps = (uint32_t)atoi(argv[5]);
    colibri_runtime *runtime;
    colibri_engine *engine;
    check(colibri_init(&options, &runtime, message, sizeof message), message);
    check(colibri_engine_open(runtime, argv[1], NULL, &engine, message, sizeof message), message);
    colibri_engine_info info;
    colibri_engine_get_info(engine, &info);
    const uint32_t vocabulary = info.vocabulary_size;
    const colibri_session_options session_options = {.context = prompt + steps};
    colibri_session **sessions = calloc(batch, sizeof *sessions);
    colibri_item *items = calloc(batch, sizeof *items);
    uint32_t *tokens = calloc((size_t)batch * prompt, sizeof *tokens);
    float *logits = calloc((size_t)batch * vocabulary, sizeof *logits);
    if (sessions == NULL || items == NULL || tokens == NULL || logits == NULL) {
        fprintf(stderr, "not enough memory\n");
        return 1;
    }
    double prompt_seconds = 0, step_seconds = 0;
    for (int round = 0; round < 2; round++) { /* the first warms up */
        for (uint32_t i = 0; i < batch; i++) {
            check(colibri_session_open(engine, &session_options, &sessions[i], message, sizeof message), message);
            items[i] = (colibri_item){.session = sessions[i],
                                      .tokens = tokens + (size_t)i * prompt,
                                      .token_count = prompt,
                                      .logits_mode = COLIBRI_LOGITS_LAST,
                                      .logits = logits + (size_t)i * vocabulary};
        }
        for (size_t i = 0; i < (size_t)batch * prompt; i++)
            tokens[i] = random_token(vocabulary);
        double start = now();
        forward(engine, items, batch);
        prompt_seconds = now() - start;
        start = now();
        for (uint32_t step = 0; step < steps; step++) {
            for (uint32_t i = 0; i < batch; i++) {
                tokens[(size_t)i * prompt] = random_token(vocabulary);
                items[i].token_count = 1;
            }
            forward(engine, items, batch);
        }
        step_seconds = now() - start;
        for (uint32_t i = 0; i < batch; i++)
            check(colibri_session_close(sessions[i]), "a session could not be closed");
    }
    uint64_t bits = 0;
    for (size_t i = 0; i < (size_t)batch * vocabulary; i++) {
        uint32_t word;
        memcpy(&word, &logits[i], sizeof word);
        bits = bits * 31 + word;
    }
    printf("{\"prompt_s\": %.6f, \"decode_s\": %.6f, \"bits\": %" PRIu64 "}\n", prompt_seconds, step_seconds, bits);
    check(colibri_engine_close(engine), "the engine could not be closed");
    check(colibri_free(runtime), "the runtime could not be freed");
    free(sessions), free(items), free(tokens), free(logits);
    return 0;
}
