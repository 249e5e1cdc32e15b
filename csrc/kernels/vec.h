/* The vector vocabulary in which every float kernel is written once (the *_tmpl.h files).
 *
 * One type, `vec`: VEC_LANES float32 lanes, whatever the width of the registers. Each function is ONE
 * operation that IEEE-754 defines to the last bit, on each lane by itself, so that every ISA gives the same
 * bits. A new ISA needs a header vec_<isa>.h with these and nothing else:
 *
 *   vec vec_load(const float *p)                     any alignment
 *   vec vec_load_first(const float *p, uint32_t n)   lanes below n <= VEC_LANES; the others +0, their memory unread
 *   void vec_store(float *p, vec x)
 *   void vec_store_first(float *p, vec x, uint32_t n)
 *   vec vec_set(float x)                             all lanes
 *   vec vec_add(a, b)  vec_sub(a, b)  vec_mul(a, b)  vec_div(a, b)
 *   vec vec_fma(a, b, c)                             a * b + c, rounded once
 *   vec vec_max(a, b)                                a > b ? a : b   (so b when either is NaN)
 *   vec vec_min(a, b)                                a < b ? a : b
 *   vec vec_rint(x)                                  to nearest even
 *   vec vec_power2(x)                                2^x for whole x in [-126, 127]; any value for other x
 *   vec_mask vec_less(a, b)                          a < b (false for NaN)
 *   vec_mask vec_lanes(uint32_t first, uint32_t last)   lanes first <= i < last <= VEC_LANES
 *   vec vec_select(vec_mask m, vec a, vec b)         m ? a : b
 *   float vec_sum(x)                                 l[i] += l[i+8], then 4, 2, 1
 *   float vec_largest(x)                             l[i] = l[i+8] > l[i] ? l[i+8] : l[i], then 4, 2, 1
 *   vec vec_max_magnitude(vec m, vec x)              the larger of m and |x| as unsigned integers (m >= 0; NaN is
 * largest) uint32_t vec_largest_magnitude(vec m)            the largest lane of such an m, as an integer vec
 * vec_load_f16(const uint16_t *p)  vec_load_bf16(const uint16_t *p)  vec_load_int8(const int8_t *p) void
 * vec_store_f16(uint16_t *p, vec x)           to nearest even, denormals kept void vec_store_int8(int8_t *p, vec x)
 * rint(x), |x| <= 127
 *
 * and numbers that only steer speed: VEC_CHAINS, independent fma chains that keep the ISA busy and fit its registers;
 * VEC_ATTENTION_ROWS (at most 8) and VEC_ATTENTION_WIDTH, query rows and vectors of keys (or dimensions) that attention
 * holds in registers together, and VEC_ATTENTION_PAIR_WIDTH for what is left over of 2 or 4 rows. */
#ifndef CB_KERNELS_VEC_H
#define CB_KERNELS_VEC_H

#include <stdint.h>
#include <string.h>

#define VEC_INLINE static inline __attribute__((always_inline))
/* Before loops over registers: their arrays exist only until the loop is unrolled. clang would heed GCC's pragma,
 * but only after it has given the arrays memory. */
#ifdef __clang__
#define VEC_UNROLL _Pragma("clang loop unroll(full)")
#else
#define VEC_UNROLL _Pragma("GCC unroll 16")
#endif

/* One source, one symbol for each ISA: KERNEL(add) is kernel_add_avx2 where VEC_ISA is avx2. */
#define KERNEL_JOIN(name, isa) kernel_##name##_##isa
#define KERNEL_EXPAND(name, isa) KERNEL_JOIN(name, isa)
#define KERNEL(name) KERNEL_EXPAND(name, VEC_ISA)

#endif
