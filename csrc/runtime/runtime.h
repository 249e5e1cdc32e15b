/* The public handles. Lock order: a session is held before the runtime's lock is taken. */
#ifndef CB_RUNTIME_H
#define CB_RUNTIME_H

#include <pthread.h>
#include <sys/types.h>

#include "state/save.h"
#include "vm/vm.h"

struct colibri_runtime {
    pid_t process;
    const cb_kernels *kernels;
    cb_pool *pool;
    cb_block_pool *blocks;
    pthread_mutex_t forward; /* one forward at a time; others queue */
    atomic_uint engines;
};

struct colibri_engine {
    colibri_runtime *runtime;
    cb_model *model;
    cb_expert_store *store;
    cb_vm *vm;
    uint64_t tensor_bytes;
    cb_counter nanoseconds;
    atomic_uint sessions;
};

struct colibri_session {
    colibri_engine *engine;
    cb_block_layout layout;
    uint32_t format, context, block_count;
    cb_block **blocks;
    uint32_t *tokens;
    _Atomic uint32_t position;
    atomic_bool cancel;
    /* Who works on the session: NULL, the item of a running forward, or something else of the caller's. */
    const void *_Atomic holder;
    uint32_t done; /* tokens of the item that are computed; the holder's */
};

/* After a fork the threads are gone and a lock may be held for ever, so nothing is touched. */
bool cb_forked(const colibri_runtime *runtime);
colibri_status cb_fail_forked(cb_error *error);
/* Takes the session for one call: INVALID for NULL, FORKED, BUSY. */
colibri_status cb_session_hold(colibri_session *session, const void *holder, cb_error *error);
void cb_session_release(colibri_session *session);

#endif
