/* The caller's floating-point mode, for tests that hand the library an unfriendly one. */
#ifndef FLOAT_MODE_H
#define FLOAT_MODE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define MODE_BITS 0xffc0u     /* all but the exception flags */
#define MODE_WANTED 0x1f80u   /* what the library computes in: to nearest, denormals kept, exceptions masked */
#define MODE_FLUSHING 0x9fc0u /* denormals to zero in and out */
#define MODE_HOSTILE 0xffc0u  /* and rounding towards zero */

static inline uint64_t get_mode(void) { return _mm_getcsr() & MODE_BITS; }
static inline void set_mode(uint64_t mode) { _mm_setcsr((uint32_t)mode); }

#elif defined(__aarch64__)

#define MODE_WANTED UINT64_C(0)
#define MODE_FLUSHING UINT64_C(0x1000000) /* FZ */
#define MODE_HOSTILE UINT64_C(0x7c00000)  /* AHP: another float16; DN; FZ; rounding towards zero */

static inline uint64_t get_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }

#else
#error "tell the tests how to read and set this architecture's floating-point mode"
#endif

static inline bool denormals_live(void) {
    volatile float tiny = 1e-40f, half = 0.5f;
    volatile float product = tiny * half;
    return product != 0;
}

#endif
