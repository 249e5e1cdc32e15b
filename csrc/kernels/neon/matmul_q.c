/* Quantised matmul of this ISA: one source for neon and i8mm. */
#define VEC_ISA neon
#include "kernels/matmul_q_neon_tmpl.h"
