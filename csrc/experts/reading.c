/* Slots, which record is read next, and the threads that read. */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "experts/store_parts.h"

/* A call has at most this many records of a class loaded that it has not taken yet, or this part of the class's slots
 * if that is more: what is loaded beyond its needs evicts what other layers need. */
#define LEAST_AHEAD 8
#define AHEAD_PART 8

/* ---- slots ---- */

uint8_t *cb_store_memory(const cb_expert_store *store, uint32_t slot, uint32_t class) {
    const cb_slot_class *c = &store->slots.classes[class];
    return c->memory + (slot - c->first_slot) * c->slot_bytes;
}

static void protect(const cb_expert_store *store, uint32_t slot, uint32_t class, int protection) {
    if (store->guard)
        mprotect(cb_store_memory(store, slot, class), store->slots.classes[class].slot_bytes, protection);
}

static void set_state(cb_expert_store *store, uint32_t slot, uint8_t state) {
    atomic_store_explicit(&store->t.slots[slot].state, state, memory_order_relaxed);
}

void cb_store_pin(cb_expert_store *store, uint32_t r) {
    uint32_t slot = store->t.records[r].slot, class = store->t.records[r].class;
    store->kept_count[class]--;
    set_state(store, slot, SLOT_PINNED);
    protect(store, slot, class, PROT_READ);
}

void cb_store_keep(cb_expert_store *store, uint32_t r) {
    uint32_t slot = store->t.records[r].slot, class = store->t.records[r].class;
    store->kept_count[class]++;
    set_state(store, slot, SLOT_KEPT);
    protect(store, slot, class, PROT_NONE);
}

/* What a call for a token has released goes last: who is evicted then depends on what was asked for alone, not on when
 * reads end. A prompt's call, which asks for nearly all, would so carry as many records as it misses from layer to
 * layer that nobody needs soon. */
static double wait_of(const cb_expert_store *store, uint32_t r) {
    const record *record = &store->t.records[r];
    if (record->entry != CB_NONE && store->call.count <= store->t.uses[record->set].count / 2)
        return 0;
    uint64_t calls = atomic_load_explicit(&store->t.sets[record->set].calls, memory_order_relaxed);
    return store->policy->wait(&store->usage, record->set, r, record->ahead && record->expected == (uint32_t)calls);
}

/* The kept record of the class with the longest wait, the lowest of several. */
static uint32_t find_victim(const cb_expert_store *store, uint32_t class, double *longest) {
    const cb_slot_class *c = &store->slots.classes[class];
    uint32_t victim = CB_NONE;
    for (uint32_t slot = c->first_slot; slot < c->first_slot + c->slot_count; slot++) {
        if (state_of(store, slot) != SLOT_KEPT)
            continue;
        uint32_t r = record_of(store, slot);
        double wait = wait_of(store, r);
        if (victim == CB_NONE || wait > *longest || (wait == *longest && r < victim)) {
            victim = r;
            *longest = wait;
        }
    }
    return victim;
}

static void free_slot(cb_expert_store *store, uint32_t r) {
    record *record = &store->t.records[r];
    const cb_slot_class *class = &store->slots.classes[record->class];
    set_state(store, record->slot, SLOT_FREE);
    protect(store, record->slot, record->class, PROT_NONE);
    store->t.free_slots[class->first_slot + store->free_count[record->class]++] = record->slot;
    record->slot = CB_NONE;
    record->ahead = false;
}

static void evict(cb_expert_store *store, uint32_t r) {
    store->kept_count[store->t.records[r].class]--;
    count_more(&store->t.sets[store->t.records[r].set].evictions, 1);
    free_slot(store, r);
}

/* There is a free slot of its class. */
static void take_slot(cb_expert_store *store, uint32_t r) {
    record *record = &store->t.records[r];
    const cb_slot_class *class = &store->slots.classes[record->class];
    record->slot = store->t.free_slots[class->first_slot + --store->free_count[record->class]];
    atomic_store_explicit(&store->t.slots[record->slot].record, r, memory_order_relaxed);
    set_state(store, record->slot, SLOT_LOADING);
    protect(store, record->slot, record->class, PROT_READ | PROT_WRITE);
}

/* ---- what is read next ---- */

static uint32_t most_ahead(const cb_expert_store *store, uint32_t class) {
    uint32_t part = store->slots.classes[class].slot_count / AHEAD_PART;
    return part > LEAST_AHEAD ? part : LEAST_AHEAD;
}

/* The first entry of the call that waits and can have a slot; it gets the slot. */
static uint32_t start_demand(cb_expert_store *store) {
    call *call = &store->call;
    uint32_t first = CB_NONE, class = 0;
    for (uint32_t c = 0; c < store->slots.class_count && call->waiting > 0; c++)
        if (call->first_waiting[c] < first && call->ahead[c] < most_ahead(store, c) &&
            store->free_count[c] + store->kept_count[c] > 0) {
            first = call->first_waiting[c];
            class = c;
        }
    if (first == CB_NONE)
        return CB_NONE;
    entry *entry = &call->entries[first];
    double longest;
    if (store->free_count[class] == 0)
        evict(store, find_victim(store, class, &longest));
    take_slot(store, entry->record);
    entry->loading = true;
    call->first_waiting[class] = entry->next;
    call->ahead[class]++;
    call->waiting--;
    call->loading++;
    return entry->record;
}

static uint32_t pop(ring *ring, uint32_t capacity) {
    uint32_t r = ring->records[ring->first];
    ring->first = ring->first + 1 == capacity ? 0 : ring->first + 1;
    ring->count--;
    return r;
}

void cb_ring_push(ring *ring, uint32_t capacity, uint32_t r) {
    uint64_t place = (uint64_t)ring->first + ring->count++;
    ring->records[place < capacity ? place : place - capacity] = r;
}

/* A record of the low-priority queues that is still wanted and has a place; it gets the slot. */
static uint32_t start_ahead(cb_expert_store *store) {
    while (store->prefetch.count + store->warm.count > 0) {
        bool is_prefetch = store->prefetch.count > 0;
        uint32_t r = pop(is_prefetch ? &store->prefetch : &store->warm, store->record_count);
        record *record = &store->t.records[r];
        record->queued &= (uint8_t) ~(is_prefetch ? QUEUED_PREFETCH : QUEUED_WARM);
        if (record->slot != CB_NONE || record->entry != CB_NONE)
            continue;
        if (is_prefetch) {
            uint64_t calls = atomic_load_explicit(&store->t.sets[record->set].calls, memory_order_relaxed);
            if (record->expected != (uint32_t)calls)
                continue;
            if (store->free_count[record->class] == 0) {
                double longest;
                uint32_t victim = find_victim(store, record->class, &longest);
                if (victim == CB_NONE || store->policy->wait(&store->usage, record->set, r, true) >= longest)
                    continue;
                evict(store, victim);
            }
        } else if (store->free_count[record->class] == 0) {
            continue;
        }
        take_slot(store, r);
        if (!store->opening) {
            record->ahead = is_prefetch;
            if (is_prefetch)
                count_more(&store->t.sets[record->set].prefetched, 1);
            else
                store->policy->on_warm(&store->usage, record->set, r);
        }
        return r;
    }
    return CB_NONE;
}

/* Reads ahead wait while the call does, and leave it a thread that is free at once. */
bool cb_store_may_read_ahead(const cb_expert_store *store) {
    if (store->opening)
        return true;
    uint32_t most = store->thread_count > 1 ? store->thread_count - 1 : 1;
    return store->call.waiting == 0 && store->call.loading == 0 && store->reading_ahead < most;
}

/* ---- reading ---- */

static void deliver(cb_expert_store *store, uint32_t e, const cb_error *error) {
    call *call = &store->call;
    entry *entry = &call->entries[e];
    if (entry->loading) {
        call->loading--;
        entry->loading = false;
    }
    if (error != NULL) {
        call->errors[call->error_count] = *error;
        entry->error = &call->errors[call->error_count++];
    }
    call->ready[call->ready_count++] = e;
    pthread_cond_signal(&store->ready);
}

static void finish_read(cb_expert_store *store, uint32_t r, const cb_error *error, uint64_t nanoseconds) {
    record *record = &store->t.records[r];
    set_counters *set = &store->t.sets[record->set];
    uint32_t e = record->entry;
    count_more(&set->load_nanoseconds, nanoseconds);
    count_more(&store->t.reads[r].loads, 1);
    count_more(&store->t.reads[r].nanoseconds, nanoseconds);
    if (error == NULL) {
        count_more(&set->bytes_read,
                   store->model->sets[record->set].experts[r - store->t.uses[record->set].first].size);
        record->verified = true;
        cb_store_keep(store, r);
        if (e != CB_NONE)
            cb_store_pin(store, r);
    } else {
        free_slot(store, r);
        if (store->opening && store->open_error->status == COLIBRI_OK)
            *store->open_error = *error;
    }
    if (e != CB_NONE)
        deliver(store, e, error);
    else if (store->opening)
        pthread_cond_signal(&store->ready);
}

void *cb_store_read(void *argument) {
    cb_expert_store *store = argument;
    pthread_setname_np(pthread_self(), "colibri-io");
    pthread_mutex_lock(&store->mutex);
    while (!store->stop) {
        uint32_t r = start_demand(store);
        bool ahead = r == CB_NONE;
        if (ahead && cb_store_may_read_ahead(store))
            r = start_ahead(store);
        if (r == CB_NONE) {
            store->idle++;
            pthread_cond_wait(&store->work, &store->mutex);
            store->idle--;
            continue;
        }
        store->reading_ahead += ahead;
        if (ahead && store->prefetch.count + store->warm.count > 0 && cb_store_may_read_ahead(store) && store->idle > 0)
            pthread_cond_signal(&store->work);
        const record *record = &store->t.records[r];
        uint32_t set = record->set, expert = r - store->t.uses[set].first;
        uint8_t *memory = cb_store_memory(store, record->slot, record->class);
        bool first = !record->verified;
        pthread_mutex_unlock(&store->mutex);

        cb_error error = {0};
        uint64_t start = cb_now();
        cb_record_read(&store->file, set, expert, memory, first, &error);
        uint64_t nanoseconds = cb_now() - start;

        pthread_mutex_lock(&store->mutex);
        store->reading_ahead -= ahead;
        finish_read(store, r, error.status == COLIBRI_OK ? NULL : &error, nanoseconds);
    }
    pthread_mutex_unlock(&store->mutex);
    return NULL;
}

void cb_store_wake(cb_expert_store *store) {
    if (store->idle == 1)
        pthread_cond_signal(&store->work);
    else if (store->idle > 1)
        pthread_cond_broadcast(&store->work);
}
