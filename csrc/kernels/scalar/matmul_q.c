/* Quantised matmul in plain C: weights are unpacked to signed numbers, once for each few activation rows. */
#include "kernels/tile.h"

#define ROWS 8

/* weights[k][n]: row n, column k of the block, zero-point subtracted. */
static void unpack(int8_t weights[CB_ACTIVATION_BLOCK][CB_LANES], const uint8_t *block, uint32_t bits) {
    for (uint32_t k = 0; k < CB_ACTIVATION_BLOCK; k++) {
        const uint32_t step = k / 4;
        for (uint32_t n = 0; n < CB_LANES; n++) {
            const uint32_t place = n * 4 + k % 4;
            if (bits == 8) {
                weights[k][n] = (int8_t)block[step * 64 + place];
            } else {
                weights[k][n] = (int8_t)((block[step / 2 * 64 + place] >> (step % 2 * 4) & 15) - 8);
            }
        }
    }
}

static void multiply_block(float sum[CB_LANES], const int8_t weights[CB_ACTIVATION_BLOCK][CB_LANES],
                           const uint8_t *scales, const int8_t *codes, float scale) {
    float t[CB_LANES] = {0};
    for (uint32_t group = 0; group < TILE_GROUPS; group++) {
        int32_t dot[CB_LANES] = {0};
        for (uint32_t k = group * TILE_GROUP; k < (group + 1) * TILE_GROUP; k++) {
            for (uint32_t n = 0; n < CB_LANES; n++) {
                dot[n] += weights[k][n] * codes[k];
            }
        }
        for (uint32_t n = 0; n < CB_LANES; n++) {
            const float weight_scale = cb_float_of_half(cb_load_u16(scales + (group * CB_LANES + n) * 2));
            t[n] = __builtin_fmaf((float)dot[n], weight_scale, t[n]);
        }
    }
    for (uint32_t n = 0; n < CB_LANES; n++) {
        sum[n] = __builtin_fmaf(t[n], scale, sum[n]);
    }
}

static void matmul(const cb_matmul *job, uint32_t bits) {
    const uint64_t blocks = blocks_of(job);
    const uint8_t *block = job->tiles;
    for (uint32_t first = 0; first < job->rows; first += CB_LANES, block += blocks * TILE_BLOCK_BYTES(bits)) {
        const uint32_t lanes = job->rows - first < CB_LANES ? job->rows - first : CB_LANES;
        for (uint32_t i = 0; i < job->count; i += ROWS) {
            const uint32_t rows = job->count - i < ROWS ? job->count - i : ROWS;
            float sum[ROWS][CB_LANES] = {{0}};
            for (uint64_t b = 0; b < blocks; b++) {
                int8_t weights[CB_ACTIVATION_BLOCK][CB_LANES];
                const uint8_t *at = block + b * TILE_BLOCK_BYTES(bits);
                unpack(weights, at, bits);
                for (uint32_t r = 0; r < rows; r++) {
                    const quantised_row x = row_of(job, i + r);
                    multiply_block(sum[r], weights, at + TILE_CODE_BYTES(bits), x.codes + b * CB_ACTIVATION_BLOCK,
                                   x.scales[b]);
                }
            }
            for (uint32_t r = 0; r < rows; r++) {
                memcpy(job->out + (i + r) * job->out_stride + first, sum[r], lanes * sizeof(float));
            }
        }
    }
}

void kernel_matmul_q8_g32_scalar(const cb_matmul *job) { matmul(job, 8); }

void kernel_matmul_q4_g32_scalar(const cb_matmul *job) { matmul(job, 4); }
