/* Keys and values in and out of a state block. Included after rows_tmpl.h. */

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

static uint64_t element_size(uint32_t format) {
    return format == COLIBRI_STATE_F32 ? 4 : format == COLIBRI_STATE_F16 ? 2 : 1;
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

/* VEC_LANES elements from element `index` on, not yet scaled. */
VEC_INLINE vec load_elements(uint32_t format, const void *block, uint64_t index) {
    switch (format) {
    case COLIBRI_STATE_F32:
        return vec_load((const float *)block + index);
    case COLIBRI_STATE_F16:
        return vec_load_f16((const uint16_t *)block + index);
    default:
        return vec_load_int8((const int8_t *)block + index);
    }
}

/* Whole vectors of keys are widened: lanes from `keys` on hold whatever the block holds there. */
void KERNEL(get_keys)(uint32_t format, const void *block, const float *scales, uint32_t keys, float *tile,
                      uint32_t key_dim) {
    for (uint32_t slot = 0; slot < keys; slot += VEC_LANES) {
        const vec scale = format == COLIBRI_STATE_Q8 ? vec_load(scales + slot) : vec_set(1.0f);
        for (uint64_t d = 0; d < key_dim; d++) {
            const vec part = load_elements(format, block, d * CB_KEY_BLOCK + slot);
            vec_store(tile + d * CB_KEY_BLOCK + slot, format == COLIBRI_STATE_Q8 ? vec_mul(part, scale) : part);
        }
    }
}

void KERNEL(get_values)(uint32_t format, const void *block, const float *scales, uint32_t keys, float *tile,
                        uint32_t value_dim) {
    const uint64_t size = element_size(format);
    for (uint64_t key = 0; key < keys; key++) {
        const vec scale = vec_set(format == COLIBRI_STATE_Q8 ? scales[key] : 1.0f);
        for (uint32_t d = 0; d < value_dim; d += VEC_LANES) {
            const uint32_t lanes = lanes_of(value_dim - d);
            const uint64_t index = key * value_dim + d;
            float rest[VEC_LANES] = {0}; /* room for a tail in any format: the block ends with its last value */
            vec part;
            if (lanes < VEC_LANES) {
                memcpy(rest, (const uint8_t *)block + index * size, lanes * size);
                part = load_elements(format, rest, 0);
            } else {
                part = load_elements(format, block, index);
            }
            part = format == COLIBRI_STATE_Q8 ? vec_mul(part, scale) : part;
            store_lanes(tile + index, part, lanes);
        }
    }
}
