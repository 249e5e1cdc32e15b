/* Prototypes of every variant of every kernel; what each does stands in kernels.h. */
#ifndef CB_KERNELS_VARIANTS_H
#define CB_KERNELS_VARIANTS_H

#include "kernels/kernels.h"

/* matmul_q.c of a folder */
#define CB_DECLARE_QUANTISED(isa)                                                                                      \
    void kernel_matmul_q8_g32_##isa(const cb_matmul *job);                                                             \
    void kernel_matmul_q4_g32_##isa(const cb_matmul *job)

/* float.c of a folder */
#define CB_DECLARE_FLOATS(isa)                                                                                         \
    void kernel_matmul_f32_##isa(const cb_matmul *job);                                                                \
    void kernel_matmul_bf16_##isa(const cb_matmul *job);                                                               \
    void kernel_matmul_f16_##isa(const cb_matmul *job);                                                                \
    bool kernel_quantise_row_##isa(const float *x, uint32_t k, int8_t *codes, float *scales, int16_t *sums);           \
    bool kernel_all_finite_##isa(const float *x, uint64_t n);                                                          \
    bool kernel_rms_norm_##isa(float *y, const float *x, const float *weight, uint32_t n, float epsilon);              \
    bool kernel_add_##isa(float *y, const float *a, const float *b, uint64_t n);                                       \
    bool kernel_clamp_##isa(float *y, const float *x, float low, float high, uint64_t n);                              \
    void kernel_silu_mul_##isa(float *y, const float *gate, const float *up, uint64_t n);                              \
    void kernel_sigmoid_scale_##isa(float *y, const float *x, float gate, uint64_t n);                                 \
    bool kernel_add_scaled_##isa(float *y, const float *x, float weight, uint64_t n);                                  \
    void kernel_softmax_##isa(float *x, uint32_t n);                                                                   \
    void kernel_rope_table_##isa(float *table, const float *inverse_frequencies, uint32_t n, uint32_t position,        \
                                 float scale);                                                                         \
    void kernel_rope_##isa(float *y, const float *x, const float *table, uint32_t heads, uint32_t head_dim,            \
                           uint32_t rotary_dim, uint32_t pairing);                                                     \
    void kernel_attention_block_##isa(const cb_attention_block *job);                                                  \
    void kernel_attention_merge_##isa(float *m, float *l, float *out, float m2, float l2, const float *out2,           \
                                      uint32_t value_dim);                                                             \
    bool kernel_attention_finish_##isa(float *y, const float *out, float l, uint32_t value_dim);                       \
    bool kernel_put_key_##isa(uint32_t format, void *block, float *scales, uint32_t slot, const float *key,            \
                              uint32_t key_dim);                                                                       \
    bool kernel_put_value_##isa(uint32_t format, void *block, float *scales, uint32_t slot, const float *value,        \
                                uint32_t value_dim)

CB_DECLARE_FLOATS(scalar);
CB_DECLARE_QUANTISED(scalar);
#ifdef __x86_64__
CB_DECLARE_FLOATS(avx2);
CB_DECLARE_QUANTISED(avx2);
CB_DECLARE_QUANTISED(avxvnni);
CB_DECLARE_FLOATS(avx512);
CB_DECLARE_QUANTISED(avx512);
CB_DECLARE_QUANTISED(amx);
#endif
#ifdef __aarch64__
CB_DECLARE_FLOATS(neon);
CB_DECLARE_QUANTISED(neon);
CB_DECLARE_QUANTISED(i8mm);
#endif

void kernel_decode_row_scalar(uint32_t format, uint32_t layout, const uint8_t *data, uint64_t cols, uint64_t row,
                              float *out);

#endif
