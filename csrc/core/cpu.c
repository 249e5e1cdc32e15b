#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/core.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

static const char *const names[CB_ISA_COUNT] = {"scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm"};

const char *cb_isa_name(cb_isa isa) { return names[isa]; }

#if defined(__x86_64__)

#define XCR0_YMM 0x06u      /* xmm and the upper halves of ymm */
#define XCR0_ZMM 0xe6u      /* these, opmask, and both parts of zmm */
#define XCR0_TILES 0x600e6u /* these, tile configuration and tiles */

/* Bits of CPUID leaf 7 that not every compiler's cpuid.h names. */
#define EBX_AVX512 (bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ)
#define EDX_AMX (1u << 24 | 1u << 25) /* tile, int8 */
#define SUBLEAF1_EAX_AVXVNNI (1u << 4)

static bool has(uint32_t value, uint32_t mask) { return (value & mask) == mask; }

/* The instructions are useless, or fault, unless the kernel also saves the registers they use. */
bool cb_isa_supported(cb_isa isa) {
    if (isa == CB_ISA_SCALAR)
        return true;
    uint32_t a, b, c, d, b7, c7, d7, a71 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C))
        return false;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || !has(b7, bit_AVX2))
        return false;
    if (a >= 1)
        __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    uint32_t saved, high;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    bool avx512 = has(saved, XCR0_ZMM) && has(b7, EBX_AVX512) && has(c7, bit_AVX512VNNI);
    switch (isa) {
    case CB_ISA_AVX2:
        return has(saved, XCR0_YMM);
    case CB_ISA_AVXVNNI:
        return has(saved, XCR0_YMM) && has(a71, SUBLEAF1_EAX_AVXVNNI);
    case CB_ISA_AVX512:
        return avx512;
    case CB_ISA_AMX:
        return avx512 && has(saved, XCR0_TILES) && has(d7, EDX_AMX);
    default:
        return false;
    }
}

#elif defined(__aarch64__)

bool cb_isa_supported(cb_isa isa) {
    const bool dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    const bool i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
    return isa == CB_ISA_SCALAR || (isa == CB_ISA_NEON && dotprod) || (isa == CB_ISA_I8MM && dotprod && i8mm);
}

#else

bool cb_isa_supported(cb_isa isa) { return isa == CB_ISA_SCALAR; }

#endif

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Tiles are 8 KiB of state for each thread; Linux keeps room for it only where a process asks. False, with errno,
 * where it refuses (before 5.16, under some sandboxes, or when a thread's signal stack could not hold the tiles). */
static bool permitted(cb_isa isa) {
#if defined(__x86_64__)
    return isa != CB_ISA_AMX || syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    (void)isa;
    return true;
#endif
}

colibri_status cb_isa_choose(const char *name, cb_isa *isa, cb_error *error) {
    bool automatic = name == NULL || name[0] == '\0';
    char available[64] = "", problem[96] = "is unknown";
    for (int i = CB_ISA_COUNT - 1; i >= 0; i--) {
        bool named = !automatic && strcmp(name, names[i]) == 0;
        if (!cb_isa_supported((cb_isa)i)) {
            if (named)
                snprintf(problem, sizeof problem, "is not supported by this processor");
            continue;
        }
        if ((automatic || named) && permitted((cb_isa)i)) {
            *isa = (cb_isa)i;
            return COLIBRI_OK;
        }
        if (named) {
            snprintf(problem, sizeof problem, "is refused by the kernel (%s)", strerror(errno));
            continue;
        }
        size_t length = strlen(available);
        snprintf(available + length, sizeof available - length, "%s%s", length > 0 ? ", " : "", names[i]);
    }
    return cb_fail(error, COLIBRI_UNSUPPORTED, "cpu '%.32s' %s, choose from: %s", name, problem, available);
}

cb_float_environment cb_float_enter(void) {
    cb_float_environment environment = {0};
#if defined(__x86_64__)
    environment.saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(environment.saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)));
#endif
    return environment;
}

void cb_float_leave(cb_float_environment environment) {
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)environment.saved);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(environment.saved));
#else
    (void)environment;
#endif
}
