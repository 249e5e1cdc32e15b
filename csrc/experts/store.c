#include "experts/store.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "experts/io_threads.h"
#include "experts/store_parts.h"
#include "file/bytes.h"

#define DEFAULT_THREADS 2

/* ---- tables ---- */

static uint32_t count_records(const cb_model *model, uint32_t *largest_set) {
    uint32_t count = 0;
    *largest_set = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        count += model->sets[s].count;
        *largest_set = model->sets[s].count > *largest_set ? model->sets[s].count : *largest_set;
    }
    return count;
}

static uint32_t count_threads(const cb_store_options *options) {
    return options->io_threads == 0 ? DEFAULT_THREADS : options->io_threads;
}

/* The place of the next table. With no base it is only counted. */
static void *take(uint8_t *base, uint64_t *used, uint64_t count, uint64_t size) {
    void *place = base != NULL ? base + *used : NULL;
    *used += cb_round_up(cb_multiply(count, size), CB_CACHE_LINE);
    return place;
}

/* Returns the bytes of all tables. Counts are below 2^32 and no element is over 1 KiB: no sum overflows. */
static uint64_t lay_tables(uint8_t *base, const cb_model *model, uint32_t slot_count, uint32_t threads, tables *t) {
    uint64_t used = 0;
    uint32_t largest, count = count_records(model, &largest);
    t->records = take(base, &used, count, sizeof *t->records);
    t->slots = take(base, &used, slot_count, sizeof *t->slots);
    t->free_slots = take(base, &used, slot_count, sizeof *t->free_slots);
    t->entries = take(base, &used, largest, sizeof *t->entries);
    t->ready = take(base, &used, largest, sizeof *t->ready);
    t->errors = take(base, &used, largest, sizeof *t->errors);
    t->prefetch = take(base, &used, count, sizeof *t->prefetch);
    t->warm = take(base, &used, count, sizeof *t->warm);
    t->scores = take(base, &used, count, sizeof *t->scores);
    t->uses = take(base, &used, model->set_count, sizeof *t->uses);
    t->sets = take(base, &used, model->set_count, sizeof *t->sets);
    t->reads = take(base, &used, count, sizeof *t->reads);
    t->threads = take(base, &used, threads, sizeof *t->threads);
    return used;
}

void cb_expert_store_plan(const cb_model *model, const cb_store_options *options, cb_store_plan *plan) {
    cb_slots slots;
    tables t;
    uint32_t largest, count = count_records(model, &largest), threads = count_threads(options);
    cb_slots_choose(&slots, model, cb_page_bytes(options->huge_pages));
    *plan = (cb_store_plan){.all_bytes = cb_slots_bytes(&slots, UINT32_MAX),
                            .least_bytes = cb_slots_bytes(&slots, 1),
                            .wasted_bytes = slots.wasted_bytes,
                            .other_bytes = sizeof(cb_expert_store) + lay_tables(NULL, model, count, threads, &t) +
                                           threads * CB_IO_STACK_BYTES,
                            .class_count = slots.class_count};
}

/* Experts of the set that one token uses. */
static uint32_t chosen_experts(const cb_model *model, uint32_t set) {
    const cb_program *program = &model->program;
    for (uint32_t i = 0; i < program->op_count; i++)
        if (program->ops[i].opcode == CB_OP_EXPERTS && program->ops[i].experts.set == set)
            return program->values[program->ops[i].experts.routing].width;
    return 1;
}

static void fill_tables(cb_expert_store *store) {
    const cb_model *model = store->model;
    const tables *t = &store->t;
    uint32_t r = 0;
    for (uint32_t s = 0; s < model->set_count; s++) {
        t->uses[s] = (cb_set_use){r, model->sets[s].count, chosen_experts(model, s), 0};
        for (uint32_t i = 0; i < model->sets[s].count; i++, r++)
            t->records[r] = (record){.slot = CB_NONE,
                                     .entry = CB_NONE,
                                     .set = s,
                                     .class = (uint8_t)cb_slots_class(&store->slots, model->sets[s].experts[i].size)};
    }
    for (uint32_t c = 0; c < store->slots.class_count; c++) {
        const cb_slot_class *class = &store->slots.classes[c];
        store->free_count[c] = class->slot_count;
        for (uint32_t i = 0; i < class->slot_count; i++) {
            t->free_slots[class->first_slot + i] = class->first_slot + class->slot_count - 1 - i;
            atomic_init(&t->slots[class->first_slot + i].record, CB_NONE);
        }
    }
    store->call.entries = t->entries;
    store->call.ready = t->ready;
    store->call.errors = t->errors;
    store->prefetch.records = t->prefetch;
    store->warm.records = t->warm;
    store->usage = (cb_usage){.set_count = model->set_count, .sets = t->uses, .scores = t->scores};
}

/* ---- opening ---- */

static colibri_status start_threads(cb_expert_store *store, cb_error *error) {
    int failure = cb_io_threads_start(store->t.threads, store->thread_count, cb_store_read, store, &store->started);
    if (failure != 0)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY,
                       "I/O thread %u of %u could not be started: %s; ask for fewer I/O threads", store->started + 1,
                       store->thread_count, strerror(failure));
    return COLIBRI_OK;
}

static void stop_threads(cb_expert_store *store) {
    pthread_mutex_lock(&store->mutex);
    store->stop = true;
    pthread_cond_broadcast(&store->work);
    pthread_mutex_unlock(&store->mutex);
    cb_io_threads_join(store->t.threads, store->started);
    store->started = 0;
}

static colibri_status read_all(cb_expert_store *store, cb_error *error) {
    cb_error failure = {0};
    store->opening = true;
    store->open_error = &failure;
    for (uint32_t r = 0; r < store->record_count; r++)
        cb_ring_push(&store->warm, store->record_count, r);
    if (start_threads(store, error) != COLIBRI_OK) {
        stop_threads(store);
        return error->status;
    }
    pthread_mutex_lock(&store->mutex);
    while (failure.status == COLIBRI_OK && (store->warm.count > 0 || store->reading_ahead > 0))
        pthread_cond_wait(&store->ready, &store->mutex);
    pthread_mutex_unlock(&store->mutex);
    stop_threads(store);
    store->opening = false;
    if (failure.status != COLIBRI_OK)
        *error = failure;
    return failure.status;
}

static colibri_status check_options(const cb_model *model, const cb_store_options *options, const cb_slots *slots,
                                    cb_error *error) {
    if (options->io_threads > CB_IO_MOST_THREADS)
        return cb_fail(error, COLIBRI_INVALID, "io_threads is %u, it must be 1 to %d", options->io_threads,
                       CB_IO_MOST_THREADS);
    if (options->io > COLIBRI_IO_BUFFERED || options->verify > COLIBRI_VERIFY_OFF ||
        options->huge_pages > COLIBRI_PAGES_OFF)
        return cb_fail(error, COLIBRI_INVALID, "io is %u, verify %u, huge_pages %u: at most 2, 2 and 3", options->io,
                       options->verify, options->huge_pages);
    if (slots->slot_count == 0 && slots->class_count > 0)
        return cb_fail(
            error, COLIBRI_INVALID,
            "%s: %" PRIu64 " bytes for experts are too few: at least %" PRIu64 " are needed, and %" PRIu64 " hold all",
            cb_label(model), options->slot_bytes, cb_slots_bytes(slots, 1), cb_slots_bytes(slots, UINT32_MAX));
    return COLIBRI_OK;
}

/* With COLIBRI_IO_AUTO and records that are read again and again. The slots, all free yet, lend their memory. */
static void choose_io(cb_expert_store *store, const cb_store_options *options) {
    if (options->io != COLIBRI_IO_AUTO || store->resident || !cb_expert_store_is_direct(store))
        return;
    const cb_slots *slots = &store->slots;
    uint64_t absent = cb_slots_bytes(slots, UINT32_MAX) - slots->used_bytes;
    cb_io_measure(&store->file, store->thread_count, slots->memory, slots->used_bytes, &store->io_rates);
    if (cb_expert_store_is_direct(store) && !cb_io_prefers_direct(&store->io_rates, absent, options->page_cache_bytes))
        cb_record_file_leave_direct(&store->file);
}

static void warn_about_guard(cb_expert_store *store, uint32_t *pages) {
    if (!store->guard)
        return;
    if (*pages == COLIBRI_PAGES_2M || *pages == COLIBRI_PAGES_1G)
        cb_warn(store->warning, sizeof store->warning, "guarded slots do not lie in huge pages");
    *pages = COLIBRI_PAGES_OFF;
}

colibri_status cb_expert_store_open(const cb_model *model, const cb_store_options *options, cb_expert_store **result,
                                    cb_error *error) {
    *result = NULL;
    cb_slots slots;
    cb_slots_choose(&slots, model, cb_page_bytes(options->huge_pages));
    cb_slots_divide(&slots, options->slot_bytes);
    if (check_options(model, options, &slots, error) != COLIBRI_OK)
        return error->status;
    cb_expert_store *store = cb_alloc(sizeof *store);
    if (store == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an expert store");
    uint32_t largest, pages = options->huge_pages;
    pthread_mutex_init(&store->mutex, NULL);
    pthread_cond_init(&store->work, NULL);
    pthread_cond_init(&store->ready, NULL);
    store->model = model;
    store->policy = options->policy != NULL ? options->policy : &cb_policy_expected_wait;
    store->slots = slots;
    store->file = (cb_record_file){.model = model, .fd = model->fd, .direct_fd = -1};
    store->record_count = count_records(model, &largest);
    store->thread_count = count_threads(options);
    store->resident = slots.slot_count == store->record_count;
    store->guard = options->guard;
    store->quick = store->resident && !store->guard;
    store->block = cb_alloc(lay_tables(NULL, model, slots.slot_count, store->thread_count, &store->t));
    if (store->block == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for the tables of %u experts", cb_label(model),
                store->record_count);
        goto fail;
    }
    lay_tables(store->block, model, slots.slot_count, store->thread_count, &store->t);
    warn_about_guard(store, &pages);
    if (cb_slots_map(&store->slots, cb_label(model), pages, options->lock_memory, store->warning, sizeof store->warning,
                     error) != COLIBRI_OK)
        goto fail;
    fill_tables(store);
    cb_record_file_open(&store->file, model, options->io, options->verify, store->resident,
                        store->slots.class_count > 0 ? store->slots.classes[store->slots.class_count - 1].memory : NULL,
                        store->warning, sizeof store->warning);
    choose_io(store, options);
    if (store->guard && store->slots.mapped_bytes > 0)
        mprotect(store->slots.memory, store->slots.mapped_bytes, PROT_NONE);
    if ((store->resident ? read_all(store, error) : start_threads(store, error)) != COLIBRI_OK)
        goto fail;
    *result = store;
    return COLIBRI_OK;

fail:
    cb_expert_store_close(store);
    return error->status;
}

void cb_expert_store_close(cb_expert_store *store) {
    if (store == NULL)
        return;
    cb_guard_remove(store);
    stop_threads(store);
    cb_record_file_close(&store->file);
    cb_slots_unmap(&store->slots);
    pthread_cond_destroy(&store->work);
    pthread_cond_destroy(&store->ready);
    pthread_mutex_destroy(&store->mutex);
    cb_free(store->block);
    cb_free(store);
}

/* ---- what others ask ---- */

static uint64_t read_counter(const counter *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

void cb_store_get_stats(const cb_expert_store *store, uint32_t set, cb_store_stats *stats) {
    const set_counters *counters = &store->t.sets[set];
    *stats = (cb_store_stats){.hits = read_counter(&counters->hits),
                              .misses = read_counter(&counters->misses),
                              .bytes_read = read_counter(&counters->bytes_read),
                              .stall_nanoseconds = read_counter(&counters->stall_nanoseconds),
                              .prefetched = read_counter(&counters->prefetched),
                              .prefetched_used = read_counter(&counters->prefetched_used),
                              .evictions = read_counter(&counters->evictions),
                              .load_nanoseconds = read_counter(&counters->load_nanoseconds)};
}

void cb_store_get_expert_loads(const cb_expert_store *store, uint32_t set, uint64_t *loads,
                               uint64_t *load_nanoseconds) {
    const read_counters *reads = &store->t.reads[store->t.uses[set].first];
    for (uint32_t i = 0; i < store->model->sets[set].count; i++) {
        if (loads != NULL)
            loads[i] = read_counter(&reads[i].loads);
        if (load_nanoseconds != NULL)
            load_nanoseconds[i] = read_counter(&reads[i].nanoseconds);
    }
}

uint64_t cb_expert_store_bytes(const cb_expert_store *store) { return store->slots.mapped_bytes; }

bool cb_expert_store_is_resident(const cb_expert_store *store) { return store->resident; }

bool cb_expert_store_is_direct(const cb_expert_store *store) {
    return atomic_load_explicit(&store->file.direct, memory_order_relaxed);
}

cb_io_rates cb_expert_store_io_rates(const cb_expert_store *store) { return store->io_rates; }

const char *cb_store_warning(const cb_expert_store *store) { return store->warning[0] != '\0' ? store->warning : NULL; }

bool cb_store_slot_at(const cb_expert_store *store, const void *address, cb_store_place *place) {
    static const char *const names[] = {
        [SLOT_FREE] = "free", [SLOT_LOADING] = "loading", [SLOT_KEPT] = "kept", [SLOT_PINNED] = "pinned"};
    uintptr_t at = (uintptr_t)address;
    for (uint32_t c = 0; c < store->slots.class_count; c++) {
        const cb_slot_class *class = &store->slots.classes[c];
        uintptr_t start = (uintptr_t) class->memory;
        if (at < start || at - start >= class->slot_count * class->slot_bytes)
            continue;
        uint32_t slot = class->first_slot + (uint32_t)((at - start) / class->slot_bytes), r = record_of(store, slot);
        *place =
            (cb_store_place){.slot = slot, .set = CB_NONE, .expert = CB_NONE, .state = names[state_of(store, slot)]};
        if (r != CB_NONE) {
            place->set = store->t.records[r].set;
            place->expert = r - store->t.uses[place->set].first;
        }
        return true;
    }
    return false;
}
