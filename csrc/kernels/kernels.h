/* The kernel table: plain C first, then each ISA overlays what it has (dispatch.c).
 *
 * Every variant of a kernel gives the same bits (docs/numerics.md). Kernels neither
 * allocate nor fail; they trust their arguments, which the VM checked. */
#ifndef CB_KERNELS_H
#define CB_KERNELS_H

#include "core/core.h"
#include "file/formats_generated.h"

#define CB_LANES 16        /* output rows of a tile; partial sums of a row reduction */
#define CB_KEY_BLOCK 64    /* positions of a state block */
#define CB_SPLIT_KEYS 1024 /* keys of an attention split, always merged in order */

/* Rows of activations: float values, and their quantised form when a quantised weight needs it. */
typedef struct cb_rows {
    const float *values; /* [row * stride + k] */
    uint64_t stride;
    const int8_t *codes; /* [row * padded + k], padded = k rounded up to 128, zero beyond k */
    const float *scales; /* [row * blocks + block], blocks = padded / CB_ACTIVATION_BLOCK */
    const int16_t *sums; /* [row * padded / 32 + i]: sum of codes 32i .. 32i+31 */
} cb_rows;

/* out[i * out_stride + n] = (row n of the weight) . (activation row index[i] or i), for i < count, n < rows.
 * `tiles` points at a whole number of tiles of 16 rows; only `rows` of them are stored. */
typedef struct cb_matmul {
    const uint8_t *tiles;
    uint32_t rows; /* output rows to store, 1 .. ; the tiles hold rows rounded up to 16 */
    uint32_t k;    /* input width, unpadded */
    const cb_rows *x;
    const uint32_t *index; /* NULL: 0, 1, 2, ... */
    uint32_t count;
    float *out;
    uint64_t out_stride;
} cb_matmul;

/* One block of CB_KEY_BLOCK absolute positions for `count` query rows of one kv head. Row i sees keys
 * [first[i], last[i]) of the block (empty: the row is skipped) and updates m, l, out in place. */
typedef struct cb_attention_block {
    const float *q; /* row i at q + i * q_stride, key_dim values */
    uint64_t q_stride;
    const void *k; /* [key_dim][64] */
    const void *v; /* [64][value_dim] */
    uint32_t key_dim, value_dim;
    float scale;
    uint32_t count;
    const uint8_t *first; /* [count] 0..64 */
    const uint8_t *last;
    float *m, *l; /* [count]; start at -inf and 0; l is NaN from the first seen score on that is not finite */
    float *out;   /* row i at out + i * out_stride, value_dim values, start at 0; not normalised */
    uint64_t out_stride;
    uint32_t format;                        /* of the elements of k and v: a state format (0: f32) */
    const float *key_scales, *value_scales; /* [64], q8 only */
    const void *next_k;                     /* of the block that comes next, to be fetched ahead, or NULL */
} cb_attention_block;

typedef struct cb_kernels {
    cb_isa isa;
    void (*matmul[CB_FORMAT_LIMIT])(const cb_matmul *job);
    const char *matmul_name[CB_FORMAT_LIMIT]; /* "kernel_matmul_q4_g32_avx512" */

    /* Quantises one row; codes has k rounded up to 128 places. False if a value is NaN or infinite (codes are then 0).
     */
    bool (*quantise_row)(const float *x, uint32_t k, int8_t *codes, float *scales, int16_t *sums);
    bool (*all_finite)(const float *x, uint64_t n); /* integer test of the exponents */
    /* False if the sum of squares is not finite: x has NaN or infinity, or is too large. */
    bool (*rms_norm)(float *y, const float *x, const float *weight, uint32_t n, float epsilon);
    bool (*add)(float *y, const float *a, const float *b, uint64_t n);          /* false: y is not finite */
    bool (*clamp)(float *y, const float *x, float low, float high, uint64_t n); /* false: x is not finite */
    void (*silu_mul)(float *y, const float *gate, const float *up, uint64_t n); /* gate * sigmoid(gate) * up */
    void (*sigmoid_scale)(float *y, const float *x, float gate, uint64_t n);    /* sigmoid(gate) * x */
    /* y = fma(weight, x, y); false: x is not finite */
    bool (*add_scaled)(float *y, const float *x, float weight, uint64_t n);
    void (*softmax)(float *x, uint32_t n);
    /* table: n cosines then n sines, times scale */
    void (*rope_table)(float *table, const float *inverse_frequencies, uint32_t n, uint32_t position, float scale);
    /* one row of heads; half pairs (i, i + n), interleaved pairs (2i, 2i+1), n = rotary_dim / 2 */
    void (*rope)(float *y, const float *x, const float *table, uint32_t heads, uint32_t head_dim, uint32_t rotary_dim,
                 uint32_t pairing);
    void (*attention_block)(const cb_attention_block *job);
    /* Adds a finished split (m2, l2, out2) to (m, l, out). */
    void (*attention_merge)(float *m, float *l, float *out, float m2, float l2, const float *out2, uint32_t value_dim);
    /* y = out * (1 / l); false: y is not finite */
    bool (*attention_finish)(float *y, const float *out, float l, uint32_t value_dim);

    /* State. One kv head of one block holds K as [key_dim][64] and V as [64][value_dim] in the format's element;
     * q8 has a float scale for each key besides. put: one row into slot 0..63, false when it does not fit (f16
     * overflow, NaN). */
    bool (*put_key)(uint32_t format, void *block, float *scales, uint32_t slot, const float *key, uint32_t key_dim);
    bool (*put_value)(uint32_t format, void *block, float *scales, uint32_t slot, const float *value,
                      uint32_t value_dim);

    /* Row `row` of a matrix in any format and layout as floats (embeddings). */
    void (*decode_row)(uint32_t format, uint32_t layout, const uint8_t *data, uint64_t cols, uint64_t row, float *out);
} cb_kernels;

/* The table for an ISA that cb_isa_supported() says this CPU has. Matmul needs one that cb_isa_choose() gave. */
const cb_kernels *cb_kernels_get(cb_isa isa);

/* Scalar functions of the contract, for the sampler: fixed sequences of fma. */
float cb_exp(float x);
float cb_log(float x);

#endif
