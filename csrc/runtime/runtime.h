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
    uint64_t state_limit; /* bytes that all sessions together may hold; UINT64_MAX: any */
    _Atomic uint64_t state_bytes;
};

struct colibri_session {
    colibri_engine *engine;
    cb_block_layout layout;
    uint32_t format, context, block_count;
    uint64_t bytes; /* counted in the engine's state_bytes */
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
/* The options of an engine with the defaults filled in; INVALID names the field. `given` may be NULL. */
colibri_status cb_check_engine_options(const colibri_engine_options *given, colibri_engine_options *options,
                                       cb_error *error);
/* What the options mean for the store and the VM of this model. */
void cb_engine_parts(const cb_model *model, const colibri_engine_options *options, cb_store_options *store,
                     cb_vm_options *vm);
colibri_status cb_check_session_options(const colibri_session_options *options, cb_error *error);
/* Bytes of all experts' records, and of those that one token uses at most (plan.c). */
uint64_t cb_all_expert_bytes(const cb_model *model);
uint64_t cb_token_expert_bytes(const cb_model *model);
/* Memory that a session takes. */
uint64_t cb_session_bytes(const cb_block_layout *layout, uint32_t context);
/* Takes the session for one call: INVALID for NULL, FORKED, BUSY. */
colibri_status cb_session_hold(colibri_session *session, const void *holder, cb_error *error);
void cb_session_release(colibri_session *session);

#endif
