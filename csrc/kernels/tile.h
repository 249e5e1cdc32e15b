/* Layout tiled16x4 of the quantised formats (spec/cbi.md): what all matmul variants agree on.
 *
 * A block is 16 output rows x 128 k: the codes, then the scales of its 4 groups of 32 k, 16 for each. Step j of the
 * codes holds k = 4j .. 4j+3 of rows 0 .. 15; with 4 bits, vector i holds step 2i in its low nibbles and step
 * 2i + 1 in its high ones.
 *
 * Bounds that keep everything exact: a group's dot product is at most 32 * 128 * 127 = 520192 < 2^24, so it is exact
 * in int32 and in float32; activation codes lie in [-127, 127], their sum over 32 within +-4064. */
#ifndef CB_KERNELS_TILE_H
#define CB_KERNELS_TILE_H

#include "kernels/half.h"
#include "kernels/variants.h"

#define TILE_GROUP 32
#define TILE_GROUPS (CB_ACTIVATION_BLOCK / TILE_GROUP)
#define TILE_CODE_BYTES(bits) (CB_LANES * CB_ACTIVATION_BLOCK * (bits) / 8)
#define TILE_BLOCK_BYTES(bits) (TILE_CODE_BYTES(bits) + TILE_GROUPS * CB_LANES * 2)

/* The activation row for output row i, in its quantised form. */
typedef struct quantised_row {
    const int8_t *codes;
    const float *scales; /* one for each block */
    const int16_t *sums; /* TILE_GROUPS for each block */
} quantised_row;

static inline uint64_t blocks_of(const cb_matmul *job) {
    return ((uint64_t)job->k + CB_ACTIVATION_BLOCK - 1) / CB_ACTIVATION_BLOCK;
}

static inline quantised_row row_of(const cb_matmul *job, uint32_t i) {
    const uint64_t row = job->index ? job->index[i] : i;
    const uint64_t blocks = blocks_of(job);
    return (quantised_row){job->x->codes + row * blocks * CB_ACTIVATION_BLOCK, job->x->scales + row * blocks,
                           job->x->sums + row * blocks * TILE_GROUPS};
}

#endif
