/* One row of a matrix as floats, from any format and layout: embeddings, one row for each token. */
#include "kernels/tile.h"

static float load_float(uint32_t format, const uint8_t *p) {
    float x;
    switch (format) {
    case CB_FORMAT_BF16:
        return cb_float_of_bits((uint32_t)cb_load_u16(p) << 16);
    case CB_FORMAT_F16:
        return cb_float_of_half(cb_load_u16(p));
    default:
        memcpy(&x, p, sizeof x);
        return x;
    }
}

static void decode_float(uint32_t format, uint32_t layout, const uint8_t *data, uint64_t cols, uint64_t row,
                         float *out) {
    const uint64_t size = format == CB_FORMAT_F32 ? 4 : 2;
    const bool tiled = layout == CB_LAYOUT_TILED16;
    const uint64_t first = tiled ? row / CB_LANES * CB_LANES * cols + row % CB_LANES : row * cols;
    for (uint64_t k = 0; k < cols; k++) {
        out[k] = load_float(format, data + (first + k * (tiled ? CB_LANES : 1)) * size);
    }
}

static void decode_quantised(uint32_t bits, uint32_t layout, const uint8_t *data, uint64_t cols, uint64_t row,
                             float *out) {
    const uint64_t blocks = (cols + CB_ACTIVATION_BLOCK - 1) / CB_ACTIVATION_BLOCK;
    const bool tiled = layout == CB_LAYOUT_TILED16X4;
    const uint64_t lanes = tiled ? CB_LANES : 1;
    const uint64_t lane = row % lanes;
    const uint64_t code_bytes = TILE_CODE_BYTES(bits) / CB_LANES * lanes;
    const uint64_t block_bytes = TILE_BLOCK_BYTES(bits) / CB_LANES * lanes;
    const uint8_t *block = data + row / lanes * blocks * block_bytes;
    for (uint64_t k = 0; k < cols; k++) {
        const uint64_t in_block = k % CB_ACTIVATION_BLOCK;
        const uint64_t step = in_block / 4;
        const uint8_t *at = block + k / CB_ACTIVATION_BLOCK * block_bytes;
        const float scale = cb_float_of_half(cb_load_u16(at + code_bytes + (in_block / TILE_GROUP * lanes + lane) * 2));
        int32_t code;
        if (bits == 8) {
            code = (int8_t)at[tiled ? step * 64 + lane * 4 + k % 4 : in_block];
        } else if (tiled) {
            code = (at[step / 2 * 64 + lane * 4 + k % 4] >> (step % 2 * 4) & 15) - 8;
        } else {
            code = (at[in_block / 2] >> (in_block % 2 * 4) & 15) - 8;
        }
        out[k] = (float)code * scale;
    }
}

void kernel_decode_row_scalar(uint32_t format, uint32_t layout, const uint8_t *data, uint64_t cols, uint64_t row,
                              float *out) {
    switch (format) {
    case CB_FORMAT_Q8_G32:
        decode_quantised(8, layout, data, cols, row, out);
        break;
    case CB_FORMAT_Q4_G32:
        decode_quantised(4, layout, data, cols, row, out);
        break;
    default:
        decode_float(format, layout, data, cols, row, out);
    }
}
