/* Latencies: a histogram, and the time from a router's output to the last thread's first task on its experts. */
#include "vm/vm.h"

#define STEPS 16 /* buckets of a power of two; one bucket for each value below */

static uint32_t bucket_of(uint64_t value) {
    if (value < STEPS)
        return (uint32_t)value;
    uint32_t power = 63 - (uint32_t)__builtin_clzll(value);
    uint32_t bucket = (power - 3) * STEPS + (uint32_t)(value >> (power - 4)) % STEPS;
    return bucket < CB_LATENCY_BUCKETS ? bucket : CB_LATENCY_BUCKETS - 1;
}

static uint64_t last_of_bucket(uint32_t bucket) {
    if (bucket < STEPS)
        return bucket;
    uint32_t power = bucket / STEPS + 3;
    return ((uint64_t)(STEPS + bucket % STEPS + 1) << (power - 4)) - 1;
}

static uint64_t read_counter(const cb_counter *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

void cb_latency_add(cb_latency *latency, uint64_t nanoseconds) {
    cb_count(&latency->buckets[bucket_of(nanoseconds)], 1);
    cb_count(&latency->sum, nanoseconds);
    if (nanoseconds > read_counter(&latency->largest))
        atomic_store_explicit(&latency->largest, nanoseconds, memory_order_relaxed);
    cb_count(&latency->count, 1);
}

/* The value that `share` percent do not exceed: the last of its bucket, but never more than the largest. */
static uint64_t percentile(const cb_latency *latency, uint64_t count, uint32_t share) {
    uint64_t wanted = count - count * (100 - share) / 100, seen = 0, largest = read_counter(&latency->largest);
    for (uint32_t i = 0; i < CB_LATENCY_BUCKETS; i++) {
        seen += read_counter(&latency->buckets[i]);
        if (seen >= wanted)
            return last_of_bucket(i) < largest ? last_of_bucket(i) : largest;
    }
    return largest;
}

colibri_latency cb_latency_read(const cb_latency *latency) {
    uint64_t count = read_counter(&latency->count);
    if (count == 0)
        return (colibri_latency){0};
    return (colibri_latency){.count = count,
                             .sum = read_counter(&latency->sum),
                             .p50 = percentile(latency, count, 50),
                             .p99 = percentile(latency, count, 99),
                             .largest = read_counter(&latency->largest)};
}

typedef struct dispatched_job {
    cb_vm *vm;
    cb_task task;
    void *context;
} dispatched_job;

static void dispatched_task(void *context, uint32_t task, uint32_t worker) {
    const dispatched_job *job = context;
    cb_first_task *first = &job->vm->first_tasks[worker];
    if (first->time == 0) {
        first->time = cb_now();
        first->switched = cb_pool_switched(job->vm->pool, worker);
    }
    job->task(job->context, task, worker);
}

void cb_run_dispatched(cb_vm *vm, uint32_t count, cb_task task, void *context) {
    if (vm->routed == 0 || vm->threads == 1 || count < vm->threads) {
        cb_pool_run(vm->pool, count, task, context);
        vm->routed = 0;
        return;
    }
    for (uint32_t i = 0; i < vm->threads; i++)
        vm->first_tasks[i].time = 0;
    dispatched_job job = {vm, task, context};
    cb_pool_run(vm->pool, count, dispatched_task, &job);
    uint64_t last = 0;
    bool switched = false, missed = false;
    for (uint32_t i = 0; i < vm->threads; i++) {
        const cb_first_task *first = &vm->first_tasks[i];
        last = first->time > last ? first->time : last;
        switched |= first->switched;
        missed |= first->time == 0;
    }
    if (missed)
        cb_count(&vm->phase->dispatch_missed, 1);
    else
        cb_latency_add(switched ? &vm->phase->dispatch_switched : &vm->phase->dispatch, last - vm->routed);
    vm->routed = 0;
}
