/* The sampler: frequencies against the probabilities, what each option keeps, and hostile arguments. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "colibri.h"

#define WORDS 1000

static colibri_sampling neutral(void) {
    return (colibri_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

static colibri_status sample(const colibri_sampling *sampling, const float *logits, const uint8_t *allowed,
                             uint64_t position, colibri_sample_result *result) {
    static uint8_t memory[3 * 4 * (WORDS + 16) + 128];
    static const uint32_t history[] = {3, 3, 5, 7, 7, 7};
    CHECK(colibri_sample_scratch_size(WORDS) < sizeof memory);
    return colibri_sample(sampling, logits, WORDS, allowed, history, 6, 3, position, memory + 1, result, NULL, 0);
}

static uint32_t token_of(const colibri_sampling *sampling, const float *logits, const uint8_t *allowed,
                         uint64_t position) {
    colibri_sample_result result;
    CHECK(sample(sampling, logits, allowed, position, &result) == COLIBRI_OK);
    return result.token;
}

/* Which of the first 8 ids ever come, as bits; any other id is bit 8. */
static uint32_t tokens_seen(const colibri_sampling *sampling, const float *logits, const uint8_t *allowed) {
    uint32_t seen = 0;
    for (uint64_t position = 0; position < 2000; position++) {
        uint32_t token = token_of(sampling, logits, allowed, position);
        seen |= 1u << (token < 8 ? token : 8);
    }
    return seen;
}

/* Ids 0 to 7 have the probabilities p, the rest none to speak of. */
static const double p[8] = {0.3, 0.3, 0.2, 0.1, 0.05, 0.03, 0.015, 0.005};
static float logits[WORDS];

static void test_frequencies(void) {
    colibri_sampling o = neutral();
    uint32_t counts[8] = {0};
    for (uint64_t position = 0; position < 40000; position++) {
        uint32_t token = token_of(&o, logits, NULL, position);
        CHECK(token < 8 && token == token_of(&o, logits, NULL, position));
        counts[token]++;
    }
    for (int i = 0; i < 8; i++)
        CHECK(fabs(counts[i] / 40000.0 - p[i]) < 4 * sqrt(p[i] / 40000));
    uint32_t equal = 0;
    for (uint64_t seed = 0; seed < 1000; seed++) {
        o.seed = seed;
        equal += token_of(&o, logits, NULL, 7) == token_of(&o, logits, NULL, 8);
    }
    CHECK(equal > 150 && equal < 320); /* sum of p^2 is 0.234 */
}

static void test_filters(void) {
    colibri_sampling o = neutral();
    o.top_k = 1; /* a tie: the lowest id */
    CHECK(tokens_seen(&o, logits, NULL) == 0x01);
    o.top_k = 4;
    CHECK(tokens_seen(&o, logits, NULL) == 0x0f);
    o = neutral();
    o.top_p = 0.75f;
    CHECK(tokens_seen(&o, logits, NULL) == 0x07);
    o.top_p = 0.25f;
    CHECK(tokens_seen(&o, logits, NULL) == 0x01);
    o.top_p = 0;
    CHECK(tokens_seen(&o, logits, NULL) == 0x01);
    o = neutral();
    o.min_p = 0.15f; /* 0.045 */
    CHECK(tokens_seen(&o, logits, NULL) == 0x1f);
    o.min_p = 1;
    CHECK(tokens_seen(&o, logits, NULL) == 0x03);
    o.top_p = 0.5f;
    o.top_k = 3;
    CHECK(tokens_seen(&o, logits, NULL) == 0x03);
    o = neutral();
    o.temperature = 0;
    CHECK(tokens_seen(&o, logits, NULL) == 0x01);
    o.temperature = 1e-30f;
    CHECK(tokens_seen(&o, logits, NULL) == 0x03);
    o.temperature = 1e30f; /* all alike */
    CHECK((tokens_seen(&o, logits, NULL) & 0x100) != 0);

    float alike[WORDS]; /* four of a quarter each: two reach a half exactly */
    for (uint32_t i = 0; i < WORDS; i++)
        alike[i] = i >= 2 && i < 6 ? 0 : -1000;
    o = neutral();
    o.top_p = 0.5f;
    CHECK(tokens_seen(&o, alike, NULL) == 0x0c);
}

static void test_mask_and_logprobs(void) {
    /* Ids that are not allowed have no part in draws, log-probabilities and top_k. */
    uint8_t allowed[WORDS / 8] = {0xfc - 0x20};
    colibri_sampling o = neutral();
    o.top_logprobs = 8;
    CHECK(tokens_seen(&o, logits, allowed) == 0xdc);
    colibri_sample_result result;
    CHECK(sample(&o, logits, allowed, 0, &result) == COLIBRI_OK);
    CHECK(result.top_tokens[0] == 2 && result.top_tokens[3] == 6 &&
          fabs(result.top_logprobs[0] - log(0.2 / 0.37)) < 1e-5);
    CHECK(result.top_logprobs[5] == -INFINITY);
    o.top_k = 2;
    CHECK(tokens_seen(&o, logits, allowed) == 0x0c);
    memset(allowed, 0, sizeof allowed);
    CHECK(sample(&o, logits, allowed, 0, &result) == COLIBRI_INVALID);
    o.top_k = 0;
    CHECK(sample(&o, logits, NULL, 0, &result) == COLIBRI_OK);
    CHECK(result.top_tokens[0] == 0 && result.top_tokens[1] == 1 && result.top_tokens[7] == 7);
    CHECK(result.top_logprobs[0] == result.top_logprobs[1]);
}

static void test_penalties(void) {
    colibri_sample_result result;
    /* History 3 3 5 | 7 7 7. Penalties do not touch log-probabilities. */
    float few[WORDS];
    for (uint32_t i = 0; i < WORDS; i++)
        few[i] = i == 7 ? 4.0f : i == 3 ? 3.0f : i == 2 ? 1.4f : i == 5 ? -1.0f : -50.0f;
    colibri_sampling o = neutral();
    o.temperature = 0;
    CHECK(token_of(&o, few, NULL, 0) == 7);
    o.frequency_penalty = 0.4f; /* 7 has 2.8 */
    CHECK(sample(&o, few, NULL, 0, &result) == COLIBRI_OK && result.token == 3);
    CHECK(fabs(result.logprob - (3 - log(exp(4) + exp(3) + exp(1.4) + exp(-1)))) < 1e-5);
    o.frequency_penalty = 0.3f; /* 3.1 */
    CHECK(token_of(&o, few, NULL, 0) == 7);
    o.presence_penalty = 0.2f; /* 2.9 */
    CHECK(token_of(&o, few, NULL, 0) == 3);
    o = neutral();
    o.temperature = 0;
    o.repetition_penalty = 2; /* 7 has 2, 3 has 1.5 */
    CHECK(token_of(&o, few, NULL, 0) == 7);
    o.repetition_penalty = 3;
    CHECK(token_of(&o, few, NULL, 0) == 2);
    few[2] = -1.5f; /* of negative logits, 5 falls to -3 and 2 keeps -1.5 */
    few[3] = few[7] = -60;
    CHECK(token_of(&o, few, NULL, 0) == 2);

    few[10] = 3e38f; /* extremes stay finite */
    o.repetition_penalty = 1e-6f;
    o.frequency_penalty = -1e6f;
    o.temperature = 1e-40f;
    CHECK(token_of(&o, few, NULL, 0) == 10);
    few[10] = NAN;
    CHECK(sample(&o, few, NULL, 0, &result) == COLIBRI_NON_FINITE);
    few[10] = INFINITY;
    CHECK(sample(&o, few, NULL, 0, &result) == COLIBRI_NON_FINITE);
}

static void test_arguments(void) {
    colibri_sample_result result;
    const colibri_sampling wrong[] = {
        {.temperature = -1, .top_p = 1, .repetition_penalty = 1},
        {.temperature = NAN, .top_p = 1, .repetition_penalty = 1},
        {.temperature = 1, .top_p = 1.5f, .repetition_penalty = 1},
        {.temperature = 1, .top_p = NAN, .repetition_penalty = 1},
        {.temperature = 1, .top_p = 1, .min_p = -1, .repetition_penalty = 1},
        {.temperature = 1, .top_p = 1, .repetition_penalty = 0},
        {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .frequency_penalty = INFINITY},
        {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .presence_penalty = NAN},
        {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .top_logprobs = 21},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(sample(&wrong[i], logits, NULL, 0, &result) == COLIBRI_INVALID);
}

int main(void) {
    for (uint32_t i = 0; i < WORDS; i++)
        logits[i] = i < 8 ? (float)log(p[i]) : -100;
    logits[0] = logits[1];
    test_frequencies();
    test_filters();
    test_mask_and_logprobs();
    test_penalties();
    test_arguments();
    puts("sample: all tests passed");
    return 0;
}
