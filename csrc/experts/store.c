/* Records, slots and the running call are changed under one lock, `mutex`, also by the threads that read. With room
 * for all nothing changes after opening, and a call takes no lock. */
#include "experts/store.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "experts/io.h"
#include "experts/policy.h"
#include "experts/slots.h"
#include "file/bytes.h"

#define NONE UINT32_MAX
#define DEFAULT_THREADS 2
#define MOST_THREADS 16
#define STACK_BYTES (UINT64_C(256) << 10)
/* A call has at most this many records of a class loaded that it has not taken yet, or a part of the class's slots:
 * more would only evict what other layers need. */
#define LEAST_AHEAD 8
#define AHEAD_PART 8

typedef _Atomic uint64_t counter; /* written under the lock or by the one caller, read by anyone */

enum { SLOT_FREE, SLOT_LOADING, SLOT_KEPT, SLOT_PINNED };
static const char *const state_names[] = {"free", "loading", "kept", "pinned"};
enum { QUEUED_PREFETCH = 1, QUEUED_WARM = 2 };

typedef struct slot {
    _Atomic uint32_t record; /* that it holds or held last */
    _Atomic uint8_t state;
} slot;

typedef struct record {
    uint32_t slot;     /* NONE: absent */
    uint32_t entry;    /* of the running call that waits for it or holds it, or NONE */
    uint32_t set;      /* its expert number is the record's less the set's first */
    uint32_t expected; /* low bits of the call of its set that it is read ahead for */
    uint8_t class;
    uint8_t queued;
    bool ahead;    /* read ahead, and not asked for since */
    bool verified; /* read and checked before */
} record;

typedef struct entry {
    uint32_t record, next; /* next: that waits in the same class */
    const cb_error *error;
    bool loading;
} entry;

typedef struct call {
    uint32_t set, count;
    uint32_t handed;      /* given out by cb_store_next */
    uint32_t ready_count; /* of `ready`, the part behind `handed` is to be given out */
    uint32_t waiting;     /* entries whose read has not begun */
    uint32_t loading;
    uint32_t first_waiting[CB_SLOT_CLASSES], last_waiting[CB_SLOT_CLASSES];
    uint32_t ahead[CB_SLOT_CLASSES]; /* loading, or loaded and not given out */
    uint32_t error_count;
    entry *entries;   /* [largest set] */
    uint32_t *ready;  /* [largest set] entries in the order in which they came */
    cb_error *errors; /* [largest set] */
} call;

typedef struct ring {
    uint32_t *records; /* [record count]: a record is in it once at most */
    uint32_t first, count;
} ring;

typedef struct set_counters {
    counter calls, hits, misses, bytes_read, stall_nanoseconds, prefetched, prefetched_used, evictions,
        load_nanoseconds;
} set_counters;

typedef struct read_counters {
    counter loads, nanoseconds;
} read_counters;

typedef struct tables {
    record *records;      /* [record count] */
    uint32_t *first;      /* [set count] first record of a set */
    slot *slots;          /* [slot count] */
    uint32_t *free_slots; /* [slot count] a stack in each class's part */
    entry *entries;       /* these three: [largest set] */
    uint32_t *ready;
    cb_error *errors;
    uint32_t *prefetch, *warm; /* [record count] */
    cb_record_use *uses;       /* [record count] */
    set_counters *sets;        /* [set count] */
    read_counters *reads;      /* [record count] */
    pthread_t *threads;        /* [thread count] */
} tables;

struct cb_expert_store {
    const cb_model *model;
    const cb_policy *policy;
    cb_slots slots;
    cb_record_file file;
    void *block; /* of the tables */
    tables t;
    uint32_t record_count, thread_count, started;
    bool resident, guard;
    bool quick; /* resident, and nothing is done to a slot when it is handed out */
    char warning[COLIBRI_MESSAGE_SIZE];

    pthread_mutex_t mutex;
    pthread_cond_t work, ready;           /* for the I/O threads; for the caller */
    uint32_t idle;                        /* I/O threads that wait for work */
    uint32_t free_count[CB_SLOT_CLASSES]; /* slots that hold nothing */
    uint32_t kept_count[CB_SLOT_CLASSES]; /* resident and not pinned */
    uint32_t reading_ahead;               /* threads that do */
    bool stop, opening;
    cb_error *open_error; /* of the first read that failed while opening */
    call call;
    ring prefetch, warm;
    cb_usage usage;
};

/* ---- tables ---- */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static void count_more(counter *counter, uint64_t more) {
    atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static uint32_t count_records(const cb_model *model, uint32_t *largest_set) {
    uint32_t count = 0;
    *largest_set = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        count += model->sets[s].count;
        *largest_set = model->sets[s].count > *largest_set ? model->sets[s].count : *largest_set;
    }
    return count;
}

static uint32_t count_threads(const cb_store_options *options) {
    return options->io_threads == 0 ? DEFAULT_THREADS : options->io_threads;
}

/* The place of the next table. With no base it is only counted. */
static void *take(uint8_t *base, uint64_t *used, uint64_t count, uint64_t size) {
    void *place = base != NULL ? base + *used : NULL;
    *used += cb_round_up(cb_multiply(count, size), CB_CACHE_LINE);
    return place;
}

/* Returns the bytes of all tables. Counts are below 2^32 and no element is over 1 KiB: no sum overflows. */
static uint64_t lay_tables(uint8_t *base, const cb_model *model, uint32_t slot_count, uint32_t threads, tables *t) {
    uint64_t used = 0;
    uint32_t largest, count = count_records(model, &largest);
    t->records = take(base, &used, count, sizeof *t->records);
    t->first = take(base, &used, model->set_count, sizeof *t->first);
    t->slots = take(base, &used, slot_count, sizeof *t->slots);
    t->free_slots = take(base, &used, slot_count, sizeof *t->free_slots);
    t->entries = take(base, &used, largest, sizeof *t->entries);
    t->ready = take(base, &used, largest, sizeof *t->ready);
    t->errors = take(base, &used, largest, sizeof *t->errors);
    t->prefetch = take(base, &used, count, sizeof *t->prefetch);
    t->warm = take(base, &used, count, sizeof *t->warm);
    t->uses = take(base, &used, count, sizeof *t->uses);
    t->sets = take(base, &used, model->set_count, sizeof *t->sets);
    t->reads = take(base, &used, count, sizeof *t->reads);
    t->threads = take(base, &used, threads, sizeof *t->threads);
    return used;
}

void cb_expert_store_plan(const cb_model *model, const cb_store_options *options, cb_store_plan *plan) {
    cb_slots slots;
    tables t;
    uint32_t largest, count = count_records(model, &largest), threads = count_threads(options);
    cb_slots_choose(&slots, model, cb_page_bytes(options->huge_pages));
    *plan = (cb_store_plan){.all_bytes = cb_slots_bytes(&slots, UINT32_MAX),
                            .least_bytes = cb_slots_bytes(&slots, 1),
                            .wasted_bytes = slots.wasted_bytes,
                            .other_bytes = sizeof(cb_expert_store) + lay_tables(NULL, model, count, threads, &t) +
                                           threads * STACK_BYTES,
                            .class_count = slots.class_count};
}

static void fill_tables(cb_expert_store *store) {
    const cb_model *model = store->model;
    const tables *t = &store->t;
    uint32_t r = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        t->first[s] = r;
        for (uint32_t i = 0; i < model->sets[s].count; i++, r++)
            t->records[r] = (record){.slot = NONE,
                                     .entry = NONE,
                                     .set = s,
                                     .class = (uint8_t)cb_slots_class(&store->slots, model->sets[s].experts[i].size)};
    }
    for (uint32_t c = 0; c < store->slots.class_count; c++) {
        const cb_slot_class *class = &store->slots.classes[c];
        store->free_count[c] = class->slot_count;
        for (uint32_t i = 0; i < class->slot_count; i++) {
            t->free_slots[class->first_slot + i] = class->first_slot + class->slot_count - 1 - i;
            atomic_init(&t->slots[class->first_slot + i].record, NONE);
        }
    }
    store->call.entries = t->entries;
    store->call.ready = t->ready;
    store->call.errors = t->errors;
    store->prefetch.records = t->prefetch;
    store->warm.records = t->warm;
    store->usage = (cb_usage){.set_count = model->set_count, .records = t->uses};
}

/* ---- slots ---- */

static uint8_t *slot_memory(const cb_expert_store *store, uint32_t slot, uint32_t class) {
    const cb_slot_class *c = &store->slots.classes[class];
    return c->memory + (slot - c->first_slot) * c->slot_bytes;
}

static void protect(const cb_expert_store *store, uint32_t slot, uint32_t class, int protection) {
    if (store->guard)
        mprotect(slot_memory(store, slot, class), store->slots.classes[class].slot_bytes, protection);
}

static void set_state(cb_expert_store *store, uint32_t slot, uint8_t state) {
    atomic_store_explicit(&store->t.slots[slot].state, state, memory_order_relaxed);
}

static uint8_t state_of(const cb_expert_store *store, uint32_t slot) {
    return atomic_load_explicit(&store->t.slots[slot].state, memory_order_relaxed);
}

static uint32_t record_of(const cb_expert_store *store, uint32_t slot) {
    return atomic_load_explicit(&store->t.slots[slot].record, memory_order_relaxed);
}

static void pin(cb_expert_store *store, uint32_t r) {
    uint32_t slot = store->t.records[r].slot, class = store->t.records[r].class;
    store->kept_count[class]--;
    set_state(store, slot, SLOT_PINNED);
    protect(store, slot, class, PROT_READ);
}

static void keep(cb_expert_store *store, uint32_t r) {
    uint32_t slot = store->t.records[r].slot, class = store->t.records[r].class;
    store->kept_count[class]++;
    set_state(store, slot, SLOT_KEPT);
    protect(store, slot, class, PROT_NONE);
}

static uint64_t distance(const cb_expert_store *store, uint32_t r) {
    const record *record = &store->t.records[r];
    uint64_t calls = atomic_load_explicit(&store->t.sets[record->set].calls, memory_order_relaxed);
    return store->policy->distance(&store->usage, record->set, r, record->ahead && record->expected == (uint32_t)calls);
}

/* The kept record of the class that is farthest from its next use. */
static uint32_t find_victim(const cb_expert_store *store, uint32_t class, uint64_t *farthest) {
    const cb_slot_class *c = &store->slots.classes[class];
    uint32_t victim = NONE;
    for (uint32_t slot = c->first_slot; slot < c->first_slot + c->slot_count; slot++) {
        if (state_of(store, slot) != SLOT_KEPT)
            continue;
        uint64_t d = distance(store, record_of(store, slot));
        if (victim == NONE || d > *farthest) {
            victim = record_of(store, slot);
            *farthest = d;
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
    record->slot = NONE;
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
    uint32_t first = NONE, class = 0;
    for (uint32_t c = 0; c < store->slots.class_count && call->waiting > 0; c++)
        if (call->first_waiting[c] < first && call->ahead[c] < most_ahead(store, c) &&
            store->free_count[c] + store->kept_count[c] > 0) {
            first = call->first_waiting[c];
            class = c;
        }
    if (first == NONE)
        return NONE;
    entry *entry = &call->entries[first];
    uint64_t farthest;
    if (store->free_count[class] == 0)
        evict(store, find_victim(store, class, &farthest));
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

static void push(ring *ring, uint32_t capacity, uint32_t r) {
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
        if (record->slot != NONE || record->entry != NONE)
            continue;
        if (is_prefetch) {
            uint64_t calls = atomic_load_explicit(&store->t.sets[record->set].calls, memory_order_relaxed), farthest;
            if (record->expected != (uint32_t)calls)
                continue;
            if (store->free_count[record->class] == 0) {
                uint32_t victim = find_victim(store, record->class, &farthest);
                record->ahead = true;
                bool nearer = victim != NONE && distance(store, r) < farthest;
                record->ahead = false;
                if (!nearer)
                    continue;
                evict(store, victim);
            }
        } else if (store->free_count[record->class] == 0) {
            continue;
        }
        take_slot(store, r);
        if (!store->opening) {
            record->ahead = is_prefetch;
            store->policy->on_read_ahead(&store->usage, r);
            if (is_prefetch)
                count_more(&store->t.sets[record->set].prefetched, 1);
        }
        return r;
    }
    return NONE;
}

/* Reads ahead wait while the call does, and leave it a thread that is free at once. */
static bool may_read_ahead(const cb_expert_store *store) {
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
        count_more(&set->bytes_read, store->model->sets[record->set].experts[r - store->t.first[record->set]].size);
        record->verified = true;
        keep(store, r);
        if (e != NONE)
            pin(store, r);
    } else {
        free_slot(store, r);
        if (store->opening && store->open_error->status == COLIBRI_OK)
            *store->open_error = *error;
    }
    if (e != NONE)
        deliver(store, e, error);
    else if (store->opening)
        pthread_cond_signal(&store->ready);
}

static void *read_records(void *argument) {
    cb_expert_store *store = argument;
    pthread_setname_np(pthread_self(), "colibri-io");
    pthread_mutex_lock(&store->mutex);
    while (!store->stop) {
        uint32_t r = start_demand(store);
        bool ahead = r == NONE;
        if (ahead && may_read_ahead(store))
            r = start_ahead(store);
        if (r == NONE) {
            store->idle++;
            pthread_cond_wait(&store->work, &store->mutex);
            store->idle--;
            continue;
        }
        store->reading_ahead += ahead;
        if (ahead && store->prefetch.count + store->warm.count > 0 && may_read_ahead(store) && store->idle > 0)
            pthread_cond_signal(&store->work);
        const record *record = &store->t.records[r];
        uint32_t set = record->set, expert = r - store->t.first[set];
        uint8_t *memory = slot_memory(store, record->slot, record->class);
        bool first = !record->verified;
        pthread_mutex_unlock(&store->mutex);

        cb_error error = {0};
        uint64_t start = now();
        cb_record_read(&store->file, set, expert, memory, first, &error);
        uint64_t nanoseconds = now() - start;

        pthread_mutex_lock(&store->mutex);
        store->reading_ahead -= ahead;
        finish_read(store, r, error.status == COLIBRI_OK ? NULL : &error, nanoseconds);
    }
    pthread_mutex_unlock(&store->mutex);
    return NULL;
}

static void wake_readers(cb_expert_store *store) {
    if (store->idle == 1)
        pthread_cond_signal(&store->work);
    else if (store->idle > 1)
        pthread_cond_broadcast(&store->work);
}

/* ---- opening ---- */

static colibri_status start_threads(cb_expert_store *store, cb_error *error) {
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Threads inherit the mask: a signal of the program is never handled on one of them. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (; store->started < store->thread_count && failure == 0; store->started += failure == 0)
        failure = pthread_create(&store->t.threads[store->started], &attributes, read_records, store);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failure != 0)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY,
                       "I/O thread %u of %u could not be started: %s; ask for fewer I/O threads", store->started + 1,
                       store->thread_count, strerror(failure));
    return COLIBRI_OK;
}

static void stop_threads(cb_expert_store *store) {
    pthread_mutex_lock(&store->mutex);
    store->stop = true;
    pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->mutex);
    for (; store->started > 0; store->started--)
        pthread_join(store->t.threads[store->started - 1], NULL);
}

static colibri_status read_all(cb_expert_store *store, cb_error *error) {
    cb_error failure = {0};
    store->opening = true;
    store->open_error = &failure;
    for (uint32_t r = 0; r < store->record_count; r++)
        push(&store->warm, store->record_count, r);
    if (start_threads(store, error) != COLIBRI_OK) {
        stop_threads(store);
        return error->status;
    }
    pthread_mutex_lock(&store->mutex);
    while (failure.status == COLIBRI_OK && (store->warm.count > 0 || store->reading_ahead > 0))
        pthread_cond_wait(&store->ready, &store->mutex);
    pthread_mutex_unlock(&store->mutex);
    stop_threads(store);
    store->opening = false;
    if (failure.status != COLIBRI_OK)
        *error = failure;
    return failure.status;
}

static colibri_status check_options(const cb_model *model, const cb_store_options *options, const cb_slots *slots,
                                    cb_error *error) {
    if (options->io_threads > MOST_THREADS)
        return cb_fail(error, COLIBRI_INVALID, "io_threads is %u, it must be 1 to %d", options->io_threads,
                       MOST_THREADS);
    if (options->io > COLIBRI_IO_BUFFERED || options->verify > COLIBRI_VERIFY_OFF ||
        options->huge_pages > COLIBRI_PAGES_1G)
        return cb_fail(error, COLIBRI_INVALID, "io is %u, verify %u, huge_pages %u: each must be 0, 1 or 2",
                       options->io, options->verify, options->huge_pages);
    if (slots->slot_count == 0 && slots->class_count > 0)
        return cb_fail(
            error, COLIBRI_INVALID,
            "%s: %" PRIu64 " bytes for experts are too few: at least %" PRIu64 " are needed, and %" PRIu64 " hold all",
            cb_label(model), options->slot_bytes, cb_slots_bytes(slots, 1), cb_slots_bytes(slots, UINT32_MAX));
    return COLIBRI_OK;
}

static void warn_about_guard(cb_expert_store *store, uint32_t *pages) {
    if (!store->guard || *pages == COLIBRI_PAGES_OFF)
        return;
    *pages = COLIBRI_PAGES_OFF;
    cb_warn(store->warning, sizeof store->warning, "guarded slots do not lie in huge pages");
}

colibri_status cb_expert_store_open(const cb_model *model, const cb_store_options *options, cb_expert_store **result,
                                    cb_error *error) {
    *result = NULL;
    cb_slots slots;
    cb_slots_choose(&slots, model, cb_page_bytes(options->huge_pages));
    cb_slots_divide(&slots, options->slot_bytes);
    if (check_options(model, options, &slots, error) != COLIBRI_OK)
        return error->status;
    cb_expert_store *store = cb_alloc(sizeof *store);
    if (store == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an expert store");
    uint32_t largest, pages = options->huge_pages;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->work, NULL);
    pthread_cond_init(&store->ready, NULL);
    store->model = model;
    store->policy = &cb_policy_lru;
    store->slots = slots;
    store->file = (cb_record_file){.model = model, .fd = model->fd, .direct_fd = -1};
    store->record_count = count_records(model, &largest);
    store->thread_count = count_threads(options);
    store->resident = slots.slot_count == store->record_count;
    store->guard = options->guard;
    store->quick = store->resident && !store->guard;
    store->block = cb_alloc(lay_tables(NULL, model, slots.slot_count, store->thread_count, &store->t));
    if (store->block == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for the tables of %u experts", cb_label(model),
                store->record_count);
        goto fail;
    }
    lay_tables(store->block, model, slots.slot_count, store->thread_count, &store->t);
    warn_about_guard(store, &pages);
    if (cb_slots_map(&store->slots, cb_label(model), pages, options->lock_memory, store->warning, sizeof store->warning,
                     error) != COLIBRI_OK)
        goto fail;
    fill_tables(store);
    cb_record_file_open(&store->file, model, options->io, options->verify, store->resident,
                        store->slots.class_count > 0 ? store->slots.classes[store->slots.class_count - 1].memory : NULL,
                        store->warning, sizeof store->warning);
    if (store->guard && store->slots.mapped_bytes > 0)
        mprotect(store->slots.memory, store->slots.mapped_bytes, PROT_NONE);
    if ((store->resident ? read_all(store, error) : start_threads(store, error)) != COLIBRI_OK)
        goto fail;
    *result = store;
    return COLIBRI_OK;

fail:
    cb_expert_store_close(store);
    return error->status;
}

void cb_expert_store_close(cb_expert_store *store) {
    if (store == NULL)
        return;
    stop_threads(store);
    cb_record_file_close(&store->file);
    cb_slots_unmap(&store->slots);
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->ready);
    pthread_mutex_destroy(&store->mutex);
    cb_free(store->block);
    cb_free(store);
}

/* ---- a call ---- */

static void begin_entry(cb_expert_store *store, uint32_t e) {
    call *call = &store->call;
    entry *entry = &call->entries[e];
    record *record = &store->t.records[entry->record];
    set_counters *set = &store->t.sets[call->set];
    record->entry = e;
    if (record->ahead)
        count_more(&set->prefetched_used, 1);
    record->ahead = false;
    if (record->slot != NONE && state_of(store, record->slot) == SLOT_KEPT) {
        pin(store, entry->record);
        call->ahead[record->class]++;
        call->ready[call->ready_count++] = e;
        count_more(&set->hits, 1);
        return;
    }
    count_more(&set->misses, 1);
    if (record->slot != NONE) {
        entry->loading = true;
        call->loading++;
        call->ahead[record->class]++;
        return;
    }
    uint32_t class = record->class;
    if (call->first_waiting[class] == NONE)
        call->first_waiting[class] = e;
    else
        call->entries[call->last_waiting[class]].next = e;
    call->last_waiting[class] = e;
    call->waiting++;
}

void cb_store_begin(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    call *call = &store->call;
    uint32_t first = store->t.first[set];
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
        call->first_waiting[c] = NONE;
        call->ahead[c] = 0;
    }
    count_more(&store->t.sets[set].calls, 1);
    store->usage.calls++;
    store->usage.set = set;
    store->policy->on_call(&store->usage, first, store->model->sets[set].count, experts, count);
    for (uint32_t i = 0; i < count; i++) {
        call->entries[i] = (entry){.record = first + experts[i], .next = NONE};
        begin_entry(store, i);
    }
    if (call->waiting > 0)
        wake_readers(store);
    pthread_mutex_unlock(&store->mutex);
}

static const uint8_t *record_memory(const cb_expert_store *store, uint32_t r) {
    return slot_memory(store, store->t.records[r].slot, store->t.records[r].class);
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
        uint64_t start = now();
        while (call->handed == call->ready_count)
            pthread_cond_wait(&store->ready, &store->mutex);
        count_more(&store->t.sets[call->set].stall_nanoseconds, now() - start);
    }
    for (; given < most && call->handed < call->ready_count; given++, call->handed++) {
        uint32_t e = call->ready[call->handed];
        const entry *entry = &call->entries[e];
        call->ahead[store->t.records[entry->record].class]--;
        ready[given] =
            (cb_store_ready){e, entry->error == NULL ? record_memory(store, entry->record) : NULL, entry->error};
    }
    if (call->waiting > 0)
        wake_readers(store);
    pthread_mutex_unlock(&store->mutex);
    return given;
}

static void release(cb_expert_store *store, uint32_t e) {
    uint32_t r = store->call.entries[e].record;
    record *record = &store->t.records[r];
    if (record->entry != e)
        return;
    record->entry = NONE;
    if (record->slot != NONE && state_of(store, record->slot) == SLOT_PINNED)
        keep(store, r);
}

void cb_store_release(cb_expert_store *store, uint32_t index) {
    if (store->quick)
        return;
    pthread_mutex_lock(&store->mutex);
    release(store, index);
    if (store->call.waiting > 0)
        wake_readers(store);
    pthread_mutex_unlock(&store->mutex);
}

void cb_store_end(cb_expert_store *store) {
    if (store->quick)
        return;
    pthread_mutex_lock(&store->mutex);
    call *call = &store->call;
    for (uint32_t e = 0; e < call->count; e++)
        release(store, e);
    call->count = call->handed = call->ready_count = call->waiting = call->loading = 0;
    if (store->prefetch.count + store->warm.count > 0)
        wake_readers(store);
    pthread_mutex_unlock(&store->mutex);
}

static void queue_records(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count, ring *ring,
                          uint8_t queue) {
    if (store->resident)
        return;
    pthread_mutex_lock(&store->mutex);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = store->t.first[set] + experts[i];
        record *record = &store->t.records[r];
        if (record->slot != NONE || record->entry != NONE)
            continue;
        if (queue == QUEUED_PREFETCH)
            record->expected = (uint32_t)atomic_load_explicit(&store->t.sets[set].calls, memory_order_relaxed);
        if (!(record->queued & queue))
            push(ring, store->record_count, r);
        record->queued |= queue;
    }
    if (ring->count > 0 && may_read_ahead(store))
        wake_readers(store);
    pthread_mutex_unlock(&store->mutex);
}

void cb_store_prefetch(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    queue_records(store, set, experts, count, &store->prefetch, QUEUED_PREFETCH);
}

void cb_store_warm(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count) {
    queue_records(store, set, experts, count, &store->warm, QUEUED_WARM);
}

/* ---- what others ask ---- */

static uint64_t read_counter(const counter *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

void cb_store_get_stats(const cb_expert_store *store, uint32_t set, cb_store_stats *stats) {
    const set_counters *counters = &store->t.sets[set];
    *stats = (cb_store_stats){.hits = read_counter(&counters->hits),
                              .misses = read_counter(&counters->misses),
                              .bytes_read = read_counter(&counters->bytes_read),
                              .stall_nanoseconds = read_counter(&counters->stall_nanoseconds),
                              .prefetched = read_counter(&counters->prefetched),
                              .prefetched_used = read_counter(&counters->prefetched_used),
                              .evictions = read_counter(&counters->evictions),
                              .load_nanoseconds = read_counter(&counters->load_nanoseconds)};
}

void cb_store_get_expert_loads(const cb_expert_store *store, uint32_t set, uint64_t *loads,
                               uint64_t *load_nanoseconds) {
    const read_counters *reads = &store->t.reads[store->t.first[set]];
    for (uint32_t i = 0; i < store->model->sets[set].count; i++) {
        if (loads != NULL)
            loads[i] = read_counter(&reads[i].loads);
        if (load_nanoseconds != NULL)
            load_nanoseconds[i] = read_counter(&reads[i].nanoseconds);
    }
}

uint64_t cb_expert_store_bytes(const cb_expert_store *store) { return store->slots.mapped_bytes; }

bool cb_expert_store_is_resident(const cb_expert_store *store) { return store->resident; }

bool cb_expert_store_is_direct(const cb_expert_store *store) {
    return atomic_load_explicit(&store->file.direct, memory_order_relaxed);
}

const char *cb_store_warning(const cb_expert_store *store) { return store->warning[0] != '\0' ? store->warning : NULL; }

bool cb_store_slot_at(const cb_expert_store *store, const void *address, cb_store_place *place) {
    uintptr_t at = (uintptr_t)address;
    for (uint32_t c = 0; c < store->slots.class_count; c++) {
        const cb_slot_class *class = &store->slots.classes[c];
        uintptr_t start = (uintptr_t) class->memory;
        if (at < start || at - start >= class->slot_count * class->slot_bytes)
            continue;
        uint32_t slot = class->first_slot + (uint32_t)((at - start) / class->slot_bytes), r = record_of(store, slot);
        *place =
            (cb_store_place){.slot = slot, .set = NONE, .expert = NONE, .state = state_names[state_of(store, slot)]};
        if (r != NONE) {
            place->set = store->t.records[r].set;
            place->expert = r - store->t.first[place->set];
        }
        return true;
    }
    return false;
}
