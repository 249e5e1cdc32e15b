/* What the tests of the kernels share: numbers to try, and the loop over the variants that this CPU has. */
#ifndef KERNEL_TEST_H
#define KERNEL_TEST_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "naive.h"

static const cb_kernels *kernels; /* the variant under test */
static unsigned failures;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static inline void check(bool good, const char *format, ...) {
    va_list arguments;
    if (good || failures++ > 50) {
        return;
    }
    va_start(arguments, format);
    printf("FAIL %s: ", cb_isa_name(kernels->isa));
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

static inline uint32_t random_u32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

static inline float random_float(void) { return (float)(int32_t)random_u32() * 0x1p-30f; }

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Bits equal, or both NaN: which NaN is not part of the contract. */
static inline bool same(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (memcmp(a + i, b + i, 4) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            printf("  [%zu] got %a, expected %a\n", i, (double)a[i], (double)b[i]);
            return false;
        }
    }
    return true;
}

/* Exactly n floats, so that the address sanitizer sees any step beyond. */
static inline void *take(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        abort();
    }
    return p;
}

static inline float *floats(size_t n) { return take(n * sizeof(float)); }

enum { PLAIN, TINY, HUGE_VALUES, ZEROS, WITH_NAN, WITH_INFINITY, ANY_BITS, FLOAT_KINDS };

static inline void fill(float *x, size_t n, int kind) {
    for (size_t i = 0; i < n; i++) {
        const float value = random_float();
        x[i] = kind == TINY          ? value * 0x1p-126f
               : kind == HUGE_VALUES ? value * 0x1p126f
               : kind == ZEROS       ? (random_u32() & 1 ? -0.0f : 0.0f)
               : kind == ANY_BITS    ? float_of(random_u32())
                                     : value;
    }
    if (n && (kind == WITH_NAN || kind == WITH_INFINITY)) {
        x[random_u32() % n] = kind == WITH_NAN ? NAN : (random_u32() & 1 ? -INFINITY : INFINITY);
    }
}

static inline float *filled(size_t n, int kind) {
    float *x = floats(n);
    fill(x, n, kind);
    return x;
}

/* Runs `test` for every ISA of this CPU; the exit status of the program. */
static inline int for_all_variants(void (*test)(void)) {
    const cb_float_environment environment = cb_float_enter();
    for (int i = CB_ISA_SCALAR; i < CB_ISA_COUNT; i++) {
        cb_isa isa;
        cb_error error;
        if (cb_isa_choose(cb_isa_name((cb_isa)i), &isa, &error) != COLIBRI_OK) {
            printf("not tested: %s\n", error.message);
            continue;
        }
        kernels = cb_kernels_get(isa);
        test();
        printf("%s: done\n", cb_isa_name(isa));
    }
    cb_float_leave(environment);
    printf("%u failures\n", failures);
    return failures != 0;
}

#endif
