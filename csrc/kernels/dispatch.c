/* Which variant of each kernel a CPU gets: tables of constants, chosen once by cb_isa_choose. */
#include "kernels/variants.h"

#define MATMUL(format, name) .matmul[format] = name, .matmul_name[format] = #name

/* Kernels that every ISA has in its own variant. */
#define FLOAT_KERNELS(isa)                                                                                             \
    .quantise_row = kernel_quantise_row_##isa, .all_finite = kernel_all_finite_##isa,                                  \
    .rms_norm = kernel_rms_norm_##isa, .add = kernel_add_##isa, .clamp = kernel_clamp_##isa,                           \
    .silu_mul = kernel_silu_mul_##isa, .sigmoid_scale = kernel_sigmoid_scale_##isa,                                    \
    .add_scaled = kernel_add_scaled_##isa, .softmax = kernel_softmax_##isa, .rope_table = kernel_rope_table_##isa,     \
    .rope = kernel_rope_##isa, .attention_block = kernel_attention_block_##isa,                                        \
    .attention_merge = kernel_attention_merge_##isa, .attention_finish = kernel_attention_finish_##isa,                \
    .put_key = kernel_put_key_##isa, .put_value = kernel_put_value_##isa

static const cb_kernels tables[] = {
    [CB_ISA_SCALAR] =
        {
            .isa = CB_ISA_SCALAR,
            FLOAT_KERNELS(scalar),
            MATMUL(CB_FORMAT_F32, kernel_matmul_f32_scalar),
            MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_scalar),
            MATMUL(CB_FORMAT_F16, kernel_matmul_f16_scalar),
            MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_scalar),
            MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_scalar),
            .decode_row = kernel_decode_row_scalar,
        },
#ifdef __x86_64__
    [CB_ISA_AVX2] =
        {
            .isa = CB_ISA_AVX2,
            FLOAT_KERNELS(avx2),
            MATMUL(CB_FORMAT_F32, kernel_matmul_f32_avx2),
            MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_avx2),
            MATMUL(CB_FORMAT_F16, kernel_matmul_f16_avx2),
            MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_avx2),
            MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_avx2),
            .decode_row = kernel_decode_row_scalar,
        },
    [CB_ISA_AVX512] =
        {
            .isa = CB_ISA_AVX512,
            FLOAT_KERNELS(avx512),
            MATMUL(CB_FORMAT_F32, kernel_matmul_f32_avx512),
            MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_avx512),
            MATMUL(CB_FORMAT_F16, kernel_matmul_f16_avx512),
            MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_avx512),
            MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_avx512),
            .decode_row = kernel_decode_row_scalar,
        },
#endif
#ifdef __aarch64__
    [CB_ISA_NEON] =
        {
            .isa = CB_ISA_NEON,
            FLOAT_KERNELS(neon),
            MATMUL(CB_FORMAT_F32, kernel_matmul_f32_neon),
            MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_neon),
            MATMUL(CB_FORMAT_F16, kernel_matmul_f16_neon),
            MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_neon),
            MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_neon),
            .decode_row = kernel_decode_row_scalar,
        },
    [CB_ISA_I8MM] =
        {
            .isa = CB_ISA_I8MM,
            FLOAT_KERNELS(neon),
            MATMUL(CB_FORMAT_F32, kernel_matmul_f32_neon),
            MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_neon),
            MATMUL(CB_FORMAT_F16, kernel_matmul_f16_neon),
            MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_i8mm),
            MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_i8mm),
            .decode_row = kernel_decode_row_scalar,
        },
#endif
};

const cb_kernels *cb_kernels_get(cb_isa isa) { return &tables[isa]; }
