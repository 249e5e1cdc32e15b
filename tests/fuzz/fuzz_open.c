/* Opens .cbi files that may be hostile and checks how the core behaves.
 *
 *   fuzz_open [option value]... < stream     stream: for each file its size (u64) and bytes
 *   fuzz_open [option value]... PATH...
 *
 * Prints a line for each file: status, space, message. Ends with status 1 when the core breaks a
 * promise: it takes more memory than a small multiple of the file, fails without a message, or
 * disagrees with itself. Built with --wrap for pread and the allocators.
 *
 *   short-reads 1       pread moves 1 to 7 bytes and is interrupted at every third call
 *   end-at N            the file ends at offset N for pread, as if cut while in use
 *   fail-at N           pread fails with EIO when it touches offset N
 *   fail-allocation N   the Nth allocation of each call fails */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "experts/store.h"
#include "file/load.h"

#define SECONDS 10
#define SMALL (64u << 10)
#define MULTIPLE 6 /* an op of 16 bytes becomes 40, a tensor entry of 96 bytes 320; then the read buffers */

static uint64_t short_reads, end_at = UINT64_MAX, fail_at = UINT64_MAX, fail_allocation;
static uint64_t allocated, allocations, reads;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
ssize_t __real_pread(int fd, void *buffer, size_t size, off_t offset);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);
ssize_t __wrap_pread(int fd, void *buffer, size_t size, off_t offset);

static bool allowed(uint64_t size) {
    allocated += size;
    return ++allocations != fail_allocation;
}

void *__wrap_malloc(size_t size) { return allowed(size) ? __real_malloc(size) : NULL; }

void *__wrap_calloc(size_t count, size_t size) {
    return allowed(cb_multiply(count, size)) ? __real_calloc(count, size) : NULL;
}

void *__wrap_realloc(void *memory, size_t size) { return allowed(size) ? __real_realloc(memory, size) : NULL; }

ssize_t __wrap_pread(int fd, void *buffer, size_t size, off_t offset) {
    reads++;
    if (short_reads != 0 && reads % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    if (short_reads != 0 && size > 1 + reads % 7)
        size = 1 + reads % 7;
    if (fail_at >= (uint64_t)offset && fail_at - (uint64_t)offset < size) {
        errno = EIO;
        return -1;
    }
    if ((uint64_t)offset >= end_at)
        return 0;
    if (size > end_at - (uint64_t)offset)
        size = (size_t)(end_at - (uint64_t)offset);
    return __real_pread(fd, buffer, size, offset);
}

static void broken(const char *what, uint64_t a, uint64_t b) {
    fprintf(stderr, "%s: %" PRIu64 ", %" PRIu64 "\n", what, a, b);
    exit(1);
}

/* The bytes in memory are those of the file. */
static bool same_bytes(const char *path, uint64_t offset, const uint8_t *data, uint64_t size) {
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = __real_malloc(size);
    bool same = file != NULL && bytes != NULL && fseeko(file, (off_t)offset, SEEK_SET) == 0 &&
                fread(bytes, 1, size, file) == size && memcmp(bytes, data, size) == 0 && (uintptr_t)data % 64 == 0;
    free(bytes);
    if (file != NULL)
        fclose(file);
    return same;
}

/* Opens and loads everything, as an engine does. */
static colibri_status load(const char *path, cb_error *error) {
    cb_model *model;
    uint64_t tensor_bytes;
    cb_expert_store *store = NULL;
    if (cb_model_open(path, &model, error) != COLIBRI_OK)
        return error->status;
    colibri_status status = cb_model_load_tensors(model, &tensor_bytes, error);
    const cb_store_options options = {.slot_bytes = UINT64_MAX};
    if (status == COLIBRI_OK)
        status = cb_expert_store_open(model, &options, &store, error);
    if (status == COLIBRI_OK) {
        /* Slots are whole pages; what pads them is told by the plan. */
        cb_store_plan plan;
        cb_expert_store_plan(model, &options, &plan);
        uint64_t record_bytes = cb_expert_store_bytes(store) - plan.wasted_bytes;
        if (tensor_bytes + record_bytes > model->file_size + 64 + 4096)
            broken("more weight bytes than the file has", tensor_bytes, record_bytes);
        for (uint32_t i = 0; i < model->tensor_count; i++)
            if (!same_bytes(path, model->tensors[i].offset, model->tensors[i].data, model->tensors[i].size))
                broken("a tensor in memory is not the file's", i, 0);
        for (uint32_t s = 0; s < model->set_count; s++)
            for (uint32_t i = 0; i < model->sets[s].count; i++) {
                cb_store_ready ready;
                cb_store_begin(store, s, &i, 1);
                if (cb_store_next(store, &ready, 1) != 1 || ready.record == NULL ||
                    !same_bytes(path, model->sets[s].experts[i].offset, ready.record, model->sets[s].experts[i].size))
                    broken("an expert in memory is not the file's", s, i);
                cb_store_end(store);
            }
    }
    cb_expert_store_close(store);
    cb_model_close(model);
    return status;
}

static void start_call(void) {
    allocated = allocations = reads = 0;
    alarm(SECONDS);
}

static void check_file(const char *path, uint64_t size) {
    char message[COLIBRI_MESSAGE_SIZE];
    memset(message, 'x', sizeof message);
    start_call();
    colibri_status status = colibri_validate(path, message, sizeof message);
    uint64_t taken = allocated;
    if (memchr(message, '\0', sizeof message) == NULL)
        broken("the message is not terminated", 0, 0);
    if ((status == COLIBRI_OK) != (message[0] == '\0'))
        broken("status and message disagree", status, 0);
    if (taken > MULTIPLE * size + SMALL)
        broken("too much memory to validate (taken, file)", taken, size);
    if (fail_allocation == 0 && status != COLIBRI_OK && status != COLIBRI_IO && status != COLIBRI_BAD_FILE &&
        status != COLIBRI_UNSUPPORTED)
        broken("unexpected status", status, 0);

    cb_error error = {0};
    start_call();
    colibri_status loaded = load(path, &error);
    if (allocated > (MULTIPLE + 1) * size + SMALL)
        broken("too much memory to load (taken, file)", allocated, size);
    if (fail_allocation == 0 && (loaded != status || strcmp(error.message, message) != 0))
        broken("validating and loading disagree", status, loaded);
    alarm(0);
    /* The two take memory in different places: either may be the one that ran out. */
    printf("%d %s\n", status != COLIBRI_OK ? status : loaded, status != COLIBRI_OK ? message : error.message);
}

static void check_stream(void) {
    uint64_t size;
    while (fread(&size, sizeof size, 1, stdin) == 1) {
        uint8_t *bytes = __real_malloc(size > 0 ? size : 1);
        int fd = memfd_create("fuzz", MFD_CLOEXEC);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (bytes == NULL || fd < 0 || fread(bytes, 1, size, stdin) != size || write(fd, bytes, size) != (ssize_t)size)
            broken("the stream cannot be read", size, 0);
        check_file(path, size);
        close(fd);
        free(bytes);
    }
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        uint64_t *value;
    } options[] = {{"short-reads", &short_reads},
                   {"end-at", &end_at},
                   {"fail-at", &fail_at},
                   {"fail-allocation", &fail_allocation}};
    struct stat status;
    int at = 1;
    for (size_t i = 0; i < sizeof options / sizeof options[0] && at + 1 < count; i++) {
        if (strcmp(arguments[at], options[i].name) == 0) {
            *options[i].value = strtoull(arguments[at + 1], NULL, 10);
            at += 2;
        }
    }
    if (at == count)
        check_stream();
    for (; at < count; at++)
        check_file(arguments[at], stat(arguments[at], &status) == 0 ? (uint64_t)status.st_size : 0);
    return 0;
}
