/* After a session is opened nothing is allocated: every way to get memory is counted from outside.
 *
 *   test_alloc tiny.cbi */
#include <dirent.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "colibri.h"

static atomic_uint allocations;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

/* The sanitizer has replaced malloc already; it tells us about its calls. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *memory, size_t size) {
    (void)memory;
    (void)size;
    atomic_fetch_add(&allocations, 1);
}

static void on_free(const volatile void *memory) { (void)memory; }

static void start_counting(void) { __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free); }

#else

/* These win over the C library's, for every object of this program. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(memory, size);
}

void *memalign(size_t alignment, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **memory, size_t alignment, size_t size) {
    *memory = memalign(alignment, size);
    return *memory != NULL ? 0 : ENOMEM;
}

void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
    atomic_fetch_add(&allocations, 1);
    return (void *)syscall(SYS_mmap, address, length, protection, flags, file, offset);
}

static void start_counting(void) {}

#endif

/* A sanitizer allocates in every thread that starts: wait until the workers have given themselves their name. */
static void wait_for_workers(uint32_t wanted) {
    for (uint32_t found = 0; found < wanted;) {
        DIR *threads = opendir("/proc/self/task");
        CHECK(threads != NULL);
        found = 0;
        for (struct dirent *entry; (entry = readdir(threads)) != NULL;) {
            char name[300], comm[32] = "";
            snprintf(name, sizeof name, "/proc/self/task/%s/comm", entry->d_name);
            FILE *file = fopen(name, "r");
            if (file == NULL)
                continue;
            found += fgets(comm, sizeof comm, file) != NULL && strcmp(comm, "colibri\n") == 0;
            fclose(file);
        }
        closedir(threads);
    }
}

enum { PROMPT = 1300, STEPS = 40, CONTEXT = 1500 };

static void forward(colibri_engine *engine, colibri_item *items, uint32_t count) {
    CHECK(colibri_forward_batch(engine, items, count, NULL, 0) == COLIBRI_OK);
    for (uint32_t i = 0; i < count; i++)
        CHECK(items[i].status == COLIBRI_OK);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    start_counting();
    colibri_runtime_options options = {.threads = 3};
    colibri_runtime *runtime;
    colibri_engine *engine;
    colibri_engine_info info;
    colibri_session *sessions[2];
    CHECK(colibri_init(&options, &runtime, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_engine_open(runtime, argv[1], NULL, &engine, NULL, 0) == COLIBRI_OK);
    colibri_engine_get_info(engine, &info);
    for (int i = 0; i < 2; i++) {
        colibri_session_options session_options = {CONTEXT, COLIBRI_STATE_F16};
        CHECK(colibri_session_open(engine, &session_options, &sessions[i], NULL, 0) == COLIBRI_OK);
    }
    static uint32_t tokens[PROMPT];
    static float scores[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        tokens[i] = i * i % info.vocabulary_size;
    float *logits = malloc(2 * info.vocabulary_size * sizeof *logits);
    void *scratch = malloc(colibri_sample_scratch_size(info.vocabulary_size));
    uint8_t *saved = malloc(1 << 22);
    CHECK(logits != NULL && scratch != NULL && saved != NULL);
    CHECK(atomic_load(&allocations) > 10); /* the counter works */

    wait_for_workers(options.threads - 1);
    uint32_t before = atomic_load(&allocations);
    colibri_item items[2] = {{.session = sessions[0], .tokens = tokens, .token_count = PROMPT, .scores = scores},
                             {.session = sessions[1],
                              .tokens = tokens,
                              .token_count = 33,
                              .logits_mode = COLIBRI_LOGITS_LAST,
                              .logits = logits}};
    forward(engine, items, 2);
    items[0] = (colibri_item){.session = sessions[0],
                              .tokens = tokens,
                              .token_count = 1,
                              .logits_mode = COLIBRI_LOGITS_ALL,
                              .logits = logits + info.vocabulary_size};
    items[1].token_count = 1;
    colibri_sampling sampling = {.temperature = 0.8f,
                                 .top_k = 10,
                                 .top_p = 0.9f,
                                 .repetition_penalty = 1.1f,
                                 .frequency_penalty = 0.1f,
                                 .top_logprobs = 5};
    for (uint32_t step = 0; step < STEPS; step++) {
        colibri_sample_result result;
        forward(engine, items, 2);
        CHECK(colibri_sample(&sampling, logits, info.vocabulary_size, NULL, tokens, 50, 20, step, scratch, &result,
                             NULL, 0) == COLIBRI_OK);
    }
    CHECK(colibri_truncate(sessions[0], 100, NULL, 0) == COLIBRI_OK);
    uint64_t size = colibri_state_size(sessions[0]);
    CHECK(size <= 1 << 22);
    CHECK(colibri_state_save(sessions[0], saved, size, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_state_restore(sessions[1], saved, size, NULL, 0) == COLIBRI_OK);
    items[1].token_count = CONTEXT; /* errors neither */
    colibri_cancel(sessions[0]);
    CHECK(colibri_forward_batch(engine, items, 2, NULL, 0) == COLIBRI_OK);
    CHECK(items[0].status == COLIBRI_CANCELLED && items[1].status != COLIBRI_OK);
    uint32_t after = atomic_load(&allocations);
    if (after != before)
        fprintf(stderr, "%u allocations after the sessions were opened\n", after - before);
    CHECK(after == before);

    for (int i = 0; i < 2; i++)
        CHECK(colibri_session_close(sessions[i]) == COLIBRI_OK);
    CHECK(colibri_engine_close(engine) == COLIBRI_OK && colibri_free(runtime) == COLIBRI_OK);
    free(logits);
    free(scratch);
    free(saved);
    puts("alloc: all tests passed");
    return 0;
}
