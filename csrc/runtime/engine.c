#include "runtime/runtime.h"

#include <stdio.h>
#include <string.h>

#include "file/load.h"

#define DEFAULT_BATCH_TOKENS 512
#define MAX_BATCH_TOKENS 65536
#define DEFAULT_IO_THREADS 2
#define MAX_IO_THREADS 16
#define MAX_PREFETCH_DEPTH 8

_Static_assert(CB_OP_LIMIT <= COLIBRI_OP_KINDS, "colibri_stats has a place for each op");
_Static_assert(CB_FORMAT_LIMIT <= 16, "colibri_stats has a place for each format");

static void close_parts(colibri_engine *engine) {
    cb_vm_close(engine->vm);
    cb_expert_store_close(engine->store);
    cb_model_close(engine->model);
    cb_free(engine);
}

colibri_status cb_check_engine_options(const colibri_engine_options *given, colibri_engine_options *options,
                                       cb_error *error) {
    *options = given != NULL ? *given : (colibri_engine_options){0};
    if (options->max_batch_tokens == 0)
        options->max_batch_tokens = DEFAULT_BATCH_TOKENS;
    if (options->io_threads == 0)
        options->io_threads = DEFAULT_IO_THREADS;
    const struct {
        const char *name, *meaning;
        uint32_t value, most;
    } fields[] = {
        {"max_batch_tokens", "tokens", options->max_batch_tokens, MAX_BATCH_TOKENS},
        {"io_threads", "threads", options->io_threads, MAX_IO_THREADS},
        {"io", "0 auto, 1 direct, 2 buffered", options->io, COLIBRI_IO_BUFFERED},
        {"verify", "0 crc, 1 full, 2 off", options->verify, COLIBRI_VERIFY_OFF},
        {"huge_pages", "0 auto, 1 2M, 2 1G, 3 off", options->huge_pages, COLIBRI_PAGES_OFF},
        {"prefetch_depth", "layers", options->prefetch_depth, MAX_PREFETCH_DEPTH},
        {"lock_memory", "0 no, 1 yes", options->lock_memory, 1},
        {"guard", "0 no, 1 yes", options->guard, 1},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value > fields[i].most)
            return cb_fail(error, COLIBRI_INVALID, "%s is %u, it must be at most %u (%s)", fields[i].name,
                           fields[i].value, fields[i].most, fields[i].meaning);
    return COLIBRI_OK;
}

void cb_engine_parts(const cb_model *model, const colibri_engine_options *options, cb_store_options *store,
                     cb_vm_options *vm) {
    *store = (cb_store_options){.slot_bytes = options->expert_bytes,
                                .io_threads = options->io_threads,
                                .io = options->io,
                                .page_cache_bytes = options->page_cache_bytes,
                                .verify = options->verify,
                                .huge_pages = options->huge_pages,
                                .lock_memory = options->lock_memory != 0,
                                .guard = options->guard != 0};
    cb_store_plan plan;
    cb_expert_store_plan(model, store, &plan);
    if (options->expert_bytes == 0 || options->expert_bytes >= plan.all_bytes)
        store->slot_bytes = UINT64_MAX;
    *vm = (cb_vm_options){.max_rows = options->max_batch_tokens,
                          .prefetch_depth = options->prefetch_depth,
                          .resident = store->slot_bytes == UINT64_MAX};
}

static colibri_status open_parts(colibri_engine *engine, const char *path, const colibri_engine_options *options,
                                 cb_error *error) {
    cb_store_options store;
    cb_vm_options vm;
    if (cb_model_open(path, &engine->model, error) != COLIBRI_OK)
        return error->status;
    cb_engine_parts(engine->model, options, &store, &vm);
    if (cb_model_load_tensors(engine->model, &engine->tensor_bytes, error) != COLIBRI_OK ||
        cb_expert_store_open(engine->model, &store, &engine->store, error) != COLIBRI_OK)
        return error->status;
    return cb_vm_open(engine->model, engine->store, engine->runtime->kernels, engine->runtime->pool, &vm, &engine->vm,
                      error);
}

colibri_status colibri_engine_open(colibri_runtime *runtime, const char *path, const colibri_engine_options *given,
                                   colibri_engine **result, char *message, size_t message_size) {
    cb_error error = {0};
    colibri_engine_options options;
    if (result != NULL)
        *result = NULL;
    if (runtime == NULL || path == NULL || result == NULL) {
        cb_fail(&error, COLIBRI_INVALID, "runtime, path and engine must not be NULL");
    } else if (cb_forked(runtime)) {
        cb_fail_forked(&error);
    } else if (cb_check_engine_options(given, &options, &error) == COLIBRI_OK) {
        colibri_engine *engine = cb_alloc(sizeof *engine);
        if (engine == NULL) {
            cb_fail(&error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an engine");
        } else {
            engine->runtime = runtime;
            engine->state_limit = options.state_bytes != 0 ? options.state_bytes : UINT64_MAX;
            if (open_parts(engine, path, &options, &error) == COLIBRI_OK) {
                atomic_fetch_add(&runtime->engines, 1);
                *result = engine;
            } else {
                close_parts(engine);
            }
        }
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}

colibri_status colibri_engine_close(colibri_engine *engine) {
    if (engine == NULL)
        return COLIBRI_OK;
    colibri_runtime *runtime = engine->runtime;
    if (cb_forked(runtime))
        return COLIBRI_FORKED;
    if (atomic_load(&engine->sessions) != 0)
        return COLIBRI_BUSY;
    close_parts(engine);
    cb_block_pool_trim(runtime->blocks, UINT64_MAX);
    atomic_fetch_sub(&runtime->engines, 1);
    return COLIBRI_OK;
}

void colibri_engine_get_info(const colibri_engine *engine, colibri_engine_info *info) {
    const cb_program *program = &engine->model->program;
    uint64_t expert_bytes = cb_expert_store_bytes(engine->store);
    *info = (colibri_engine_info){.vocabulary_size = program->vocabulary_size,
                                  .context_limit = program->context_limit,
                                  .layer_count = program->layer_count,
                                  .expert_set_count = engine->model->set_count,
                                  .default_state_format = program->default_state_format,
                                  .max_batch_tokens = engine->vm->max_rows,
                                  .weight_bytes = engine->tensor_bytes + expert_bytes,
                                  .expert_bytes = expert_bytes,
                                  .scratch_bytes = engine->vm->arena_bytes};
    memcpy(info->digest, engine->model->digest, sizeof info->digest);
    info->all_expert_bytes = cb_all_expert_bytes(engine->model);
    info->token_expert_bytes = cb_token_expert_bytes(engine->model);
}

colibri_status colibri_engine_guard(colibri_engine *engine, char *message, size_t message_size) {
    cb_error error = {0};
    if (engine == NULL)
        cb_fail(&error, COLIBRI_INVALID, "engine must not be NULL");
    else if (cb_forked(engine->runtime))
        cb_fail_forked(&error);
    else if (!cb_guard_add(engine->store))
        cb_fail(&error, COLIBRI_INVALID, "the engine was not opened with guard = 1, or too many guarded ones are open");
    cb_copy_message(&error, message, message_size);
    return error.status;
}

colibri_status colibri_engine_warm(colibri_engine *engine, uint32_t set, const uint32_t *experts, uint32_t count,
                                   char *message, size_t message_size) {
    cb_error error = {0};
    if (engine == NULL || (experts == NULL && count > 0))
        cb_fail(&error, COLIBRI_INVALID, "engine and experts must not be NULL");
    else if (cb_forked(engine->runtime))
        cb_fail_forked(&error);
    else if (set >= engine->model->set_count)
        cb_fail(&error, COLIBRI_INVALID, "set is %u, the model has %u", set, engine->model->set_count);
    for (uint32_t i = 0; error.status == COLIBRI_OK && i < count; i++)
        if (experts[i] >= engine->model->sets[set].count)
            cb_fail(&error, COLIBRI_INVALID, "experts[%u] is %u, set %u has %u experts", i, experts[i], set,
                    engine->model->sets[set].count);
    if (error.status == COLIBRI_OK)
        cb_store_warm(engine->store, set, experts, count);
    cb_copy_message(&error, message, message_size);
    return error.status;
}

static uint64_t read_counter(const cb_counter *counter) { return atomic_load_explicit(counter, memory_order_relaxed); }

static uint64_t profile_rows(const colibri_engine *engine) { return engine->model->program.layer_count + UINT64_C(1); }

colibri_status colibri_get_profile(const colibri_engine *engine, colibri_phase phase, uint64_t *nanoseconds) {
    if (cb_forked(engine->runtime))
        return COLIBRI_FORKED;
    if ((unsigned)phase > COLIBRI_PHASE_DECODE || nanoseconds == NULL)
        return COLIBRI_INVALID;
    memset(nanoseconds, 0, profile_rows(engine) * COLIBRI_OP_KINDS * sizeof *nanoseconds);
    for (uint64_t row = 0; row < profile_rows(engine); row++)
        for (uint64_t op = 0; op < CB_OP_LIMIT; op++)
            nanoseconds[row * COLIBRI_OP_KINDS + op] =
                read_counter(&engine->vm->phases[phase].op_nanoseconds[row * CB_OP_LIMIT + op]);
    return COLIBRI_OK;
}

void colibri_get_stats(const colibri_engine *engine, colibri_stats *stats) {
    const cb_vm *vm = engine->vm;
    cb_io_rates rates = cb_expert_store_io_rates(engine->store);
    *stats = (colibri_stats){.nanoseconds = read_counter(&engine->nanoseconds),
                             .resident = cb_expert_store_is_resident(engine->store),
                             .is_direct = cb_expert_store_is_direct(engine->store),
                             .direct_bytes_per_second = rates.direct,
                             .buffered_bytes_per_second = rates.buffered,
                             .predicted_passes = read_counter(&vm->prediction.passes),
                             .unpredicted_passes = read_counter(&vm->prediction.skipped),
                             .prediction_nanoseconds = read_counter(&vm->prediction.nanoseconds)};
    const char *warning = cb_store_warning(engine->store);
    if (warning != NULL)
        snprintf(stats->warning, sizeof stats->warning, "%s", warning);
    for (int i = 0; i < 2; i++) {
        const cb_phase *phase = &vm->phases[i];
        stats->phases[i] = (colibri_phase_stats){.tokens = read_counter(&phase->tokens),
                                                 .passes = read_counter(&phase->passes),
                                                 .nanoseconds = read_counter(&phase->nanoseconds),
                                                 .parallel_regions = read_counter(&phase->parallel_regions),
                                                 .dispatch = cb_latency_read(&phase->dispatch),
                                                 .dispatch_switched = cb_latency_read(&phase->dispatch_switched),
                                                 .dispatch_missed = read_counter(&phase->dispatch_missed)};
        stats->tokens += stats->phases[i].tokens;
        stats->passes += stats->phases[i].passes;
        for (uint64_t j = 0; j < profile_rows(engine) * CB_OP_LIMIT; j++)
            stats->op_nanoseconds[j % CB_OP_LIMIT] += read_counter(&phase->op_nanoseconds[j]);
    }
    snprintf(stats->cpu, sizeof stats->cpu, "%s", cb_isa_name(vm->kernels->isa));
    for (int i = 0; i < CB_FORMAT_LIMIT; i++) {
        const char *name = atomic_load_explicit(&vm->matmul_names[i], memory_order_relaxed);
        if (name != NULL)
            snprintf(stats->matmul[i], sizeof stats->matmul[i], "%s", name);
    }
}

colibri_status colibri_get_expert_stats(const colibri_engine *engine, uint32_t set, colibri_expert_set_stats *stats,
                                        uint64_t *counts) {
    if (cb_forked(engine->runtime))
        return COLIBRI_FORKED;
    if (set >= engine->model->set_count || stats == NULL)
        return COLIBRI_INVALID;
    const cb_expert_set *info = &engine->model->sets[set];
    const cb_set_counters *counters = &engine->vm->sets[set];
    cb_store_stats store;
    cb_store_get_stats(engine->store, set, &store);
    *stats = (colibri_expert_set_stats){.layer = info->layer,
                                        .expert_count = info->count,
                                        .experts_computed = read_counter(&counters->experts_computed),
                                        .expert_tokens = read_counter(&counters->expert_tokens),
                                        .bytes_touched = read_counter(&counters->bytes_touched),
                                        .hits = store.hits,
                                        .misses = store.misses,
                                        .bytes_read = store.bytes_read,
                                        .stall_nanoseconds = store.stall_nanoseconds,
                                        .prefetched = store.prefetched,
                                        .prefetched_used = store.prefetched_used,
                                        .evictions = store.evictions,
                                        .load_nanoseconds = store.load_nanoseconds,
                                        .predictable = read_counter(&counters->predictable),
                                        .predicted = read_counter(&counters->predicted),
                                        .recalled = read_counter(&counters->recalled)};
    for (uint32_t i = 0; counts != NULL && i < info->count; i++)
        counts[i] = read_counter(&counters->tokens[i]);
    return COLIBRI_OK;
}

colibri_status colibri_get_expert_loads(const colibri_engine *engine, uint32_t set, uint64_t *loads,
                                        uint64_t *load_nanoseconds) {
    if (cb_forked(engine->runtime))
        return COLIBRI_FORKED;
    if (set >= engine->model->set_count)
        return COLIBRI_INVALID;
    cb_store_get_expert_loads(engine->store, set, loads, load_nanoseconds);
    return COLIBRI_OK;
}
