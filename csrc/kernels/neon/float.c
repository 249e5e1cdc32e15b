/* The float kernels of this ISA: one source for all, in the words of vec.h. */
#include "kernels/vec_neon.h"

#include "kernels/math_tmpl.h"
#include "kernels/rows_tmpl.h"
#include "kernels/rope_tmpl.h"
#include "kernels/attention_tmpl.h"
#include "kernels/state_tmpl.h"
#include "kernels/matmul_float_tmpl.h"
