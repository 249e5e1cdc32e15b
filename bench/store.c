/* How fast the store reads records, beside threads that only read the same records past the page cache, in turn.
 *
 *   store MODEL.cbi [io threads] [rounds] [slots of each size] [colibri_verify] [colibri_pages]
 *
 * The consumer releases every record at once. What is compared is the best and the median round of each. */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "experts/policy.h"
#include "experts/slots.h"
#include "experts/store.h"

enum { MOST_THREADS = 16, MOST_ROUNDS = 200 };

static const cb_model *model;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- threads that only read ---- */

typedef struct plain {
    int fd;
    uint64_t largest;
    atomic_uint next;
    _Atomic uint64_t bytes;
    uint32_t set;
} plain;

static void *read_plainly(void *argument) {
    plain *p = argument;
    void *memory = NULL;
    CHECK(posix_memalign(&memory, 4096, p->largest) == 0);
    for (;;) {
        uint32_t i = atomic_fetch_add(&p->next, 1), set = p->set;
        while (set < model->set_count && i >= model->sets[set].count)
            i -= model->sets[set++].count;
        if (set == model->set_count)
            break;
        const cb_expert *expert = &model->sets[set].experts[i];
        CHECK(pread(p->fd, memory, cb_round_up(expert->size, 4096), (off_t)expert->offset) >= (ssize_t)expert->size);
        atomic_fetch_add(&p->bytes, expert->size);
    }
    free(memory);
    return NULL;
}

static double plain_rate(uint32_t threads, uint64_t largest) {
    plain p = {.fd = open(model->path, O_RDONLY | O_DIRECT), .largest = cb_round_up(largest, 4096)};
    pthread_t ids[MOST_THREADS];
    CHECK(p.fd >= 0);
    double start = now();
    for (uint32_t i = 0; i < threads; i++)
        CHECK(pthread_create(&ids[i], NULL, read_plainly, &p) == 0);
    for (uint32_t i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    double seconds = now() - start;
    close(p.fd);
    return (double)p.bytes / seconds;
}

/* ---- the store ---- */

static uint64_t bytes_read(const cb_expert_store *store) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        cb_store_stats stats;
        cb_store_get_stats(store, s, &stats);
        bytes += stats.bytes_read;
    }
    return bytes;
}

static double store_rate(cb_expert_store *store, uint32_t *experts) {
    uint64_t before = bytes_read(store);
    double start = now();
    for (uint32_t s = 0; s < model->set_count; s++) {
        cb_store_ready ready[16];
        uint32_t got;
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            experts[i] = i;
        cb_store_begin(store, s, experts, model->sets[s].count);
        while ((got = cb_store_next(store, ready, 16)) > 0)
            for (uint32_t i = 0; i < got; i++) {
                CHECK(ready[i].error == NULL);
                cb_store_release(store, ready[i].index);
            }
        cb_store_end(store);
    }
    return (double)(bytes_read(store) - before) / (now() - start);
}

/* ---- a call when everything is in memory ---- */

static double resident_nanoseconds(uint32_t asked) {
    cb_error error = {0};
    cb_store_options options = {.slot_bytes = UINT64_MAX};
    cb_expert_store *store;
    CHECK(cb_expert_store_open(model, &options, &store, &error) == COLIBRI_OK);
    uint32_t experts[16];
    cb_store_ready ready[16];
    uintptr_t sum = 0;
    enum { CALLS = 1000000 };
    for (uint32_t i = 0; i < asked; i++)
        experts[i] = i;
    double start = now();
    for (uint32_t call = 0; call < CALLS; call++) {
        uint32_t got;
        cb_store_begin(store, call % model->set_count, experts, asked);
        while ((got = cb_store_next(store, ready, 16)) > 0)
            for (uint32_t i = 0; i < got; i++) {
                sum += (uintptr_t)ready[i].record;
                cb_store_release(store, ready[i].index);
            }
        cb_store_end(store);
    }
    double seconds = now() - start;
    CHECK(sum != 0);
    cb_expert_store_close(store);
    return seconds / CALLS * 1e9;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double processor_seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void report(const char *name, double *rates, uint32_t rounds, double cpu) {
    qsort(rates, rounds, sizeof *rates, by_value);
    printf("%-8s best %7.1f MB/s  median %7.1f MB/s  %.1f ms of processor time a round\n", name,
           rates[rounds - 1] / 1e6, rates[rounds / 2] / 1e6, cpu / rounds * 1e3);
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    uint32_t threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 2, rounds = argc > 3 ? (uint32_t)atoi(argv[3]) : 9;
    uint32_t slots_each = argc > 4 ? (uint32_t)atoi(argv[4]) : 32;
    uint32_t verify = argc > 5 ? (uint32_t)atoi(argv[5]) : COLIBRI_VERIFY_CRC;
    CHECK(threads >= 1 && threads <= MOST_THREADS && rounds >= 1 && rounds <= MOST_ROUNDS);
    cb_error error = {0};
    cb_model *opened;
    CHECK(cb_model_open(argv[1], &opened, &error) == COLIBRI_OK);
    model = opened;
    uint64_t largest = 0;
    uint32_t most = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        most = model->sets[s].count > most ? model->sets[s].count : most;
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            largest = model->sets[s].experts[i].size > largest ? model->sets[s].experts[i].size : largest;
    }
    cb_slots slots;
    cb_slots_choose(&slots, model, 4096);
    cb_store_options options = {.slot_bytes = cb_slots_bytes(&slots, slots_each),
                                .io_threads = threads,
                                .huge_pages = argc > 6 ? (uint32_t)atoi(argv[6]) : COLIBRI_PAGES_AUTO,
                                .verify = verify,
                                .policy = &cb_policy_least_recent};
    cb_expert_store *store;
    CHECK(cb_expert_store_open(model, &options, &store, &error) == COLIBRI_OK);
    uint32_t *experts = malloc(most * sizeof *experts);
    static double plain_rates[MOST_ROUNDS], store_rates[MOST_ROUNDS];
    double plain_cpu = 0, store_cpu = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        double before = processor_seconds();
        plain_rates[i] = plain_rate(threads, largest);
        plain_cpu += processor_seconds() - before;
        before = processor_seconds();
        store_rates[i] = store_rate(store, experts);
        store_cpu += processor_seconds() - before;
    }
    printf("%u sets, largest record %" PRIu64 " bytes, %u I/O threads, %s\n", model->set_count, largest, threads,
           cb_expert_store_is_direct(store) ? "direct" : "buffered");
    report("plain", plain_rates, rounds, plain_cpu);
    report("store", store_rates, rounds, store_cpu);
    cb_expert_store_close(store);
    printf("all in memory: a call for 8 takes %.0f ns\n", resident_nanoseconds(most < 8 ? most : 8));
    free(experts);
    cb_model_close(opened);
    return 0;
}
