#include "experts/store.h"

#include <inttypes.h>
#include <stdio.h>

#include "file/load.h"

struct cb_expert_store {
    uint64_t bytes;
    uint8_t *block;
    uint32_t *first; /* [set_count] index of a set's first record */
    const uint8_t **records;
};

colibri_status cb_expert_store_open(const cb_model *model, cb_expert_store **result, cb_error *error) {
    *result = NULL;
    uint64_t bytes = 0;
    uint32_t count = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        count += model->sets[s].count;
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            bytes += cb_round_up(model->sets[s].experts[i].size, CB_CACHE_LINE);
    }
    cb_expert_store *store = cb_alloc(sizeof *store);
    if (store == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an expert store");
    store->bytes = bytes;
    store->block = cb_alloc(bytes);
    store->first = cb_alloc(cb_multiply(model->set_count, sizeof *store->first));
    store->records = cb_alloc(cb_multiply(count, sizeof *store->records));
    if (store->block == NULL || store->first == NULL || store->records == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for %" PRIu64 " bytes of experts", model->path,
                bytes);
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

const uint8_t *cb_expert_store_get(const cb_expert_store *store, uint32_t set, uint32_t expert) {
    return store->records[store->first[set] + expert];
}

uint64_t cb_expert_store_bytes(const cb_expert_store *store) { return store->bytes; }

void cb_expert_store_close(cb_expert_store *store) {
    if (store == NULL)
        return;
    cb_free(store->records);
    cb_free(store->first);
    cb_free(store->block);
    cb_free(store);
}
