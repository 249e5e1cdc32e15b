/* Holds the experts' records in memory, all of them. */
#ifndef CB_STORE_H
#define CB_STORE_H

#include "file/model.h"

typedef struct cb_expert_store cb_expert_store;

/* Reads every record and checks it; errors name layer and expert. The model must outlive the store. */
colibri_status cb_expert_store_open(const cb_model *model, cb_expert_store **store, cb_error *error);
/* The record's bytes, aligned to 64; valid until the store is closed. */
const uint8_t *cb_expert_store_get(const cb_expert_store *store, uint32_t set, uint32_t expert);
uint64_t cb_expert_store_bytes(const cb_expert_store *store);
void cb_expert_store_close(cb_expert_store *store);

#endif
