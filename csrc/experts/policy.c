#include "experts/policy.h"

static void lru_on_call(cb_usage *usage, uint32_t first, uint32_t count, const uint32_t *experts, uint32_t asked) {
    (void)count;
    for (uint32_t i = 0; i < asked; i++)
        usage->records[first + experts[i]].last = usage->calls;
}

static void lru_on_read_ahead(cb_usage *usage, uint32_t record) { usage->records[record].last = usage->calls; }

static uint64_t lru_distance(const cb_usage *usage, uint32_t set, uint32_t record, bool expected) {
    (void)set;
    return expected ? 0 : usage->calls - usage->records[record].last;
}

const cb_policy cb_policy_lru = {"lru", lru_on_call, lru_on_read_ahead, lru_distance};
