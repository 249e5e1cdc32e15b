/* The store's inside, shared by store.c (opening, statistics), reading.c (slots and the threads that read) and
 * calls.c.
 *
 * Records, slots and the running call are changed under one lock, `mutex`, also by the threads that read. With room
 * for all nothing changes after opening, and a call takes no lock. */
#ifndef CB_STORE_PARTS_H
#define CB_STORE_PARTS_H

#include <pthread.h>

#include "experts/io_choice.h"
#include "experts/policy.h"
#include "experts/slots.h"
#include "experts/store.h"

#define CB_NONE UINT32_MAX

typedef _Atomic uint64_t counter; /* written under the lock or by the one caller, read by anyone */

enum { SLOT_FREE, SLOT_LOADING, SLOT_KEPT, SLOT_PINNED };
enum { QUEUED_PREFETCH = 1, QUEUED_WARM = 2 };

typedef struct slot {
    _Atomic uint32_t record; /* that it holds or held last */
    _Atomic uint8_t state;
} slot;

typedef struct record {
    uint32_t slot;     /* CB_NONE: absent */
    uint32_t entry;    /* of the running call that asked for it, or CB_NONE */
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
    double *scores;            /* [record count] */
    cb_set_use *uses;          /* [set count] */
    set_counters *sets;        /* [set count] */
    read_counters *reads;      /* [record count] */
    pthread_t *threads;        /* [thread count] */
} tables;

struct cb_expert_store {
    const cb_model *model;
    const cb_policy *policy;
    cb_slots slots;
    cb_record_file file;
    cb_io_rates io_rates;
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

static inline void count_more(counter *counter, uint64_t more) {
    atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static inline uint8_t state_of(const cb_expert_store *store, uint32_t slot) {
    return atomic_load_explicit(&store->t.slots[slot].state, memory_order_relaxed);
}

static inline uint32_t record_of(const cb_expert_store *store, uint32_t slot) {
    return atomic_load_explicit(&store->t.slots[slot].record, memory_order_relaxed);
}

/* All of these with the lock held. */

uint8_t *cb_store_memory(const cb_expert_store *store, uint32_t slot, uint32_t class);
/* A kept record is needed by the running call; one that was loading or pinned is not. */
void cb_store_pin(cb_expert_store *store, uint32_t record);
void cb_store_keep(cb_expert_store *store, uint32_t record);
void cb_ring_push(ring *ring, uint32_t capacity, uint32_t record);
bool cb_store_may_read_ahead(const cb_expert_store *store);
/* There is something to read for threads that wait. */
void cb_store_wake(cb_expert_store *store);

/* The main function of an I/O thread. */
void *cb_store_read(void *store);

#endif
