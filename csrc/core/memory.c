#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "core/core.h"

#define LARGE (UINT64_C(1) << 20)
#define PAGE UINT64_C(4096)
#define HEAP_LIMIT (UINT64_C(128) << 10) /* glibc maps larger blocks on their own */

static uint64_t alignment_of(uint64_t size) { return size >= LARGE ? PAGE : CB_CACHE_LINE; }

/* Weights and attention state are streamed: with pages of 4 KiB a core waits for the page tables longer than for the
 * memory. Blocks that follow each other become one range for the kernel, in which a huge page may lie across two of
 * them; it never holds what is in no block. Refused: usual pages. */
static void prefer_huge_pages(char *start, uint64_t size) {
    uint64_t before = (uintptr_t)start & (PAGE - 1);
    madvise(start - before, cb_round_up(before + size, PAGE), MADV_HUGEPAGE);
}

/* calloc, not aligned_alloc and memset: fresh pages of a large block are zero already and are
 * first touched by whoever fills them. The block's true start lies just before the memory. */
void *cb_alloc(uint64_t size) {
    uint64_t alignment = alignment_of(size);
    uint64_t slack = alignment + sizeof(void *);
    if (size > PTRDIFF_MAX - slack)
        return NULL;
    char *start = calloc(1, (size_t)(size + slack));
    if (start == NULL)
        return NULL;
    uintptr_t aligned = ((uintptr_t)start + sizeof(void *) + alignment - 1) & ~(uintptr_t)(alignment - 1);
    char *memory = start + (aligned - (uintptr_t)start);
    memcpy(memory - sizeof start, &start, sizeof start);
    if (size >= LARGE)
        prefer_huge_pages(start, size + slack);
    return memory;
}

uint64_t cb_alloc_bytes(uint64_t size) {
    uint64_t slack = alignment_of(size) + sizeof(void *) + 16; /* the allocator's own header besides */
    if (size > PTRDIFF_MAX - slack - PAGE)
        return UINT64_MAX;
    return cb_round_up(size + slack, size + slack >= HEAP_LIMIT ? PAGE : 16);
}

void cb_free(void *memory) {
    if (memory == NULL)
        return;
    char *start;
    memcpy(&start, (char *)memory - sizeof start, sizeof start);
    free(start);
}

uint64_t cb_multiply(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}
