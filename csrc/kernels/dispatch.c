/* Which variant of each kernel a CPU gets: tables of constants, chosen once by cb_isa_choose. */
#include "kernels/variants.h"

#define MATMUL(format, name) .matmul[format] = name, .matmul_name[format] = #name

/* All that vec_<isa>.h makes of the templates, except matmul. */
#define FLOAT_KERNELS(isa)                                                                                             \
    .quantise_row = kernel_quantise_row_##isa, .all_finite = kernel_all_finite_##isa,                                  \
    .rms_norm = kernel_rms_norm_##isa, .add = kernel_add_##isa, .clamp = kernel_clamp_##isa,                           \
    .silu_mul = kernel_silu_mul_##isa, .sigmoid_scale = kernel_sigmoid_scale_##isa,                                    \
    .add_scaled = kernel_add_scaled_##isa, .softmax = kernel_softmax_##isa, .rope_table = kernel_rope_table_##isa,     \
    .rope = kernel_rope_##isa, .attention_block = kernel_attention_block_##isa,                                        \
    .attention_merge = kernel_attention_merge_##isa, .attention_finish = kernel_attention_finish_##isa,                \
    .put_key = kernel_put_key_##isa, .put_value = kernel_put_value_##isa

/* `floats` names the folder of the float kernels, `quantised` that of the quantised matmuls. */
#define TABLE(id, floats, quantised)                                                                                   \
    [id] = {                                                                                                           \
        .isa = id,                                                                                                     \
        FLOAT_KERNELS(floats),                                                                                         \
        MATMUL(CB_FORMAT_F32, kernel_matmul_f32_##floats),                                                             \
        MATMUL(CB_FORMAT_BF16, kernel_matmul_bf16_##floats),                                                           \
        MATMUL(CB_FORMAT_F16, kernel_matmul_f16_##floats),                                                             \
        MATMUL(CB_FORMAT_Q8_G32, kernel_matmul_q8_g32_##quantised),                                                    \
        MATMUL(CB_FORMAT_Q4_G32, kernel_matmul_q4_g32_##quantised),                                                    \
        .decode_row = kernel_decode_row_scalar,                                                                        \
    }

static const cb_kernels tables[] = {
    TABLE(CB_ISA_SCALAR, scalar, scalar),
#ifdef __x86_64__
    TABLE(CB_ISA_AVX2, avx2, avx2),       TABLE(CB_ISA_AVXVNNI, avx2, avxvnni),
    TABLE(CB_ISA_AVX512, avx512, avx512), TABLE(CB_ISA_AMX, avx512, amx),
#endif
#ifdef __aarch64__
    TABLE(CB_ISA_NEON, neon, neon),       TABLE(CB_ISA_I8MM, neon, i8mm),
#endif
};

const cb_kernels *cb_kernels_get(cb_isa isa) { return &tables[isa]; }
