/* Drawing a token. The bits of the draw depend on the arguments alone, not on the CPU.
 *
 * 1. Ids that are not allowed have no part in anything.
 * 2. Log-probabilities: cb_log_softmax of the logits.
 * 3. Repetition penalty for every id in history (positive logits are divided, others multiplied), then for ids from
 *    prompt_count on: logit - frequency_penalty * count - presence_penalty. Each step is rounded to float and kept
 *    finite.
 * 4. Temperature 0: the largest logit, ties to the lowest id. Else scaled = (logit - largest) / temperature.
 * 5. top_k: the k largest, ties to the lowest ids. p = softmax of the scaled logits of those left.
 * 6. top_p: of the ids by falling p (ties by id) the shortest start whose sum reaches top_p * the sum of all.
 *    min_p: p below min_p * the largest p is dropped. The largest always stays.
 * 7. Over the ids left in ascending order, whatever the options, the first whose running sum exceeds u * their sum,
 *    with u = the upper 24 bits of a hash of (seed, position), times 2^-24.
 * Sums of probabilities are doubles, added in the order named. */
#include <stdint.h>
#include <string.h>

#include "vm/vm.h"

#define LARGEST_FLOAT 0x1.fffffep+127f
#define SEEN 0x80000000u /* in a count: the id occurs in history */

typedef struct sampler {
    const colibri_sampling *options;
    const cb_kernels *kernels;
    const uint8_t *allowed;
    uint32_t vocabulary;
    float *values; /* scaled logits, then probabilities */
    float *log_probabilities;
    uint32_t *ids; /* heap, or counts of history */
} sampler;

/* Every variant gives the same bits: the fastest is as good as the runtime's. Nothing here multiplies matrices, so
 * AMX tiles need not be asked for. */
static const cb_kernels *best_kernels(void) {
    static const cb_kernels *_Atomic chosen;
    const cb_kernels *kernels = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (kernels == NULL) {
        int isa = CB_ISA_COUNT - 1;
        while (!cb_isa_supported((cb_isa)isa))
            isa--;
        kernels = cb_kernels_get((cb_isa)isa);
        atomic_store_explicit(&chosen, kernels, memory_order_relaxed);
    }
    return kernels;
}

static bool is_allowed(const sampler *s, uint32_t id) {
    return s->allowed == NULL || (s->allowed[id / 8] >> (id % 8) & 1) != 0;
}

/* ---- a heap of ids: the largest value first, ties to the lowest id ---- */

static bool before(const float *values, uint32_t a, uint32_t b) {
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

static void sink(uint32_t *heap, uint32_t count, uint32_t at, const float *values) {
    uint32_t id = heap[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(values, heap[child + 1], heap[child]))
            child++;
        if (!before(values, heap[child], id))
            break;
        heap[at] = heap[child];
    }
    heap[at] = id;
}

/* Floats of one sign by their upper bits: 8 bins for each power of two, infinity in the last but a few. Bins are
 * cheap to count, and leave the heap few ids to put in order. */
#define BINS 2048

static uint32_t bin_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffffu) >> 20;
}

/* The ids whose values lie in bins [low, high], as a heap. */
static uint32_t make_heap(const sampler *s, const float *values, uint32_t low, uint32_t high) {
    uint32_t count = 0;
    for (uint32_t id = 0; id < s->vocabulary; id++) {
        uint32_t bin = bin_of(values[id]);
        s->ids[count] = id;
        count += bin >= low && bin <= high;
    }
    for (uint32_t i = count / 2; i-- > 0;)
        sink(s->ids, count, i, values);
    return count;
}

/* A heap that holds the `wanted` largest of values that are at most 0, or all but -inf when there are fewer. */
static uint32_t heap_of_largest(const sampler *s, const float *values, uint32_t wanted) {
    uint32_t counts[BINS] = {0}, infinite = bin_of(__builtin_inff()), bin = 0, count = 0;
    for (uint32_t id = 0; id < s->vocabulary; id++)
        counts[bin_of(values[id])]++;
    while (count + counts[bin] < wanted && bin + 1 < infinite)
        count += counts[bin++];
    return make_heap(s, values, 0, bin);
}

static uint32_t pop(const sampler *s, uint32_t *count, const float *values) {
    uint32_t id = s->ids[0];
    s->ids[0] = s->ids[--*count];
    if (*count > 0)
        sink(s->ids, *count, 0, values);
    return id;
}

/* What comes after the id `last` is dropped. */
static void keep_until(const sampler *s, uint32_t last, float dropped) {
    float least = s->values[last];
    for (uint32_t id = 0; id < s->vocabulary; id++)
        if (s->values[id] < least || (s->values[id] == least && id > last))
            s->values[id] = dropped;
}

/* ---- the steps ---- */

/* Copies the allowed logits, -inf for the rest; NON_FINITE for NaN and +inf, INVALID when none is left. */
static colibri_status mask(const sampler *s, const float *logits, float *out, cb_error *error) {
    const float infinity = __builtin_inff();
    uint32_t left = 0;
    for (uint32_t id = 0; id < s->vocabulary; id++) {
        float logit = is_allowed(s, id) ? logits[id] : -infinity;
        if (!(logit < infinity))
            return cb_fail(error, COLIBRI_NON_FINITE, "the logit of token id %u is NaN or infinite", id);
        out[id] = logit;
        left += logit > -infinity;
    }
    return left > 0 ? COLIBRI_OK : cb_fail(error, COLIBRI_INVALID, "no token is allowed");
}

static void find_log_probabilities(const sampler *s, colibri_sample_result *result) {
    float largest;
    memcpy(s->log_probabilities, s->values, s->vocabulary * sizeof(float));
    float base = cb_log_softmax(s->kernels, s->log_probabilities, s->vocabulary, &largest);
    for (uint32_t id = 0; id < s->vocabulary; id++)
        s->log_probabilities[id] = (s->values[id] - largest) + base;
    if (s->options->top_logprobs == 0)
        return;
    uint32_t count = heap_of_largest(s, s->log_probabilities, s->options->top_logprobs);
    for (uint32_t i = 0; i < s->options->top_logprobs; i++) {
        /* Fewer ids than asked for: the last places have probability 0. */
        bool have = count > 0;
        uint32_t id = have ? pop(s, &count, s->log_probabilities) : 0;
        result->top_tokens[i] = id;
        result->top_logprobs[i] = have ? s->log_probabilities[id] : -__builtin_inff();
    }
}

static float keep_finite(float x) {
    return x > LARGEST_FLOAT ? LARGEST_FLOAT : x < -LARGEST_FLOAT ? -LARGEST_FLOAT : x;
}

static void apply_penalties(const sampler *s, const uint32_t *history, uint32_t history_count, uint32_t prompt_count) {
    const colibri_sampling *o = s->options;
    if (o->repetition_penalty == 1.0f && o->frequency_penalty == 0.0f && o->presence_penalty == 0.0f)
        return;
    memset(s->ids, 0, s->vocabulary * sizeof *s->ids);
    for (uint32_t i = 0; i < history_count; i++)
        s->ids[history[i]] = (s->ids[history[i]] | SEEN) + (i >= prompt_count);
    for (uint32_t id = 0; id < s->vocabulary; id++) {
        uint32_t count = s->ids[id] & ~SEEN;
        float logit = s->values[id];
        if (s->ids[id] == 0 || logit == -__builtin_inff())
            continue;
        logit = keep_finite(logit > 0.0f ? logit / o->repetition_penalty : logit * o->repetition_penalty);
        if (count > 0) {
            logit = keep_finite(logit - o->frequency_penalty * (float)count);
            logit = keep_finite(logit - o->presence_penalty);
        }
        s->values[id] = logit;
    }
}

static uint32_t largest_id(const sampler *s) {
    uint32_t best = 0;
    for (uint32_t id = 1; id < s->vocabulary; id++)
        if (s->values[id] > s->values[best])
            best = id;
    return best;
}

static void keep_top_k(const sampler *s) {
    if (s->options->top_k == 0 || s->options->top_k >= s->vocabulary)
        return;
    uint32_t count = heap_of_largest(s, s->values, s->options->top_k), last = 0;
    for (uint32_t kept = 0; kept < s->options->top_k && count > 0; kept++)
        last = pop(s, &count, s->values);
    keep_until(s, last, -__builtin_inff());
}

static double sum_of(const sampler *s) {
    double sum = 0.0;
    for (uint32_t id = 0; id < s->vocabulary; id++)
        sum += (double)s->values[id];
    return sum;
}

static void keep_top_p(const sampler *s) {
    if (s->options->top_p == 1.0f)
        return;
    double wanted = (double)s->options->top_p * sum_of(s), sums[BINS] = {0}, sum = 0.0;
    for (uint32_t id = 0; id < s->vocabulary; id++)
        sums[bin_of(s->values[id])] += (double)s->values[id];
    /* Bins add up in another order than ids do: a little more than wanted is surely enough. */
    uint32_t low = BINS - 1;
    while (((sum += sums[low]) < wanted * (1 + 0x1p-20) || sum == 0.0) && low > 0)
        low--;
    uint32_t count = make_heap(s, s->values, low, BINS - 1), last;
    sum = 0.0;
    do {
        last = pop(s, &count, s->values);
        sum += (double)s->values[last];
    } while (sum < wanted && count > 0);
    keep_until(s, last, 0.0f);
}

static void keep_min_p(const sampler *s, float largest) {
    float least = s->options->min_p * largest;
    for (uint32_t id = 0; id < s->vocabulary; id++)
        if (s->values[id] < least)
            s->values[id] = 0.0f;
}

/* The output function of SplitMix64: every bit of the result depends on every bit of x. */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* Counter-based: draws of neighbouring seeds and positions have nothing to do with each other. */
static double uniform(uint64_t seed, uint64_t position) {
    const uint64_t step = UINT64_C(0x9e3779b97f4a7c15);
    uint64_t bits = mix(mix(seed + step) + step * (position + 1));
    return (double)(bits >> 40) * 0x1p-24;
}

static uint32_t draw(const sampler *s, double u) {
    double wanted = u * sum_of(s), sum = 0.0;
    uint32_t id = 0;
    for (;; id++) { /* u < 1 and the sums are the same: it ends before the vocabulary does */
        sum += (double)s->values[id];
        if (sum > wanted)
            return id;
    }
}

static uint32_t choose(const sampler *s, uint64_t position) {
    uint32_t best = largest_id(s);
    if (s->options->temperature == 0.0f)
        return best;
    float largest = s->values[best];
    for (uint32_t id = 0; id < s->vocabulary; id++)
        s->values[id] = (s->values[id] - largest) / s->options->temperature;
    keep_top_k(s);
    s->kernels->softmax(s->values, s->vocabulary);
    keep_top_p(s);
    if (s->options->min_p > 0.0f)
        keep_min_p(s, s->values[largest_id(s)]);
    return draw(s, uniform(s->options->seed, position));
}

/* ---- arguments ---- */

static colibri_status check_range(const char *name, float value, float low, float high, cb_error *error) {
    if (value >= low && value <= high)
        return COLIBRI_OK;
    return cb_fail(error, COLIBRI_INVALID, "%s is %g, it must be from %g to %g", name, (double)value, (double)low,
                   (double)high);
}

static colibri_status check_options(const colibri_sampling *o, cb_error *error) {
    if (check_range("temperature", o->temperature, 0.0f, LARGEST_FLOAT, error) != COLIBRI_OK ||
        check_range("top_p", o->top_p, 0.0f, 1.0f, error) != COLIBRI_OK ||
        check_range("min_p", o->min_p, 0.0f, 1.0f, error) != COLIBRI_OK ||
        check_range("repetition_penalty", o->repetition_penalty, 1e-6f, 1e6f, error) != COLIBRI_OK ||
        check_range("frequency_penalty", o->frequency_penalty, -1e6f, 1e6f, error) != COLIBRI_OK ||
        check_range("presence_penalty", o->presence_penalty, -1e6f, 1e6f, error) != COLIBRI_OK)
        return error->status;
    if (o->top_logprobs > COLIBRI_TOP_LOGPROBS)
        return cb_fail(error, COLIBRI_INVALID, "top_logprobs is %u, it must be at most %u", o->top_logprobs,
                       COLIBRI_TOP_LOGPROBS);
    return COLIBRI_OK;
}

static colibri_status check_history(const uint32_t *history, uint32_t count, uint32_t prompt_count, uint32_t vocabulary,
                                    cb_error *error) {
    if (history == NULL && count > 0)
        return cb_fail(error, COLIBRI_INVALID, "history is NULL with history_count %u", count);
    if (prompt_count > count)
        return cb_fail(error, COLIBRI_INVALID, "prompt_count is %u, history has only %u tokens", prompt_count, count);
    for (uint32_t i = 0; i < count; i++)
        if (history[i] >= vocabulary)
            return cb_fail(error, COLIBRI_INVALID, "history has token id %u, the vocabulary size is %u", history[i],
                           vocabulary);
    return COLIBRI_OK;
}

static uint64_t array_bytes(uint32_t vocabulary) { return cb_round_up((uint64_t)vocabulary * 4, CB_CACHE_LINE); }

uint64_t colibri_sample_scratch_size(uint32_t vocabulary_size) {
    return 3 * array_bytes(vocabulary_size) + CB_CACHE_LINE; /* the caller's memory may be unaligned */
}

colibri_status colibri_sample(const colibri_sampling *sampling, const float *logits, uint32_t vocabulary_size,
                              const uint8_t *allowed, const uint32_t *history, uint32_t history_count,
                              uint32_t prompt_count, uint64_t position, void *scratch, colibri_sample_result *result,
                              char *message, size_t message_size) {
    cb_error error = {0};
    cb_float_environment environment = cb_float_enter();
    if (sampling == NULL || logits == NULL || scratch == NULL || result == NULL || vocabulary_size == 0) {
        cb_fail(&error, COLIBRI_INVALID,
                "sampling, logits, scratch and result must not be NULL and vocabulary_size not 0");
    } else if (check_options(sampling, &error) == COLIBRI_OK &&
               check_history(history, history_count, prompt_count, vocabulary_size, &error) == COLIBRI_OK) {
        cb_arena arena = {.base = (uint8_t *)scratch + (-(uintptr_t)scratch & (CB_CACHE_LINE - 1))};
        sampler s = {.options = sampling,
                     .kernels = best_kernels(),
                     .allowed = allowed,
                     .vocabulary = vocabulary_size,
                     .values = cb_arena_take(&arena, vocabulary_size, sizeof(float)),
                     .log_probabilities = cb_arena_take(&arena, vocabulary_size, sizeof(float)),
                     .ids = cb_arena_take(&arena, vocabulary_size, sizeof(uint32_t))};
        if (mask(&s, logits, s.values, &error) == COLIBRI_OK) {
            *result = (colibri_sample_result){0};
            find_log_probabilities(&s, result);
            apply_penalties(&s, history, history_count, prompt_count);
            result->token = choose(&s, position);
            result->logprob = s.log_probabilities[result->token];
        }
    }
    cb_float_leave(environment);
    cb_copy_message(&error, message, message_size);
    return error.status;
}
