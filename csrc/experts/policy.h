/* Which record leaves its slot: a table of functions, so that policies can be exchanged and compared. */
#ifndef CB_POLICY_H
#define CB_POLICY_H

#include "core/core.h"

/* What is known of the use of a set of experts. */
typedef struct cb_set_use {
    uint32_t first, count; /* records */
    uint32_t chosen;       /* that one token uses */
    double weight;         /* the policy's */
} cb_set_use;

typedef struct cb_usage {
    uint64_t calls; /* of all sets so far, the running one included */
    uint32_t set;   /* of the running or last call */
    uint32_t set_count;
    cb_set_use *sets; /* [set_count] */
    double *scores;   /* [records of all sets] the policy's, 0 at first */
} cb_usage;

typedef struct cb_policy {
    const char *name;
    /* A call of set usage->set asks for experts[0..asked). */
    void (*on_call)(cb_usage *usage, const uint32_t *experts, uint32_t asked);
    /* A record of a set is read that no call has asked for, because it was used often before. */
    void (*on_warm)(cb_usage *usage, uint32_t set, uint32_t record);
    /* Calls until the next use, as it seems: the kept record with the longest wait leaves. expected: it was read ahead
     * for the next call of its set. */
    double (*wait)(const cb_usage *usage, uint32_t set, uint32_t record, bool expected);
} cb_policy;

/* The default. A record's chance of being asked for by a call of its set is estimated from a decaying count, the
 * wait is what that means in calls of all sets, with the layers' order taken into account: after a layer all others
 * come first. So a prompt, which asks for everything, keeps as much as fits, and experts used more than others stay
 * whatever passes by. */
extern const cb_policy cb_policy_expected_wait;
/* The least recently used goes: for comparison. It keeps nothing when layers are walked in turn and do not fit. */
extern const cb_policy cb_policy_least_recent;

#endif
