#include "experts/store.h"

#include <inttypes.h>
#include <stdio.h>

#include "file/load.h"

struct cb_expert_store {
    uint64_t bytes;
    uint8_t *block;
    uint32_t *first; /* [set_count] index of a set's first record */
    const uint8_t **records;
    const uint32_t *asked; /* of the running call */
    uint32_t set, count, given;
    cb_store_stats *stats; /* [set_count] */
};

void cb_expert_store_plan(const cb_model *model, const cb_store_options *options, cb_store_plan *plan) {
    (void)options;
    *plan = (cb_store_plan){.class_count = 1};
    uint64_t count = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        count += model->sets[s].count;
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            uint64_t bytes = cb_round_up(model->sets[s].experts[i].size, CB_CACHE_LINE);
            plan->all_bytes += bytes;
            plan->wasted_bytes += bytes - model->sets[s].experts[i].size;
        }
    }
    plan->least_bytes = plan->all_bytes;
    plan->other_bytes = count * sizeof(uint8_t *);
}

colibri_status cb_expert_store_open(const cb_model *model, const cb_store_options *options, cb_expert_store **result,
                                    cb_error *error) {
    *result = NULL;
    cb_store_plan plan;
    cb_expert_store_plan(model, options, &plan);
    if (options->slot_bytes < plan.least_bytes)
        return cb_fail(error, COLIBRI_INVALID, "%s: expert_bytes is %" PRIu64 ", it must be at least %" PRIu64,
                       model->path, options->slot_bytes, plan.least_bytes);
    cb_expert_store *store = cb_alloc(sizeof *store);
    if (store == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an expert store");
    store->bytes = plan.all_bytes;
    store->block = cb_alloc(plan.all_bytes);
    store->first = cb_alloc(cb_multiply(model->set_count, sizeof *store->first));
    store->stats = cb_alloc(cb_multiply(model->set_count, sizeof *store->stats));
    store->records = cb_alloc(plan.other_bytes);
    if (store->block == NULL || store->first == NULL || store->records == NULL || store->stats == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for %" PRIu64 " bytes of experts", model->path,
                plan.all_bytes);
        goto fail;
    }
    uint8_t *to = store->block;
    uint32_t index = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        store->first[s] = index;
        for (uint32_t i = 0; i < model->sets[s].count; i++, index++) {
            const cb_expert *expert = &model->sets[s].experts[i];
            char what[64];
            snprintf(what, sizeof what, "expert %u of layer %u", i, model->sets[s].layer);
            if (cb_load_checked(model, expert->offset, expert->size, expert->crc32c, to, NULL, what, error) !=
                COLIBRI_OK)
                goto fail;
            store->records[index] = to;
            to += cb_round_up(expert->size, CB_CACHE_LINE);
        }
    }
    *result = store;
    return COLIBRI_OK;

fail:
    cb_expert_store_close(store);
    return error->status;
}

void cb_expert_store_close(cb_expert_store *store) {
    if (store == NULL)
        return;
    cb_free(store->records);
    cb_free(store->first);
    cb_free(store->stats);
    cb_free(store->block);
    cb_free(store);
}

void cb_store_begin(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    store->set = set;
    store->asked = experts;
    store->count = count;
    store->given = 0;
    store->stats[set].hits += count;
}

uint32_t cb_store_next(cb_expert_store *store, cb_store_ready *ready, uint32_t most) {
    uint32_t n = 0;
    for (; n < most && store->given < store->count; n++, store->given++)
        ready[n] = (cb_store_ready){.index = store->given,
                                    .record = store->records[store->first[store->set] + store->asked[store->given]]};
    return n;
}

void cb_store_release(cb_expert_store *store, uint32_t index) {
    (void)store;
    (void)index;
}

void cb_store_end(cb_expert_store *store) { store->given = store->count; }

void cb_store_prefetch(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    (void)store;
    (void)set;
    (void)experts;
    (void)count;
}

void cb_store_get_stats(const cb_expert_store *store, uint32_t set, cb_store_stats *stats) {
    *stats = store->stats[set];
}

void cb_store_get_expert_loads(const cb_expert_store *store, uint32_t set, uint64_t *loads,
                               uint64_t *load_nanoseconds) {
    (void)store;
    (void)set;
    (void)loads;
    (void)load_nanoseconds;
}

uint64_t cb_expert_store_bytes(const cb_expert_store *store) { return store->bytes; }

bool cb_expert_store_is_resident(const cb_expert_store *store) {
    (void)store;
    return true;
}

bool cb_expert_store_is_direct(const cb_expert_store *store) {
    (void)store;
    return false;
}

const char *cb_store_warning(const cb_expert_store *store) {
    (void)store;
    return NULL;
}
