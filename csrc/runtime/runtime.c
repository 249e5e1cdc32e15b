#include "runtime/runtime.h"

#include <unistd.h>

#include "core/threads.h"

#define MAX_THREADS 1024

uint32_t colibri_abi_version(void) { return COLIBRI_ABI_VERSION; }

bool cb_forked(const colibri_runtime *runtime) { return runtime->process != getpid(); }

colibri_status cb_fail_forked(cb_error *error) {
    return cb_fail(error, COLIBRI_FORKED, "the process has forked; open a new runtime in the child");
}

static colibri_status open_runtime(const colibri_runtime_options *options, colibri_runtime *runtime, cb_error *error) {
    const char *root = options->system_root != NULL ? options->system_root : "/";
    uint32_t threads = options->threads != 0 ? options->threads : cb_count_threads(root);
    cb_isa isa;
    if (threads > MAX_THREADS)
        return cb_fail(error, COLIBRI_INVALID, "threads is %u, it must be at most %u", threads, MAX_THREADS);
    if (cb_isa_choose(options->cpu, &isa, error) != COLIBRI_OK ||
        cb_block_pool_open(&runtime->blocks, error) != COLIBRI_OK)
        return error->status;
    runtime->kernels = cb_kernels_get(isa);
    if (options->pin == 0)
        return cb_pool_open(threads, NULL, &runtime->pool, error);
    uint32_t processors[MAX_THREADS], found = cb_choose_processors(root, threads, processors);
    if (found < threads)
        return cb_fail(error, COLIBRI_INVALID,
                       "threads is %u and this process may use %u processors, pinning needs one for each; ask for at "
                       "most %u threads or leave pinning out",
                       threads, found, found);
    return cb_pool_open(threads, processors, &runtime->pool, error);
}

colibri_status colibri_init(const colibri_runtime_options *options, colibri_runtime **result, char *message,
                            size_t message_size) {
    const colibri_runtime_options defaults = {0};
    cb_error error = {0};
    colibri_runtime *runtime = NULL;
    if (result == NULL) {
        cb_fail(&error, COLIBRI_INVALID, "runtime is NULL, give a place for the handle");
        goto end;
    }
    *result = NULL;
    runtime = cb_alloc(sizeof *runtime);
    if (runtime == NULL) {
        cb_fail(&error, COLIBRI_OUT_OF_MEMORY, "not enough memory for a runtime");
        goto end;
    }
    if (open_runtime(options != NULL ? options : &defaults, runtime, &error) != COLIBRI_OK) {
        cb_block_pool_close(runtime->blocks);
        cb_free(runtime);
        goto end;
    }
    runtime->process = getpid();
    pthread_mutex_init(&runtime->forward, NULL);
    *result = runtime;
end:
    cb_copy_message(&error, message, message_size);
    return error.status;
}

colibri_status colibri_free(colibri_runtime *runtime) {
    if (runtime == NULL)
        return COLIBRI_OK;
    if (cb_forked(runtime))
        return COLIBRI_FORKED;
    if (atomic_load(&runtime->engines) != 0)
        return COLIBRI_BUSY;
    cb_pool_close(runtime->pool);
    cb_block_pool_close(runtime->blocks);
    pthread_mutex_destroy(&runtime->forward);
    cb_free(runtime);
    return COLIBRI_OK;
}

uint32_t colibri_thread_count(const colibri_runtime *runtime) { return cb_pool_threads(runtime->pool); }

const char *colibri_cpu_name(const colibri_runtime *runtime) { return cb_isa_name(runtime->kernels->isa); }
