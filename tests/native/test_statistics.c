/* What is counted: latencies, dispatch, profile, parallel regions; the order of ops; pinned threads.
 *
 *   test_statistics tiny.cbi */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "core/threads.h"
#include "runtime/runtime.h"

static const char *path;

typedef struct setup {
    colibri_runtime *runtime;
    colibri_engine *engine;
    colibri_session *session;
} setup;

static setup open_setup(uint32_t threads) {
    setup s;
    colibri_runtime_options options = {.threads = threads};
    colibri_session_options session_options = {.context = 300};
    CHECK(colibri_init(&options, &s.runtime, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_engine_open(s.runtime, path, NULL, &s.engine, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_session_open(s.engine, &session_options, &s.session, NULL, 0) == COLIBRI_OK);
    return s;
}

static void close_setup(setup s) {
    CHECK(colibri_session_close(s.session) == COLIBRI_OK && colibri_engine_close(s.engine) == COLIBRI_OK);
    CHECK(colibri_free(s.runtime) == COLIBRI_OK);
}

static void forward(setup s, uint32_t count) {
    uint32_t tokens[300];
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = i % 7;
    colibri_item item = {.session = s.session, .tokens = tokens, .token_count = count};
    CHECK(colibri_forward_batch(s.engine, &item, 1, NULL, 0) == COLIBRI_OK && item.status == COLIBRI_OK);
}

static void test_latency(void) {
    static cb_latency latency;
    colibri_latency read = cb_latency_read(&latency);
    CHECK(read.count == 0 && read.p99 == 0 && read.largest == 0);
    uint64_t sum = 0;
    for (uint64_t i = 1; i <= 1000; i++) {
        cb_latency_add(&latency, i * 1000);
        sum += i * 1000;
    }
    read = cb_latency_read(&latency);
    CHECK(read.count == 1000 && read.sum == sum && read.largest == 1000000);
    CHECK(read.p50 >= 500000 && read.p50 <= 500000 + 500000 / 16);
    CHECK(read.p99 >= 990000 && read.p99 <= 1000000);
    /* Every size has a bucket that is not below it, and not far above. */
    for (uint32_t shift = 0; shift < 64; shift++)
        for (uint64_t more = 0; more < 3; more++) {
            static cb_latency one;
            memset(&one, 0, sizeof one);
            uint64_t value = (UINT64_C(1) << shift) + more;
            cb_latency_add(&one, value);
            cb_latency_add(&one, UINT64_MAX);
            read = cb_latency_read(&one);
            CHECK(read.count == 2 && read.largest == UINT64_MAX);
            CHECK(shift > 40 || (read.p50 >= value && read.p50 - value <= value / 16));
        }
}

/* ---- dispatch ---- */

typedef struct spin_job {
    _Atomic uint32_t done;
    uint64_t nanoseconds;
} spin_job;

static void spin_task(void *context, uint32_t task, uint32_t worker) {
    spin_job *job = context;
    (void)task, (void)worker;
    for (uint64_t start = cb_now(); cb_now() - start < job->nanoseconds;)
        ;
    atomic_fetch_add(&job->done, 1);
}

static void test_dispatch(void) {
    setup s = open_setup(2);
    cb_vm *vm = s.engine->vm;
    spin_job job = {.nanoseconds = 50000};
    const cb_phase *phase = vm->phase = &vm->phases[COLIBRI_PHASE_DECODE];
    cb_pool_begin(s.runtime->pool);
    enum { RUNS = 200, TASKS = 8 };
    for (uint32_t i = 0; i < RUNS; i++) {
        cb_pool_watch(s.runtime->pool);
        vm->routed = cb_now();
        cb_run_dispatched(vm, TASKS, spin_task, &job);
        CHECK(vm->routed == 0);
    }
    uint64_t clean = phase->dispatch.count, switched = phase->dispatch_switched.count;
    CHECK(job.done == RUNS * TASKS && clean + switched + phase->dispatch_missed == RUNS);
    /* Without a router before it, or with fewer tasks than threads, there is nothing to measure. */
    cb_run_dispatched(vm, TASKS, spin_task, &job);
    vm->routed = cb_now();
    cb_run_dispatched(vm, 1, spin_task, &job);
    CHECK(vm->routed == 0 && job.done == RUNS * TASKS + TASKS + 1);
    CHECK(clean + switched + phase->dispatch_missed == RUNS);
    /* A thread that slept since it was asked to note its switches is seen. */
    bool calm = false;
    for (int i = 0; i < 1000 && !calm; i++) {
        cb_pool_watch(s.runtime->pool);
        calm = !cb_pool_switched(s.runtime->pool, 0);
    }
    CHECK(calm);
    cb_pool_watch(s.runtime->pool);
    usleep(1000);
    CHECK(cb_pool_switched(s.runtime->pool, 0));
    usleep(20000); /* the worker, too: longer than it spins */
    uint64_t before = phase->dispatch.count;
    vm->routed = cb_now();
    cb_run_dispatched(vm, TASKS, spin_task, &job);
    CHECK(phase->dispatch.count == before);
    cb_pool_end(s.runtime->pool);
    close_setup(s);
}

/* ---- profile ---- */

static void test_phases(void) {
    setup s = open_setup(2);
    colibri_stats stats;
    colibri_get_stats(s.engine, &stats);
    CHECK(stats.phases[0].tokens == 0 && stats.phases[1].parallel_regions == 0);
    forward(s, 200);
    forward(s, 1);
    forward(s, 1);
    colibri_get_stats(s.engine, &stats);
    CHECK(stats.tokens == 202 && stats.passes == 3);
    const colibri_phase_stats *prompt = &stats.phases[COLIBRI_PHASE_PROMPT];
    const colibri_phase_stats *decode = &stats.phases[COLIBRI_PHASE_DECODE];
    CHECK(prompt->tokens == 200 && prompt->passes == 1 && decode->tokens == 2 && decode->passes == 2);
    CHECK(prompt->nanoseconds > 0 && prompt->nanoseconds + decode->nanoseconds <= stats.nanoseconds);
    CHECK(prompt->parallel_regions > 0);

    colibri_engine_info info;
    colibri_engine_get_info(s.engine, &info);
    uint64_t rows = info.layer_count + 1, *profile = malloc(rows * COLIBRI_OP_KINDS * sizeof *profile);
    CHECK(profile != NULL);
    uint64_t all = 0, by_op[COLIBRI_OP_KINDS] = {0};
    for (int phase = 0; phase < 2; phase++) {
        uint64_t sum = 0;
        memset(profile, 0xff, rows * COLIBRI_OP_KINDS * sizeof *profile);
        CHECK(colibri_get_profile(s.engine, (colibri_phase)phase, profile) == COLIBRI_OK);
        for (uint64_t i = 0; i < rows * COLIBRI_OP_KINDS; i++) {
            sum += profile[i];
            by_op[i % COLIBRI_OP_KINDS] += profile[i];
        }
        CHECK(sum > 0 && sum <= stats.phases[phase].nanoseconds);
        all += sum;
        for (uint32_t layer = 0; layer < info.layer_count; layer++) {
            CHECK(profile[layer * COLIBRI_OP_KINDS + CB_OP_EXPERTS] > 0);
            CHECK(profile[layer * COLIBRI_OP_KINDS + CB_OP_EMBED] == 0);
        }
        CHECK(profile[info.layer_count * COLIBRI_OP_KINDS + CB_OP_EMBED] > 0);
        CHECK(profile[info.layer_count * COLIBRI_OP_KINDS + CB_OP_ATTENTION] == 0);
    }
    CHECK(all <= stats.nanoseconds && memcmp(by_op, stats.op_nanoseconds, sizeof by_op) == 0);
    CHECK(colibri_get_profile(s.engine, (colibri_phase)2, profile) == COLIBRI_INVALID);
    CHECK(colibri_get_profile(s.engine, COLIBRI_PHASE_PROMPT, NULL) == COLIBRI_INVALID);
    free(profile);
    close_setup(s);
}

/* ---- the order of ops ---- */

static cb_op matmul(uint32_t layer, uint32_t y, uint32_t x) {
    return (cb_op){.opcode = CB_OP_MATMUL, .layer = layer, .matmul = {y, x, 0, CB_ABSENT}};
}

static cb_op norm(uint32_t layer, uint32_t y, uint32_t x) {
    return (cb_op){.opcode = CB_OP_RMS_NORM, .layer = layer, .rms_norm = {y, x, 0, 1, 0}};
}

static void check_order(const char *expected, const cb_op *ops, uint32_t count) {
    cb_op copy[16];
    char order[160] = "", one[16];
    memcpy(copy, ops, count * sizeof *ops);
    cb_order_ops(copy, count);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; j < count; j++)
            if (memcmp(&copy[i], &ops[j], sizeof *copy) == 0) {
                snprintf(one, sizeof one, "%x", j);
                strcat(order, one);
                break;
            }
    if (strcmp(order, expected) != 0)
        fprintf(stderr, "order %s, expected %s\n", order, expected);
    CHECK(strcmp(order, expected) == 0);
}

static void test_order(void) {
    enum { X = 1, Q, K, V };
    /* q, norm, k, norm, v: the matmuls come together, the norms keep their order. */
    check_order("02413", (cb_op[]){matmul(0, Q, X), norm(0, Q, Q), matmul(0, K, X), norm(0, K, K), matmul(0, V, X)}, 5);
    /* Not past an op that writes the input, ... */
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, X, X), matmul(0, K, X)}, 3);
    /* ... reads the old value of the result, or writes it. */
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, Q, K), matmul(0, K, X)}, 3);
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, K, Q), matmul(0, K, X)}, 3);
    cb_op again = matmul(0, Q, X);
    again.matmul.weight = 1;
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, V, V), again}, 3);
    /* Another input, another layer. */
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, Q, Q), matmul(0, K, V)}, 3);
    check_order("012", (cb_op[]){matmul(0, Q, X), norm(0, Q, Q), matmul(1, K, X)}, 3);
    /* At most CB_MAX_GROUP together: the fifth begins a group of its own. */
    check_order("02341567",
                (cb_op[]){matmul(0, 2, X), norm(0, 2, 2), matmul(0, 3, X), matmul(0, 4, X), matmul(0, 5, X),
                          matmul(0, 6, X), norm(0, 6, 6), norm(0, 7, 6)},
                8);
}

/* ---- pinned threads ---- */

static uint32_t only_processor(void) {
    cb_processor_set set;
    CHECK(cb_thread_place(&set));
    uint32_t found = UINT32_MAX;
    for (uint32_t i = 0; i < CB_MOST_PROCESSORS; i++)
        if (set.words[i / 64] >> (i % 64) & 1) {
            CHECK(found == UINT32_MAX);
            found = i;
        }
    return found;
}

typedef struct places {
    uint32_t threads;
    _Atomic uint32_t arrived;
    uint32_t processor[64]; /* by worker */
} places;

static void place_task(void *context, uint32_t task, uint32_t worker) {
    places *p = context;
    (void)task;
    p->processor[worker] = only_processor();
    atomic_fetch_add(&p->arrived, 1);
    while (atomic_load(&p->arrived) < p->threads) /* every thread gets a task */
        sched_yield();
}

static void test_pin(void) {
    char message[COLIBRI_MESSAGE_SIZE], expected[200];
    cb_processor_set before, after;
    CHECK(cb_thread_place(&before));
    uint32_t usable = 0;
    for (uint32_t i = 0; i < CB_MOST_PROCESSORS; i++)
        usable += before.words[i / 64] >> (i % 64) & 1;
    colibri_runtime *runtime;
    colibri_runtime_options options = {.threads = usable + 1, .pin = 1};
    CHECK(colibri_init(&options, &runtime, message, sizeof message) == COLIBRI_INVALID && runtime == NULL);
    snprintf(expected, sizeof expected, "threads is %u and this process may use %u processors", usable + 1, usable);
    CHECK(strncmp(message, expected, strlen(expected)) == 0);

    options.threads = usable < 64 ? usable : 64;
    CHECK(colibri_init(&options, &runtime, message, sizeof message) == COLIBRI_OK);
    places p = {.threads = options.threads};
    cb_pool_begin(runtime->pool);
    cb_pool_run(runtime->pool, options.threads, place_task, &p);
    if (options.threads == 1)
        p.processor[0] = only_processor();
    cb_pool_end(runtime->pool);
    for (uint32_t i = 0; i < options.threads; i++) {
        CHECK(before.words[p.processor[i] / 64] >> (p.processor[i] % 64) & 1);
        for (uint32_t j = 0; j < i; j++)
            CHECK(p.processor[i] != p.processor[j]);
    }
    CHECK(cb_thread_place(&after) && memcmp(&before, &after, sizeof before) == 0); /* the caller is free again */
    CHECK(colibri_free(runtime) == COLIBRI_OK);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    path = argv[1];
    test_latency();
    test_dispatch();
    test_phases();
    test_order();
    test_pin();
    puts("statistics: all tests passed");
    return 0;
}
