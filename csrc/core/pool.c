/* Threads that share out numbered tasks.
 *
 * One 64-bit word holds the job's number (high half) and how many of its tasks are not yet
 * taken (low half). A thread takes a task by lowering it with compare-and-swap, so a thread
 * that comes late, with an old word, can take nothing; and while a taken task is not finished
 * its job cannot end, so the job's fields, read before the swap, are that job's. Counting down
 * (task = count - left) makes "nothing left" visible in the word alone: the count of the next
 * job may already be written while this one's last word is still seen.
 *
 * Nobody waits for threads that took no task: with more threads than processors a job never
 * hangs on waking them all. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/core.h"
#include "core/threads.h"

#define SPIN_NANOSECONDS 50000
#define BUSY_SPIN_NANOSECONDS 300000 /* between begin and end: what runs in one thread between two jobs is shorter */
#define SPINS_PER_CLOCK 32

typedef struct worker {
    cb_pool *pool;
    pthread_t thread;
    uint32_t index;
} worker;

typedef struct switch_count {
    _Alignas(CB_CACHE_LINE) uint64_t noted; /* each thread has its own */
    uint32_t watch;                         /* for which it was noted */
} switch_count;

struct cb_pool {
    uint32_t threads;
    bool spin;
    worker *workers;               /* [threads - 1] */
    switch_count *switches;        /* [threads] */
    bool pinned;                   /* the caller to: */
    uint32_t processor;            /* between begin and end */
    cb_processor_set caller_place; /* the caller's mask before begin */
    _Atomic uint64_t regions;

    _Atomic cb_task task;
    void *_Atomic context;
    _Atomic uint32_t count;

    _Alignas(CB_CACHE_LINE) _Atomic uint64_t word;       /* job << 32 | tasks left to take */
    _Alignas(CB_CACHE_LINE) _Atomic uint32_t unfinished; /* tasks; the caller sleeps on it */
    _Atomic uint32_t caller_sleeps;
    _Alignas(CB_CACHE_LINE) _Atomic uint32_t published; /* changes with every job; workers sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t watch;
    _Atomic bool stop, busy;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count < INT_MAX ? (int)count : INT_MAX, NULL, NULL, 0);
}

static void pause_processor(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

uint64_t cb_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

static uint64_t thread_switches(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? (uint64_t)(usage.ru_nvcsw + usage.ru_nivcsw) : 0;
}

/* Takes and runs tasks until none is left; returns whether there was one. */
static bool work(cb_pool *pool, uint32_t index) {
    uint32_t done = 0;
    uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
    while ((uint32_t)word != 0) {
        cb_task task = atomic_load_explicit(&pool->task, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool->context, memory_order_relaxed);
        uint32_t count = atomic_load_explicit(&pool->count, memory_order_relaxed);
        if (!atomic_compare_exchange_weak_explicit(&pool->word, &word, word - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        task(context, count - (uint32_t)word, index);
        done++;
        word = atomic_load_explicit(&pool->word, memory_order_acquire);
    }
    if (done == 0)
        return false;
    if (atomic_fetch_sub(&pool->unfinished, done) == done && atomic_load(&pool->caller_sleeps) != 0)
        futex_wake(&pool->unfinished, 1);
    return true;
}

static bool something_to_do(cb_pool *pool) {
    return (uint32_t)atomic_load_explicit(&pool->word, memory_order_acquire) != 0 ||
           atomic_load_explicit(&pool->stop, memory_order_relaxed);
}

static bool all_finished(cb_pool *pool) { return atomic_load_explicit(&pool->unfinished, memory_order_acquire) == 0; }

static void note_switches(cb_pool *pool, uint32_t index) {
    uint32_t watch = atomic_load_explicit(&pool->watch, memory_order_relaxed);
    switch_count *count = &pool->switches[index];
    if (count->watch == watch)
        return;
    count->watch = watch;
    count->noted = thread_switches();
}

/* True as soon as `ready` holds, false when that takes too long to wait for it awake. */
static bool spin_until(cb_pool *pool, uint32_t index, bool (*ready)(cb_pool *)) {
    if (ready(pool))
        return true;
    if (!pool->spin)
        return false;
    uint64_t start = cb_now(), limit;
    do {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            pause_processor();
            if (ready(pool))
                return true;
        }
        note_switches(pool, index);
        limit = atomic_load_explicit(&pool->busy, memory_order_relaxed) ? BUSY_SPIN_NANOSECONDS : SPIN_NANOSECONDS;
    } while (cb_now() - start < limit);
    return false;
}

static void *worker_main(void *argument) {
    worker *self = argument;
    cb_pool *pool = self->pool;
    pthread_setname_np(pthread_self(), "colibri");
    cb_float_enter();
    while (!atomic_load(&pool->stop)) {
        if (work(pool, self->index)) {
            note_switches(pool, self->index);
            continue;
        }
        if (spin_until(pool, self->index, something_to_do))
            continue;
        uint32_t seen = atomic_load(&pool->published);
        if (something_to_do(pool))
            continue;
        /* The caller changes `published` before it reads `sleepers`, we raise `sleepers` before the kernel
         * compares `published`: one of the two sees the other, so no wake-up is lost. */
        atomic_fetch_add(&pool->sleepers, 1);
        futex_wait(&pool->published, seen);
        atomic_fetch_sub(&pool->sleepers, 1);
    }
    return NULL;
}

static void stop_workers(cb_pool *pool, uint32_t started) {
    atomic_store(&pool->stop, true);
    atomic_fetch_add(&pool->published, 1);
    futex_wake(&pool->published, UINT32_MAX);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(pool->workers[i].thread, NULL);
}

colibri_status cb_pool_open(uint32_t threads, const uint32_t *processors, cb_pool **result, cb_error *error) {
    *result = NULL;
    if (threads == 0)
        return cb_fail(error, COLIBRI_INVALID, "threads is 0, it must be at least 1");
    uint32_t started = 0;
    cb_pool *pool = cb_alloc(sizeof *pool);
    worker *workers = cb_alloc(cb_multiply(threads - 1, sizeof *workers));
    switch_count *switches = cb_alloc(cb_multiply(threads, sizeof *switches));
    if (pool == NULL || workers == NULL || switches == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for %u threads", threads);
        goto fail;
    }
    pool->threads = threads;
    pool->workers = workers;
    pool->switches = switches;
    pool->pinned = processors != NULL;
    pool->processor = processors != NULL ? processors[0] : 0;
    pool->spin = threads > 1 && threads <= cb_available_processors("/");

    /* Workers inherit the mask: a signal of the program is never handled on one of them. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failure = 0;
    for (; started < threads - 1; started++) {
        workers[started].pool = pool;
        workers[started].index = started + 1;
        failure = pthread_create(&workers[started].thread, NULL, worker_main, &workers[started]);
        if (failure != 0)
            break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (uint32_t i = 0; failure == 0 && processors != NULL && i < started; i++)
        if (!cb_pin_thread(workers[i].thread, processors[i + 1])) {
            cb_fail(error, COLIBRI_INVALID, "thread %u could not be pinned to processor %u; leave pinning out", i + 2,
                    processors[i + 1]);
            goto fail;
        }
    if (failure != 0) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "thread %u of %u could not be started: %s; ask for fewer threads",
                started + 2, threads, strerror(failure));
        goto fail;
    }
    *result = pool;
    return COLIBRI_OK;

fail:
    if (pool != NULL)
        stop_workers(pool, started);
    cb_free(switches);
    cb_free(workers);
    cb_free(pool);
    return error->status;
}

void cb_pool_close(cb_pool *pool) {
    if (pool == NULL)
        return;
    stop_workers(pool, pool->threads - 1);
    cb_free(pool->switches);
    cb_free(pool->workers);
    cb_free(pool);
}

uint32_t cb_pool_threads(const cb_pool *pool) { return pool->threads; }

uint64_t cb_pool_regions(const cb_pool *pool) { return atomic_load_explicit(&pool->regions, memory_order_relaxed); }

static void wake_sleepers(cb_pool *pool, uint32_t count) {
    atomic_fetch_add(&pool->published, 1);
    if (atomic_load(&pool->sleepers) != 0)
        futex_wake(&pool->published, count);
}

void cb_pool_begin(cb_pool *pool) {
    if (pool->threads > 1 && pool->spin) {
        atomic_store(&pool->busy, true);
        wake_sleepers(pool, pool->threads - 1);
    }
    if (pool->pinned) {
        cb_thread_place(&pool->caller_place);
        cb_pin_thread(pthread_self(), pool->processor);
    }
}

void cb_pool_end(cb_pool *pool) {
    atomic_store_explicit(&pool->busy, false, memory_order_relaxed);
    if (pool->pinned)
        cb_thread_put_back(&pool->caller_place);
}

void cb_pool_watch(cb_pool *pool) {
    atomic_store_explicit(&pool->watch, atomic_load_explicit(&pool->watch, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    note_switches(pool, 0);
}

bool cb_pool_switched(const cb_pool *pool, uint32_t worker) {
    return thread_switches() != pool->switches[worker].noted;
}

void cb_pool_run(cb_pool *pool, uint32_t count, cb_task task, void *context) {
    if (count <= 1 || pool->threads == 1) {
        for (uint32_t i = 0; i < count; i++)
            task(context, i, 0);
        return;
    }
    atomic_store_explicit(&pool->task, task, memory_order_relaxed);
    atomic_store_explicit(&pool->context, context, memory_order_relaxed);
    atomic_store_explicit(&pool->count, count, memory_order_relaxed);
    atomic_store_explicit(&pool->unfinished, count, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&pool->word, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&pool->regions, atomic_load_explicit(&pool->regions, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    atomic_store(&pool->word, job << 32 | count);
    wake_sleepers(pool, count - 1);

    work(pool, 0);
    if (spin_until(pool, 0, all_finished))
        return;
    atomic_store(&pool->caller_sleeps, 1);
    uint32_t unfinished;
    while ((unfinished = atomic_load(&pool->unfinished)) != 0)
        futex_wait(&pool->unfinished, unfinished);
    atomic_store(&pool->caller_sleeps, 0);
}
