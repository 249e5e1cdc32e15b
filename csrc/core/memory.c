#include <stdlib.h>
#include <string.h>

#include "core/core.h"

#define LARGE (UINT64_C(1) << 20)

/* calloc, not aligned_alloc and memset: fresh pages of a large block are zero already and are
 * first touched by whoever fills them. The block's true start lies just before the memory. */
void *cb_alloc(uint64_t size) {
    uint64_t alignment = size >= LARGE ? 4096 : CB_CACHE_LINE;
    uint64_t slack = alignment + sizeof(void *);
    if (size > PTRDIFF_MAX - slack)
        return NULL;
    char *start = calloc(1, (size_t)(size + slack));
    if (start == NULL)
        return NULL;
    uintptr_t aligned = ((uintptr_t)start + sizeof(void *) + alignment - 1) & ~(uintptr_t)(alignment - 1);
    char *memory = start + (aligned - (uintptr_t)start);
    memcpy(memory - sizeof start, &start, sizeof start);
    return memory;
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
