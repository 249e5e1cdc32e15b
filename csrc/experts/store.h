/* The experts' records in memory: all of them, or as many as fit in the slots of a budget, read from the file when a
 * layer asks for them.
 *
 * A record lies in a slot of the smallest class that holds it. A slot is free, loading or resident; a resident one is
 * pinned while the running call reads it, and kept otherwise until the policy gives it away. One call at a time (the
 * runtime's lock); reads run on threads of the store's own. */
#ifndef CB_STORE_H
#define CB_STORE_H

#include "experts/io_choice.h"

typedef struct cb_expert_store cb_expert_store;

typedef struct cb_store_options {
    uint64_t slot_bytes;            /* for all slots; UINT64_MAX: room for every record, all read when it opens */
    uint32_t io_threads;            /* 1 to 16; 0: 2 */
    uint32_t io;                    /* COLIBRI_IO_* */
    uint32_t verify;                /* COLIBRI_VERIFY_* */
    uint32_t huge_pages;            /* COLIBRI_PAGES_* */
    uint64_t page_cache_bytes;      /* for COLIBRI_IO_AUTO, see cb_io_prefers_direct; 0: not known */
    bool lock_memory;               /* mlock the slots; refused by the kernel: goes on, cb_store_warning says so */
    bool guard;                     /* memory of slots that no call holds cannot be accessed */
    const struct cb_policy *policy; /* who is evicted (experts/policy.h); NULL: the default */
} cb_store_options;

/* What a store takes; computed from the model's directory alone. */
typedef struct cb_store_plan {
    uint64_t all_bytes;    /* slots for every record */
    uint64_t least_bytes;  /* slots with which every call of every layer ends (one expert after another) */
    uint64_t wasted_bytes; /* of all_bytes: records smaller than their slot's class */
    uint64_t other_bytes;  /* tables, queues, staging and stacks beside the slots */
    uint32_t class_count;
} cb_store_plan;
void cb_expert_store_plan(const cb_model *model, const cb_store_options *options, cb_store_plan *plan);

/* INVALID, with the figures, when slot_bytes is below the plan's least_bytes. With room for all, every record is read
 * and checked now. The model must outlive the store. */
colibri_status cb_expert_store_open(const cb_model *model, const cb_store_options *options, cb_expert_store **store,
                                    cb_error *error);
void cb_expert_store_close(cb_expert_store *store);

/* A call: one layer asks for some of its experts and gets them in the order in which they are in memory. */
typedef struct cb_store_ready {
    uint32_t index;        /* which of the experts asked for */
    const uint8_t *record; /* aligned to 64; NULL: it could not be read, and `error` says why */
    const cb_error *error;
} cb_store_ready;
/* experts: distinct, copied. Reads of the missing ones start at once, first to last, as far as there are slots that
 * this call does not need. */
void cb_store_begin(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count);
/* Hands out what is in memory and was not handed out yet, `most` at most, pinned; waits for one when there is none.
 * 0: the call has got all. Release what you hold before the next time: a record that waits for one of these slots
 * would never come. An error stays readable until cb_store_end. */
uint32_t cb_store_next(cb_expert_store *store, cb_store_ready *ready, uint32_t most);
/* The call reads this record no more; its slot may take another record that the call waits for. Nothing to do for one
 * that could not be read. */
void cb_store_release(cb_expert_store *store, uint32_t index);
/* Ends the call, also early: pins go, reads that have not begun are dropped. */
void cb_store_end(cb_expert_store *store);

/* Low-priority reads, which never delay or evict what a call needs; any thread. A read that fails says nothing: the
 * call that needs the record tries again.
 *
 * Experts that the next call of this set will probably ask for. They take free slots and those of records whose next
 * use seems farther away; what has not begun when that call comes is dropped. */
void cb_store_prefetch(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count);
/* Experts that are often used, to fill free slots: nothing is evicted for them. */
void cb_store_warm(cb_expert_store *store, uint32_t set, const uint32_t *experts, uint32_t count);

/* Numbers of one set since the store was opened. */
typedef struct cb_store_stats {
    uint64_t hits, misses;                /* experts asked for that were, or were not, resident at cb_store_begin */
    uint64_t bytes_read;                  /* demand and prefetch */
    uint64_t stall_nanoseconds;           /* waited in cb_store_next */
    uint64_t prefetched, prefetched_used; /* records read ahead; of these, asked for before they were evicted */
    uint64_t evictions;
    uint64_t load_nanoseconds; /* sum over reads, queueing excluded */
} cb_store_stats;
void cb_store_get_stats(const cb_expert_store *store, uint32_t set, cb_store_stats *stats);
/* loads: [expert count of the set] reads; load_nanoseconds likewise; either may be NULL. */
void cb_store_get_expert_loads(const cb_expert_store *store, uint32_t set, uint64_t *loads, uint64_t *load_nanoseconds);
uint64_t cb_expert_store_bytes(const cb_expert_store *store);       /* of slots */
bool cb_expert_store_is_resident(const cb_expert_store *store);     /* holds every record for good */
bool cb_expert_store_is_direct(const cb_expert_store *store);       /* reads past the page cache */
cb_io_rates cb_expert_store_io_rates(const cb_expert_store *store); /* measured when it was opened */
const char *cb_store_warning(const cb_expert_store *store);         /* NULL, or what the kernel refused */

/* What lies at an address, for whoever explains a fault with `guard`. Takes no lock and may be called in a signal
 * handler. False: no slot is there. */
typedef struct cb_store_place {
    uint32_t slot, set, expert; /* the record that the slot holds or held last; set UINT32_MAX: none yet */
    const char *state;          /* "free", "loading", "kept" (no call has asked for it) or "pinned" */
} cb_store_place;
bool cb_store_slot_at(const cb_expert_store *store, const void *address, cb_store_place *place);
/* From now on an access to a slot that no call holds is named on stderr before it ends the process. The handler of
 * SIGSEGV is the process's: for debugging only. False: the store has no guard, or too many stores ask. */
bool cb_guard_add(const cb_expert_store *store);
void cb_guard_remove(const cb_expert_store *store);

#endif
