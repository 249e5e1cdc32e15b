/* Which record leaves its slot: a table of functions, so that policies can be exchanged and compared. */
#ifndef CB_POLICY_H
#define CB_POLICY_H

#include "core/core.h"

/* What is known of the use of a record. */
typedef struct cb_record_use {
    uint64_t last; /* the call that asked for it, or caused its read, counted over all sets; 0: none */
} cb_record_use;

typedef struct cb_usage {
    uint64_t calls; /* so far, of all sets; the running one included */
    uint32_t set;   /* of the running or last call */
    uint32_t set_count;
    cb_record_use *records; /* [records of all sets] */
} cb_usage;

typedef struct cb_policy {
    const char *name;
    /* A call of set usage->set, whose records are [first, first + count), asks for experts[0..asked). */
    void (*on_call)(cb_usage *usage, uint32_t first, uint32_t count, const uint32_t *experts, uint32_t asked);
    /* A record is read that no call asks for. */
    void (*on_read_ahead)(cb_usage *usage, uint32_t record);
    /* How far away the next use seems to be: the record with the largest distance leaves. expected: it was read ahead
     * for the next call of its set. */
    uint64_t (*distance)(const cb_usage *usage, uint32_t set, uint32_t record, bool expected);
} cb_policy;

extern const cb_policy cb_policy_lru;

#endif
