#include "experts/store_parts.h"

static void begin_entry(cb_expert_store *store, uint32_t e) {
    call *call = &store->call;
    entry *entry = &call->entries[e];
    record *record = &store->t.records[entry->record];
    set_counters *set = &store->t.sets[call->set];
    record->entry = e;
    if (record->ahead)
        count_more(&set->prefetched_used, 1);
    record->ahead = false;
    if (record->slot != CB_NONE && state_of(store, record->slot) == SLOT_KEPT) {
        cb_store_pin(store, entry->record);
        call->ahead[record->class]++;
        call->ready[call->ready_count++] = e;
        count_more(&set->hits, 1);
        return;
    }
    count_more(&set->misses, 1);
    if (record->slot != CB_NONE) {
        entry->loading = true;
        call->loading++;
        call->ahead[record->class]++;
        return;
    }
    uint32_t class = record->class;
    if (call->first_waiting[class] == CB_NONE)
        call->first_waiting[class] = e;
    else
        call->entries[call->last_waiting[class]].next = e;
    call->last_waiting[class] = e;
    call->waiting++;
}

void cb_store_begin(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    call *call = &store->call;
    uint32_t first = store->t.uses[set].first;
    if (store->quick) {
        for (uint32_t i = 0; i < count; i++)
            call->entries[i].record = first + experts[i];
        call->count = count;
        call->handed = 0;
        count_more(&store->t.sets[set].calls, 1);
        count_more(&store->t.sets[set].hits, count);
        return;
    }
    pthread_mutex_lock(&store->mutex);
    call->set = set;
    call->count = count;
    call->handed = call->ready_count = call->waiting = call->loading = call->error_count = 0;
    for (uint32_t c = 0; c < CB_SLOT_CLASSES; c++) {
        call->first_waiting[c] = CB_NONE;
        call->ahead[c] = 0;
    }
    count_more(&store->t.sets[set].calls, 1);
    store->usage.calls++;
    store->usage.set = set;
    store->policy->on_call(&store->usage, experts, count);
    for (uint32_t i = 0; i < count; i++) {
        call->entries[i] = (entry){.record = first + experts[i], .next = CB_NONE};
        begin_entry(store, i);
    }
    if (call->waiting > 0)
        cb_store_wake(store);
    pthread_mutex_unlock(&store->mutex);
}

static const uint8_t *record_memory(const cb_expert_store *store, uint32_t r) {
    return cb_store_memory(store, store->t.records[r].slot, store->t.records[r].class);
}

uint32_t cb_store_next(cb_expert_store *store, cb_store_ready *ready, uint32_t most) {
    call *call = &store->call;
    uint32_t given = 0;
    if (store->quick) {
        for (; given < most && call->handed < call->count; given++, call->handed++)
            ready[given] =
                (cb_store_ready){call->handed, record_memory(store, call->entries[call->handed].record), NULL};
        return given;
    }
    pthread_mutex_lock(&store->mutex);
    if (call->handed < call->count && call->handed == call->ready_count) {
        uint64_t start = cb_now();
        while (call->handed == call->ready_count)
            pthread_cond_wait(&store->ready, &store->mutex);
        count_more(&store->t.sets[call->set].stall_nanoseconds, cb_now() - start);
    }
    for (; given < most && call->handed < call->ready_count; given++, call->handed++) {
        uint32_t e = call->ready[call->handed];
        const entry *entry = &call->entries[e];
        call->ahead[store->t.records[entry->record].class]--;
        ready[given] =
            (cb_store_ready){e, entry->error == NULL ? record_memory(store, entry->record) : NULL, entry->error};
    }
    if (call->waiting > 0)
        cb_store_wake(store);
    pthread_mutex_unlock(&store->mutex);
    return given;
}

static void release(cb_expert_store *store, uint32_t e) {
    uint32_t r = store->call.entries[e].record;
    const record *record = &store->t.records[r];
    if (record->slot != CB_NONE && state_of(store, record->slot) == SLOT_PINNED)
        cb_store_keep(store, r);
}

void cb_store_release(cb_expert_store *store, uint32_t index) {
    if (store->quick)
        return;
    pthread_mutex_lock(&store->mutex);
    release(store, index);
    if (store->call.waiting > 0)
        cb_store_wake(store);
    pthread_mutex_unlock(&store->mutex);
}

void cb_store_end(cb_expert_store *store) {
    if (store->quick)
        return;
    pthread_mutex_lock(&store->mutex);
    call *call = &store->call;
    for (uint32_t e = 0; e < call->count; e++) {
        release(store, e);
        store->t.records[call->entries[e].record].entry = CB_NONE;
    }
    call->count = call->handed = call->ready_count = call->waiting = call->loading = 0;
    if (store->prefetch.count + store->warm.count > 0)
        cb_store_wake(store);
    pthread_mutex_unlock(&store->mutex);
}

/* ---- reads ahead ---- */

static void queue_records(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count, ring *ring,
                          uint8_t queue) {
    if (store->resident)
        return;
    pthread_mutex_lock(&store->mutex);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = store->t.uses[set].first + experts[i];
        record *record = &store->t.records[r];
        if (record->slot != CB_NONE || record->entry != CB_NONE)
            continue;
        if (queue == QUEUED_PREFETCH)
            record->expected = (uint32_t)atomic_load_explicit(&store->t.sets[set].calls, memory_order_relaxed);
        if (!(record->queued & queue))
            cb_ring_push(ring, store->record_count, r);
        record->queued |= queue;
    }
    if (ring->count > 0 && cb_store_may_read_ahead(store))
        cb_store_wake(store);
    pthread_mutex_unlock(&store->mutex);
}

void cb_store_prefetch(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    queue_records(store, set, experts, count, &store->prefetch, QUEUED_PREFETCH);
}

void cb_store_warm(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    queue_records(store, set, experts, count, &store->warm, QUEUED_WARM);
}
