#include "experts/policy.h"

#include <math.h>

/* ---- expected wait ---- */

#define USES_IN_WINDOW 2.0 /* of an expert of mean popularity: short enough to follow a change of topic */
#define LARGEST_WEIGHT 0x1p500

/* Calls of the set that count: one counts 1 / window less with each call after it. */
static double window_of(const cb_set_use *set) { return USES_IN_WINDOW * set->count / set->chosen; }

/* A call counts more than the one before instead of lowering all older counts. */
static void expected_wait_on_call(cb_usage *usage, const uint32_t *experts, uint32_t asked) {
    cb_set_use *set = &usage->sets[usage->set];
    double window = window_of(set);
    set->weight = (set->weight > 0 ? set->weight : 1) * (window / (window - 1));
    for (uint32_t i = 0; i < asked; i++)
        usage->scores[set->first + experts[i]] += set->weight;
    if (set->weight > LARGEST_WEIGHT) {
        set->weight /= LARGEST_WEIGHT;
        for (uint32_t i = 0; i < set->count; i++)
            usage->scores[set->first + i] /= LARGEST_WEIGHT;
    }
}

static void expected_wait_on_warm(cb_usage *usage, uint32_t set, uint32_t record) {
    if (usage->sets[set].weight == 0)
        usage->sets[set].weight = 1;
    usage->scores[record] += usage->sets[set].weight;
}

static double expected_wait(const cb_usage *usage, uint32_t set, uint32_t record, bool expected) {
    const cb_set_use *use = &usage->sets[set];
    double before = set > usage->set ? set - usage->set - 1 : usage->set_count + set - usage->set - 1;
    if (expected)
        return before;
    if (usage->scores[record] == 0)
        return INFINITY;
    return before + usage->set_count * window_of(use) * (use->weight / usage->scores[record]);
}

const cb_policy cb_policy_expected_wait = {"expected wait", expected_wait_on_call, expected_wait_on_warm,
                                           expected_wait};

/* ---- least recent ---- */

static void least_recent_on_call(cb_usage *usage, const uint32_t *experts, uint32_t asked) {
    for (uint32_t i = 0; i < asked; i++)
        usage->scores[usage->sets[usage->set].first + experts[i]] = (double)usage->calls;
}

static void least_recent_on_warm(cb_usage *usage, uint32_t set, uint32_t record) {
    (void)set;
    usage->scores[record] = (double)usage->calls;
}

static double least_recent_wait(const cb_usage *usage, uint32_t set, uint32_t record, bool expected) {
    (void)set;
    return expected ? 0 : (double)usage->calls - usage->scores[record];
}

const cb_policy cb_policy_least_recent = {"least recent", least_recent_on_call, least_recent_on_warm,
                                          least_recent_wait};
