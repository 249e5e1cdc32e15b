/* Keys and values into a state block. Included after rows_tmpl.h. */

/* Writes n values of x, element i at place i * stride of the block. */
static bool put_row(uint32_t format, void *block, uint64_t stride, float *scale, const float *x, uint32_t n) {
    const uint32_t bits = largest_magnitude(x, n);
    const uint32_t limit = format == COLIBRI_STATE_F16 ? 0x477ff000u : 0x7f800000u; /* 65520 rounds to infinity */
    vec inverse = vec_set(0.0f);
    if (bits >= limit) {
        return false;
    }
    if (format == COLIBRI_STATE_Q8) { /* as activations are quantised, the row being one block */
        const float largest = cb_float_of_bits(bits);
        const bool zero = bits < (127u - 100u) << 23;
        *scale = zero ? 0.0f : largest / 127.0f;
        inverse = vec_set(zero ? 0.0f : 127.0f / largest);
    }
    for (uint32_t i = 0; i < n; i += VEC_LANES) {
        const vec part = load_lanes(x + i, n - i);
        const uint32_t lanes = lanes_of(n - i);
        if (format == COLIBRI_STATE_F32) {
            for (uint32_t j = 0; j < lanes; j++) {
                ((float *)block)[(i + j) * stride] = x[i + j];
            }
        } else if (format == COLIBRI_STATE_F16) {
            uint16_t halves[VEC_LANES];
            vec_store_f16(halves, part);
            for (uint32_t j = 0; j < lanes; j++) {
                ((uint16_t *)block)[(i + j) * stride] = halves[j];
            }
        } else {
            int8_t codes[VEC_LANES];
            vec_store_int8(codes, vec_mul(part, inverse));
            for (uint32_t j = 0; j < lanes; j++) {
                ((int8_t *)block)[(i + j) * stride] = codes[j];
            }
        }
    }
    return true;
}

bool KERNEL(put_key)(uint32_t format, void *block, float *scales, uint32_t slot, const float *key, uint32_t key_dim) {
    uint8_t *place = (uint8_t *)block + slot * element_size(format);
    return put_row(format, place, CB_KEY_BLOCK, format == COLIBRI_STATE_Q8 ? scales + slot : NULL, key, key_dim);
}

bool KERNEL(put_value)(uint32_t format, void *block, float *scales, uint32_t slot, const float *value,
                       uint32_t value_dim) {
    uint8_t *place = (uint8_t *)block + slot * (uint64_t)value_dim * element_size(format);
    return put_row(format, place, 1, format == COLIBRI_STATE_Q8 ? scales + slot : NULL, value, value_dim);
}
