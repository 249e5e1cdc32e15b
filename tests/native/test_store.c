/* The expert store on files of its own: whatever the capacity, the threads and the order of calls, a record handed out
 * has the bytes of the file, and what cannot be read is told to whoever asks for it.
 *
 *   test_store FOLDER [faults]     faults: run under fault_preload, see tests/native/CMakeLists.txt */
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "draw.h"
#include "experts/policy.h"
#include "experts/slots.h"
#include "experts/store.h"
#include "file/sha256.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static const char *folder;

/* ---- models ---- */

/* Sizes of the records of a set: `size`, and `step` more for each further expert. */
typedef struct set_shape {
    uint32_t count;
    uint64_t size, step;
} set_shape;

/* The file's bytes are kept beside, for comparison. */
typedef struct test_model {
    cb_model model;
    uint8_t *bytes;
    uint64_t start; /* offset in the file of bytes[0] */
} test_model;

static test_model *make_model(const char *name, const set_shape *shapes, uint32_t set_count, uint64_t alignment,
                              uint64_t start) {
    test_model *made = calloc(1, sizeof *made);
    char path[1000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    cb_model *model = &made->model;
    model->path = strdup(path);
    model->set_count = set_count;
    model->sets = calloc(set_count, sizeof *model->sets);
    made->start = start;
    uint64_t end = start;
    for (uint32_t s = 0; s < set_count; s++) {
        cb_expert_set *set = &model->sets[s];
        set->count = shapes[s].count;
        set->layer = s + 1;
        set->experts = calloc(set->count, sizeof *set->experts);
        for (uint32_t i = 0; i < set->count; i++) {
            end = cb_round_up(end, alignment);
            set->experts[i].offset = end;
            set->experts[i].size = shapes[s].size + i * shapes[s].step;
            end += set->experts[i].size;
        }
    }
    made->bytes = malloc(end - start);
    for (uint64_t i = 0; i < end - start; i++)
        made->bytes[i] = (uint8_t)draw(256);
    for (uint32_t s = 0; s < set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            cb_expert *expert = &model->sets[s].experts[i];
            cb_sha256 hash;
            expert->crc32c = cb_crc32c(0, made->bytes + (expert->offset - start), expert->size);
            cb_sha256_start(&hash);
            cb_sha256_add(&hash, made->bytes + (expert->offset - start), expert->size);
            cb_sha256_finish(&hash, expert->sha256);
        }
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0 && pwrite(fd, made->bytes, end - start, (off_t)start) == (ssize_t)(end - start));
    CHECK(fsync(fd) == 0 && close(fd) == 0);
    model->file_size = end;
    model->fd = open(path, O_RDONLY);
    CHECK(model->fd >= 0);
    return made;
}

static void free_model(test_model *made) {
    for (uint32_t s = 0; s < made->model.set_count; s++)
        free(made->model.sets[s].experts);
    close(made->model.fd);
    unlink(made->model.path);
    free(made->model.sets);
    free(made->model.path);
    free(made->bytes);
    free(made);
}

static const uint8_t *true_bytes(const test_model *made, uint32_t set, uint32_t expert) {
    return made->bytes + (made->model.sets[set].experts[expert].offset - made->start);
}

static void change_byte(const test_model *made, uint64_t offset, uint8_t byte) {
    int fd = open(made->model.path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, &byte, 1, (off_t)offset) == 1 && fsync(fd) == 0 && close(fd) == 0);
}

static cb_expert_store *open_store(const test_model *made, cb_store_options options) {
    cb_error error = {0};
    cb_expert_store *store;
    colibri_status status = cb_expert_store_open(&made->model, &options, &store, &error);
    if (status != COLIBRI_OK)
        fprintf(stderr, "%s\n", error.message);
    CHECK(status == COLIBRI_OK);
    return store;
}

static bool bytes_are_right(const test_model *made, uint32_t set, uint32_t expert, const uint8_t *record) {
    return record != NULL && (uintptr_t)record % 64 == 0 &&
           memcmp(record, true_bytes(made, set, expert), made->model.sets[set].experts[expert].size) == 0;
}

/* Runs a whole call, `most` at a time; returns how many could not be read, and their bits in *failed. */
static uint32_t run_call(cb_expert_store *store, const test_model *made, uint32_t set, const uint32_t *experts,
                         uint32_t count, uint32_t most, uint64_t *failed, char *message) {
    cb_store_ready ready[64];
    uint32_t got, total = 0, errors = 0;
    bool seen[64] = {false};
    *failed = 0;
    cb_store_begin(store, set, experts, count);
    while ((got = cb_store_next(store, ready, most)) > 0) {
        CHECK(got <= most);
        for (uint32_t i = 0; i < got; i++) {
            CHECK(ready[i].index < count && !seen[ready[i].index]);
            seen[ready[i].index] = true;
            if (ready[i].error != NULL) {
                CHECK(ready[i].record == NULL && ready[i].error->status != COLIBRI_OK);
                *failed |= UINT64_C(1) << experts[ready[i].index];
                errors++;
                if (message != NULL)
                    snprintf(message, COLIBRI_MESSAGE_SIZE, "%s", ready[i].error->message);
            } else {
                CHECK(bytes_are_right(made, set, experts[ready[i].index], ready[i].record));
            }
        }
        total += got;
        for (uint32_t i = got; i-- > 0;)
            cb_store_release(store, ready[i].index);
    }
    CHECK(total == count);
    cb_store_end(store);
    return errors;
}

static uint32_t pick_experts(uint32_t of, uint32_t *experts) {
    uint32_t count = 0, part = 1 + draw(4);
    for (uint32_t i = 0; i < of; i++)
        if (draw(part) == 0)
            experts[count++] = i;
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = draw(i), swap = experts[j];
        experts[j] = experts[i - 1];
        experts[i - 1] = swap;
    }
    return count;
}

static cb_store_stats sum_stats(const cb_expert_store *store, const test_model *made) {
    cb_store_stats sum = {0};
    for (uint32_t s = 0; s < made->model.set_count; s++) {
        cb_store_stats stats;
        cb_store_get_stats(store, s, &stats);
        sum.hits += stats.hits;
        sum.misses += stats.misses;
        sum.bytes_read += stats.bytes_read;
        sum.stall_nanoseconds += stats.stall_nanoseconds;
        sum.prefetched += stats.prefetched;
        sum.prefetched_used += stats.prefetched_used;
        sum.evictions += stats.evictions;
        sum.load_nanoseconds += stats.load_nanoseconds;
    }
    return sum;
}

/* ---- calls ---- */

static const set_shape mixed_shapes[] = {{9, 3000, 0}, {6, 20000, 64}, {9, 3000, 1024}, {1, 70000, 0}, {8, 9000, 0}};
enum { MIXED = 5 };

static void random_calls(cb_expert_store *store, const test_model *made, uint32_t rounds) {
    uint64_t asked = 0;
    cb_store_stats before = sum_stats(store, made);
    for (uint32_t round = 0; round < rounds; round++) {
        uint32_t set = draw(made->model.set_count), of = made->model.sets[set].count, experts[64], other[64];
        uint32_t count = pick_experts(of, experts);
        uint64_t failed;
        if (draw(3) == 0) {
            uint32_t target = draw(made->model.set_count);
            uint32_t others = pick_experts(made->model.sets[target].count, other);
            (draw(4) == 0 ? cb_store_warm : cb_store_prefetch)(store, target, other, others);
        }
        asked += count;
        if (draw(8) == 0) {
            /* A call that ends early, with records held, handed out and on their way. */
            cb_store_ready ready[4];
            cb_store_begin(store, set, experts, count);
            uint32_t got = draw(2) == 0 ? 0 : cb_store_next(store, ready, 1 + draw(4));
            for (uint32_t i = 0; i < got; i++)
                CHECK(bytes_are_right(made, set, experts[ready[i].index], ready[i].record));
            if (got > 0 && draw(2) == 0)
                cb_store_release(store, ready[0].index);
            cb_store_end(store);
        } else {
            CHECK(run_call(store, made, set, experts, count, 1 + draw(12), &failed, NULL) == 0);
        }
    }
    cb_store_stats after = sum_stats(store, made);
    CHECK(after.hits + after.misses - before.hits - before.misses == asked);
    CHECK(after.prefetched_used <= after.prefetched);
}

static void test_every_capacity(void) {
    for (uint64_t alignment = 64; alignment <= 4096; alignment *= 64) {
        test_model *made = make_model("mixed.bin", mixed_shapes, MIXED, alignment, 128);
        cb_store_options options = {.io_threads = 2};
        cb_store_plan plan;
        cb_expert_store_plan(&made->model, &options, &plan);
        CHECK(plan.least_bytes < plan.all_bytes && plan.class_count >= 4 && plan.class_count <= 8);
        uint64_t step = SANITIZED ? 16 * 4096 : 4096;
        for (uint64_t bytes = plan.least_bytes; bytes <= plan.all_bytes; bytes += step) {
            options.slot_bytes = bytes;
            options.io = (uint32_t)(bytes / 4096 % 3);
            options.verify = (uint32_t)(bytes / 4096 / 3 % 3);
            options.guard = draw(4) == 0;
            cb_expert_store *store = open_store(made, options);
            CHECK(cb_expert_store_bytes(store) <= bytes);
            CHECK(cb_expert_store_is_resident(store) == (bytes == plan.all_bytes));
            if (alignment < 4096)
                CHECK(!cb_expert_store_is_direct(store));
            random_calls(store, made, 60);
            cb_expert_store_close(store);
        }
        options.slot_bytes = plan.least_bytes - 1;
        cb_error error = {0};
        cb_expert_store *store;
        CHECK(cb_expert_store_open(&made->model, &options, &store, &error) == COLIBRI_INVALID && store == NULL);
        char figure[40];
        snprintf(figure, sizeof figure, "%" PRIu64, plan.least_bytes);
        CHECK(strstr(error.message, figure) != NULL);
        free_model(made);
    }
}

static void test_threads(void) {
    const uint32_t counts[] = {1, 2, 8, 16};
    test_model *made = make_model("mixed.bin", mixed_shapes, MIXED, 4096, 4096);
    cb_store_plan plan;
    cb_store_options options = {0};
    cb_expert_store_plan(&made->model, &options, &plan);
    for (int i = 0; i < 4; i++) {
        for (int part = 0; part < 3; part++) {
            options = (cb_store_options){.io_threads = counts[i],
                                         .slot_bytes = part == 0   ? plan.least_bytes
                                                       : part == 1 ? plan.all_bytes / 2
                                                                   : UINT64_MAX};
            cb_expert_store *store = open_store(made, options);
            random_calls(store, made, 400);
            cb_expert_store_close(store);
        }
    }
    free_model(made);
}

/* Statistics and reads ahead come from other threads while calls run. */
typedef struct meddler {
    cb_expert_store *store;
    const test_model *made;
    atomic_bool stop;
} meddler;

static void *meddle(void *argument) {
    meddler *m = argument;
    for (uint32_t i = 0; !atomic_load(&m->stop); i++) {
        uint32_t set = i % m->made->model.set_count, experts[64], count = m->made->model.sets[set].count;
        uint64_t loads[64];
        cb_store_place place;
        for (uint32_t e = 0; e < count; e++)
            experts[e] = (e + i) % count;
        (i % 5 == 0 ? cb_store_warm : cb_store_prefetch)(m->store, set, experts, count / 2);
        cb_store_get_expert_loads(m->store, set, loads, NULL);
        sum_stats(m->store, m->made);
        cb_store_slot_at(m->store, loads, &place);
        usleep(200);
    }
    return NULL;
}

static void test_other_threads(void) {
    test_model *made = make_model("mixed.bin", mixed_shapes, MIXED, 4096, 0);
    cb_store_plan plan;
    cb_store_options options = {.io_threads = 3};
    cb_expert_store_plan(&made->model, &options, &plan);
    options.slot_bytes = plan.all_bytes / 2;
    meddler m = {.store = open_store(made, options), .made = made};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, meddle, &m) == 0);
    random_calls(m.store, made, 1500);
    atomic_store(&m.stop, true);
    pthread_join(thread, NULL);
    CHECK(sum_stats(m.store, made).prefetched > 0);
    cb_expert_store_close(m.store);
    free_model(made);
}

static void test_no_experts(void) {
    test_model *made = make_model("mixed.bin", mixed_shapes, 1, 4096, 0);
    uint32_t sets = made->model.set_count;
    made->model.set_count = 0;
    cb_store_plan plan;
    cb_store_options options = {.slot_bytes = 0};
    cb_expert_store_plan(&made->model, &options, &plan);
    CHECK(plan.all_bytes == 0 && plan.least_bytes == 0);
    cb_expert_store *store = open_store(made, options);
    CHECK(cb_expert_store_is_resident(store) && cb_expert_store_bytes(store) == 0);
    cb_expert_store_close(store);
    made->model.set_count = sets;
    free_model(made);
}

/* ---- reads ahead ---- */

static void wait_for_reads(const cb_expert_store *store, const test_model *made, uint64_t bytes) {
    for (int i = 0; i < 5000 && sum_stats(store, made).bytes_read < bytes; i++)
        usleep(1000);
    CHECK(sum_stats(store, made).bytes_read >= bytes);
}

static void test_read_ahead(void) {
    const set_shape shapes[] = {{4, 5000, 0}, {4, 5000, 0}};
    test_model *made = make_model("ahead.bin", shapes, 2, 4096, 0);
    cb_store_options options = {.slot_bytes = 4 * 8192};
    cb_expert_store *store = open_store(made, options);
    const uint32_t low[] = {0, 1}, high[] = {2, 3}, all[] = {0, 1, 2, 3};
    uint64_t failed;

    cb_store_warm(store, 0, low, 2);
    wait_for_reads(store, made, 2 * 5000);
    cb_store_prefetch(store, 1, high, 2);
    cb_store_prefetch(store, 1, high, 2);
    wait_for_reads(store, made, 4 * 5000);
    /* Nothing is free: warming evicts nothing. */
    cb_store_warm(store, 1, all, 4);
    usleep(20000);
    cb_store_stats stats = sum_stats(store, made);
    CHECK(stats.bytes_read == 4 * 5000 && stats.evictions == 0 && stats.prefetched == 2 && stats.prefetched_used == 0);
    CHECK(run_call(store, made, 0, low, 2, 4, &failed, NULL) == 0);
    CHECK(run_call(store, made, 1, high, 2, 4, &failed, NULL) == 0);
    stats = sum_stats(store, made);
    CHECK(stats.hits == 4 && stats.misses == 0 && stats.prefetched_used == 2 && stats.bytes_read == 4 * 5000);

    /* Read ahead and evicted before it was asked for, by a call that holds all slots: not used. The second time reads
     * ahead are asked for meanwhile: they do not evict what is held. */
    for (int meanwhile = 0; meanwhile < 2; meanwhile++) {
        cb_store_ready ready[4];
        if (!meanwhile) {
            cb_store_prefetch(store, 1, low, 1);
            wait_for_reads(store, made, 5 * 5000);
        }
        cb_store_begin(store, 0, all, 4);
        for (uint32_t held = 0; held < 4; held += cb_store_next(store, ready + held, 1))
            if (meanwhile)
                cb_store_prefetch(store, 1, low, 2);
        usleep(20000);
        for (uint32_t i = 0; i < 4; i++)
            CHECK(bytes_are_right(made, 0, all[ready[i].index], ready[i].record));
        cb_store_end(store);
        CHECK(run_call(store, made, 1, low, 1, 4, &failed, NULL) == 0);
        stats = sum_stats(store, made);
        CHECK(meanwhile || (stats.prefetched == 3 && stats.prefetched_used == 2 && stats.evictions >= 3));
    }
    cb_expert_store_close(store);
    free_model(made);
}

/* ---- who is evicted ---- */

enum { LAYERS = 8, EXPERTS = 16, CHOSEN = 4 };

/* Part of the experts asked for that were in memory, in `passes` walks over the layers; all: each asks for every
 * expert, else for CHOSEN, the first four of which are asked for most. */
static double walk(cb_expert_store *store, const test_model *made, uint32_t passes, bool all) {
    cb_store_stats before = sum_stats(store, made);
    for (uint32_t pass = 0; pass < passes; pass++)
        for (uint32_t set = 0; set < LAYERS; set++) {
            uint32_t experts[EXPERTS], count = 0;
            uint64_t failed;
            bool taken[EXPERTS] = {false};
            for (uint32_t i = 0; all && i < EXPERTS; i++)
                experts[count++] = i;
            while (count < CHOSEN) {
                uint32_t expert = draw(10) < 8 ? draw(4) : draw(EXPERTS);
                if (!taken[expert])
                    experts[count++] = expert;
                taken[expert] = true;
            }
            CHECK(run_call(store, made, set, experts, count, 3, &failed, NULL) == 0);
        }
    cb_store_stats after = sum_stats(store, made);
    return (double)(after.hits - before.hits) / (double)(after.hits + after.misses - before.hits - before.misses);
}

static void test_policies(void) {
    set_shape shapes[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        shapes[i] = (set_shape){EXPERTS, 4096, 0};
    test_model *made = make_model("policy.bin", shapes, LAYERS, 4096, 0);
    cb_store_options options = {.slot_bytes = LAYERS * EXPERTS / 2 * 4096, .policy = &cb_policy_least_recent};
    cb_expert_store *store = open_store(made, options);
    walk(store, made, 2, true);
    /* What is asked for in turn leaves just before it is asked for again; only a layer's last ones are left over. */
    CHECK(walk(store, made, 10, true) < 0.01);
    cb_expert_store_close(store);

    options.policy = NULL;
    store = open_store(made, options);
    walk(store, made, 2, true);
    double prompts = walk(store, made, 10, true);
    cb_expert_store_close(store);

    store = open_store(made, options);
    walk(store, made, 20, false);
    double usual = walk(store, made, 20, false);
    walk(store, made, 1, true);
    double after = walk(store, made, 2, false);
    cb_expert_store_close(store);
    printf("half of the experts in memory: prompts find %.3f of them, single tokens %.3f, and %.3f after a prompt\n",
           prompts, usual, after);
    CHECK(prompts > 0.42 && usual > 0.8 && after > usual - 0.05);
    free_model(made);
}

/* ---- errors ---- */

static void test_damage(void) {
    const set_shape shapes[] = {{8, 3000000, 0}, {8, 5000, 0}};
    test_model *made = make_model("damaged.bin", shapes, 2, 4096, 4096);
    const cb_expert *bad = &made->model.sets[0].experts[5];
    uint64_t at = bad->offset + 2500000, failed;
    const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    char message[COLIBRI_MESSAGE_SIZE];
    cb_store_plan plan;
    cb_store_options options = {0};
    cb_expert_store_plan(&made->model, &options, &plan);
    change_byte(made, at, (uint8_t)(true_bytes(made, 0, 5)[2500000] ^ 4));

    cb_error error = {0};
    cb_expert_store *store;
    options.slot_bytes = UINT64_MAX;
    CHECK(cb_expert_store_open(&made->model, &options, &store, &error) == COLIBRI_BAD_FILE);
    CHECK(strstr(error.message, "damaged.bin: expert 5 of layer 1 is damaged") != NULL);
    options.verify = COLIBRI_VERIFY_OFF;
    store = open_store(made, options);
    cb_expert_store_close(store);

    options.verify = COLIBRI_VERIFY_CRC;
    options.slot_bytes = plan.all_bytes / 2;
    store = open_store(made, options);
    for (int i = 0; i < 3; i++) {
        CHECK(run_call(store, made, 0, all, 8, 3, &failed, message) == 1 && failed == 1u << 5);
        CHECK(strstr(message, "damaged.bin: expert 5 of layer 1 is damaged") != NULL);
        CHECK(run_call(store, made, 1, all, 8, 3, &failed, NULL) == 0);
    }
    cb_store_prefetch(store, 0, all + 5, 1);
    change_byte(made, at, true_bytes(made, 0, 5)[2500000]);
    CHECK(run_call(store, made, 1, all, 8, 3, &failed, NULL) == 0);
    uint64_t loads[8], nanoseconds[8];
    run_call(store, made, 0, all, 8, 3, &failed, NULL);
    CHECK(run_call(store, made, 0, all, 8, 3, &failed, NULL) == 0);
    cb_store_get_expert_loads(store, 0, loads, nanoseconds);
    CHECK(loads[5] >= 4 && nanoseconds[5] > 0 && loads[0] >= 1);
    cb_expert_store_close(store);

    /* SHA-256 is compared too, on the first read. */
    options.verify = COLIBRI_VERIFY_FULL;
    made->model.sets[0].experts[2].sha256[7] ^= 1;
    store = open_store(made, options);
    CHECK(run_call(store, made, 0, all, 8, 3, &failed, message) == 1 && failed == 1u << 2);
    CHECK(strstr(message, "SHA-256") != NULL);
    cb_expert_store_close(store);
    free_model(made);
}

static void test_file_changes(void) {
    const set_shape shapes[] = {{8, 30000, 0}};
    const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (uint32_t io = COLIBRI_IO_DIRECT; io <= COLIBRI_IO_BUFFERED; io++) {
        test_model *made = make_model("changed.bin", shapes, 1, 4096, 4096);
        cb_store_options options = {.slot_bytes = 2 * 32768, .io = io};
        char message[COLIBRI_MESSAGE_SIZE], offset[40];
        uint64_t failed;
        cb_expert_store *store = open_store(made, options);
        CHECK(unlink(made->model.path) == 0);
        CHECK(run_call(store, made, 0, all, 8, 1, &failed, NULL) == 0);
        cb_expert_store_close(store);
        store = open_store(made, options); /* the name is gone, the file is not */
        CHECK(run_call(store, made, 0, all, 8, 1, &failed, NULL) == 0);
        cb_expert_store_close(store);
        free_model(made);

        made = make_model("changed.bin", shapes, 1, 4096, 4096);
        store = open_store(made, options);
        CHECK(truncate(made->model.path, (off_t)made->model.sets[0].experts[5].offset + 10000) == 0);
        CHECK(run_call(store, made, 0, all, 8, 1, &failed, message) == 3 && failed == (7u << 5));
        snprintf(offset, sizeof offset, "offset %" PRIu64 " gave only", made->model.sets[0].experts[5].offset);
        CHECK(run_call(store, made, 0, all + 5, 1, 1, &failed, message) == 1);
        CHECK(strstr(message, offset) != NULL && strstr(message, "gave only 10000: the file ends there") != NULL);
        CHECK(strstr(message, "changed.bin: expert 5 of layer 1: reading 30000 bytes") != NULL);
        cb_expert_store_close(store);
        free_model(made);
    }
}

static void test_large_file(void) {
    const set_shape shapes[] = {{4, 100000, 0}};
    test_model *made = make_model("large.bin", shapes, 1, 4096, (UINT64_C(5) << 30) + 4096);
    const uint32_t all[] = {0, 1, 2, 3};
    uint64_t failed;
    for (uint32_t io = COLIBRI_IO_DIRECT; io <= COLIBRI_IO_BUFFERED; io++) {
        cb_store_options options = {.slot_bytes = 106496, .io = io};
        cb_expert_store *store = open_store(made, options);
        CHECK(run_call(store, made, 0, all, 4, 1, &failed, NULL) == 0);
        cb_expert_store_close(store);
    }
    free_model(made);
}

/* ---- memory ---- */

static void test_guard(void) {
    const set_shape shapes[] = {{4, 5000, 0}};
    test_model *made = make_model("guarded.bin", shapes, 1, 4096, 0);
    for (int resident = 0; resident < 2; resident++) {
        cb_store_options options = {.slot_bytes = resident ? UINT64_MAX : 2 * 8192, .guard = true};
        cb_expert_store *store = open_store(made, options);
        const uint32_t third = 3;
        cb_store_ready ready;
        cb_store_place place;
        cb_store_begin(store, 0, &third, 1);
        CHECK(cb_store_next(store, &ready, 1) == 1 && bytes_are_right(made, 0, 3, ready.record));
        CHECK(cb_store_slot_at(store, ready.record + 4999, &place) && place.set == 0 && place.expert == 3);
        CHECK(strcmp(place.state, "pinned") == 0);
        CHECK(!cb_store_slot_at(store, made, &place));
        cb_store_release(store, ready.index);
        CHECK(cb_store_slot_at(store, ready.record, &place) && strcmp(place.state, "kept") == 0);
        cb_store_end(store);
        fflush(NULL);
        int ends[2];
        CHECK(pipe(ends) == 0);
        pid_t child = fork();
        if (child == 0) {
            struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            dup2(ends[1], 2);
            CHECK(cb_guard_add(store));
            _exit(*(const volatile uint8_t *)ready.record & 0);
        }
        close(ends[1]);
        char told[4096] = "";
        for (ssize_t got, length = 0; (got = read(ends[0], told + length, sizeof told - 1 - (size_t)length)) > 0;)
            length += got;
        close(ends[0]);
        CHECK(strstr(told, "a slot that no call holds (kept, expert 3 of layer 1)") != NULL);
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : SANITIZED && WEXITSTATUS(status) != 0);
        cb_expert_store_close(store);
    }
    free_model(made);
}

static void test_pages_and_lock(void) {
    const set_shape shapes[] = {{40, 130000, 0}};
    test_model *made = make_model("pages.bin", shapes, 1, 4096, 0);
    for (uint32_t pages = COLIBRI_PAGES_AUTO; pages <= COLIBRI_PAGES_OFF; pages++) {
        cb_store_options options = {.huge_pages = pages, .slot_bytes = UINT64_MAX};
        cb_store_plan plan;
        cb_expert_store_plan(&made->model, &options, &plan);
        CHECK(plan.all_bytes % cb_page_bytes(pages) == 0 && plan.least_bytes % cb_page_bytes(pages) == 0);
        for (int part = 0; part < 2; part++) {
            options.slot_bytes = part == 0 ? plan.least_bytes : plan.all_bytes;
            cb_expert_store *store = open_store(made, options);
            CHECK(cb_expert_store_bytes(store) <= options.slot_bytes);
            random_calls(store, made, 20);
            cb_expert_store_close(store);
        }
    }
#if !SANITIZED
    /* A limit that root does not obey: the rest is a child without privileges. */
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {65536, 65536};
        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
        CHECK(geteuid() != 0 || setuid(65534) == 0);
        cb_store_options options = {.slot_bytes = 4 * 131072, .lock_memory = true, .io = COLIBRI_IO_BUFFERED};
        cb_expert_store *store = open_store(made, options);
        const char *warning = cb_store_warning(store);
        CHECK(warning != NULL && strstr(warning, "65536") != NULL && strstr(warning, "524288 bytes") != NULL);
        cb_expert_store_close(store);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
    cb_store_options options = {.slot_bytes = 4 * 131072, .lock_memory = true};
    struct rlimit limit;
    cb_expert_store *store = open_store(made, options);
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur > 4 * 131072)
        CHECK(cb_store_warning(store) == NULL || strstr(cb_store_warning(store), "locked") == NULL);
    cb_expert_store_close(store);
    free_model(made);
}

static void test_options(void) {
    test_model *made = make_model("mixed.bin", mixed_shapes, MIXED, 4096, 0);
    const cb_store_options wrong[] = {
        {.io_threads = 17}, {.io = 3}, {.verify = 3}, {.huge_pages = 4}, {.slot_bytes = 1}};
    const char *const words[] = {"io_threads is 17", "io is 3", "verify 3", "huge_pages 4", "1 bytes for experts"};
    for (int i = 0; i < 5; i++) {
        cb_store_options options = wrong[i];
        cb_error error = {0};
        cb_expert_store *store;
        if (options.slot_bytes == 0)
            options.slot_bytes = UINT64_MAX;
        CHECK(cb_expert_store_open(&made->model, &options, &store, &error) == COLIBRI_INVALID);
        CHECK(store == NULL && strstr(error.message, words[i]) != NULL);
    }
    free_model(made);
}

/* ---- under fault_preload ---- */

static bool fault_is(const char *word) { return strstr(getenv("COLIBRI_FAULT"), word) != NULL; }

static void test_faults(void) {
    bool is_short = fault_is("short"); /* then every byte takes long */
    uint64_t size = is_short ? 23000 : 2030000;
    const set_shape shapes[] = {{8, size, 0}, {8, 5000, 0}};
    const uint32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    test_model *made = make_model("faulty.bin", shapes, 2, 4096, 4096);
    for (uint32_t io = COLIBRI_IO_AUTO; io <= COLIBRI_IO_BUFFERED; io++) {
        char message[COLIBRI_MESSAGE_SIZE];
        uint64_t failed;
        cb_store_plan plan;
        cb_store_options options = {.io = io, .io_threads = 3};
        cb_expert_store_plan(&made->model, &options, &plan);
        options.slot_bytes = plan.all_bytes / 2;
        cb_expert_store *store = open_store(made, options);
        bool refused = fault_is("open-direct") || fault_is("read-direct");
        if (refused) {
            CHECK(!cb_expert_store_is_direct(store));
            const char *warning = cb_store_warning(store);
            CHECK((io == COLIBRI_IO_BUFFERED) == (warning == NULL));
            CHECK(warning == NULL || strstr(warning, "Invalid argument") != NULL);
        }
        uint64_t broken = 0;
        if (fault_is("eio") || fault_is("flip"))
            broken = 1u << 4;
        if (fault_is("cut"))
            broken = 0xf0u;
        for (int i = 0; i < 2; i++) {
            run_call(store, made, 0, all, 8, 3, &failed, message);
            CHECK(failed == broken);
            if (broken != 0)
                CHECK(strstr(message, "faulty.bin: expert ") != NULL && strstr(message, " of layer 1") != NULL);
            if (fault_is("eio")) {
                char offset[60];
                snprintf(offset, sizeof offset, "2030000 bytes at offset %" PRIu64 " gave only 1048576",
                         made->model.sets[0].experts[4].offset);
                CHECK(strstr(message, "Input/output error") != NULL && strstr(message, offset) != NULL);
            }
            if (fault_is("flip"))
                CHECK(strstr(message, "expert 4 of layer 1 is damaged") != NULL);
            if (fault_is("cut"))
                CHECK(strstr(message, "the file ends there") != NULL);
            else
                CHECK(run_call(store, made, 1, all, 8, 3, &failed, NULL) == 0);
        }
        if (broken == 0)
            random_calls(store, made, is_short ? 10 : 40);
        cb_expert_store_close(store);
    }
    free_model(made);
}

int main(int argc, char **argv) {
    CHECK(argc == 2 || argc == 3);
    folder = argv[1];
    CHECK(mkdir(folder, 0755) == 0 || access(folder, W_OK) == 0);
    if (argc == 3) {
        CHECK(getenv("COLIBRI_FAULT") != NULL);
        test_faults();
        rmdir(folder);
        return 0;
    }
    test_options();
    test_no_experts();
    test_every_capacity();
    test_threads();
    test_other_threads();
    test_read_ahead();
    test_policies();
    test_damage();
    test_file_changes();
    test_large_file();
    test_guard();
    test_pages_and_lock();
    rmdir(folder);
    return 0;
}
