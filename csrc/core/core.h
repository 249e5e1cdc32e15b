/* What every part of the core uses: errors, memory, CPU features, checksums, threads. */
#ifndef CB_CORE_H
#define CB_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "colibri.h"

#ifdef __FAST_MATH__
#error "the numeric contract forbids -ffast-math"
#endif

#define CB_CACHE_LINE 64

/* ---- errors (status.c) ---- */

typedef struct cb_error {
    colibri_status status;
    char message[COLIBRI_MESSAGE_SIZE];
} cb_error;

/* Writes the message and returns the status, so that `return cb_fail(...)` works. */
colibri_status cb_fail(cb_error *error, colibri_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Copies to a caller's buffer (NULL and size 0 allowed), always terminated. */
void cb_copy_message(const cb_error *error, char *message, size_t message_size);

/* ---- memory (memory.c) ---- */

/* Zeroed, aligned to 64 bytes (to 4096 from 1 MiB on); NULL when it cannot be had. size 0 is allowed. */
void *cb_alloc(uint64_t size);
void cb_free(void *memory);
/* What cb_alloc takes for it; whole pages where the system gives it pages of its own. */
uint64_t cb_alloc_bytes(uint64_t size);
/* a * b, or UINT64_MAX on overflow (which cb_alloc refuses). */
uint64_t cb_multiply(uint64_t a, uint64_t b);
static inline uint64_t cb_round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

/* ---- checksum (crc32c.c) ---- */

uint32_t cb_crc32c(uint32_t crc, const void *data, uint64_t size); /* start with 0 */

/* ---- CPU (cpu.c) ---- */

/* Ascending: each is faster than those before it, on a CPU that has both. */
typedef enum cb_isa {
    CB_ISA_SCALAR,
    CB_ISA_AVX2,
    CB_ISA_AVXVNNI,
    CB_ISA_AVX512,
    CB_ISA_AMX,
    CB_ISA_NEON,
    CB_ISA_I8MM,
    CB_ISA_COUNT,
} cb_isa;

const char *cb_isa_name(cb_isa isa);
/* Whether the CPU has the instructions and the system saves their registers. For AMX the kernel must also permit
 * them, which cb_isa_choose asks for. */
bool cb_isa_supported(cb_isa isa);
/* NULL or "": the best; a name this CPU lacks, whose registers the kernel refuses or that is unknown: UNSUPPORTED,
 * listing what there is. Choosing AMX gives every thread of the process leave to use its tiles. */
colibri_status cb_isa_choose(const char *name, cb_isa *isa, cb_error *error);
/* min(affinity, floor(cgroup quota / period) at least 1, physical cores), v1 and v2, all parents. */
uint32_t cb_count_threads(const char *system_root);
uint64_t cb_now(void); /* nanoseconds of a clock that never goes back */

/* Round to nearest, denormals on, exceptions masked; the caller's state comes back with leave. */
typedef struct cb_float_environment {
    uint64_t saved;
} cb_float_environment;
cb_float_environment cb_float_enter(void);
void cb_float_leave(cb_float_environment environment);

/* ---- threads (pool.c) ---- */

typedef struct cb_pool cb_pool;
/* Called with each task index once; `worker` < thread count names per-thread scratch. */
typedef void (*cb_task)(void *context, uint32_t task, uint32_t worker);

/* threads >= 1 counts the caller: threads - 1 workers are started (default stack, all signals blocked).
 * processors: NULL, or [threads] to which the threads are pinned, the caller's first. */
colibri_status cb_pool_open(uint32_t threads, const uint32_t *processors, cb_pool **pool, cb_error *error);
void cb_pool_close(cb_pool *pool);
uint32_t cb_pool_threads(const cb_pool *pool);
/* Runs tasks 0..count-1 on all threads, returns when all are done; tasks are taken in
 * ascending order from one counter. One caller at a time (the runtime's lock). With one task or
 * one thread it runs in the caller. Workers spin for some microseconds, then sleep. */
void cb_pool_run(cb_pool *pool, uint32_t count, cb_task task, void *context);
/* Around many runs with little between them: wakes the workers at once and lets them wait longer awake; pins the
 * caller, whose old mask comes back at the end. */
void cb_pool_begin(cb_pool *pool);
void cb_pool_end(cb_pool *pool);
uint64_t cb_pool_regions(const cb_pool *pool); /* runs shared out to several threads since the pool was opened */
/* Context switches: after `watch` every thread notes how many it has had as soon as it has nothing to do (the caller
 * at once); later a task can ask whether its own thread has had more since. */
void cb_pool_watch(cb_pool *pool);
bool cb_pool_switched(const cb_pool *pool, uint32_t worker);

#endif
