/* Keys and values into a state block. Included after rows_tmpl.h. */

/* `lanes` elements, element j at place j * stride. */
VEC_INLINE void scatter(uint8_t *block, const uint64_t stride, const void *elements, const uint32_t size,
                        uint32_t lanes) {
    if (stride == 1 && lanes == VEC_LANES) {
        memcpy(block, elements, VEC_LANES * size);
        return;
    }
    for (uint32_t j = 0; j < lanes; j++) {
        memcpy(block + j * stride * size, (const uint8_t *)elements + j * size, size);
    }
}

/* Writes n values of x, element i at place i * stride of the block. */
VEC_INLINE bool put_row(const uint32_t format, uint8_t *block, const uint64_t stride, float *scale, const float *x,
                        uint32_t n) {
    const uint32_t bits = largest_magnitude(x, n);
    const uint32_t limit = format == COLIBRI_STATE_F16 ? 0x477ff000u : 0x7f800000u; /* 65520 rounds to infinity */
    const uint32_t size = (uint32_t)element_size(format);
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
        union {
            float f32[VEC_LANES];
            uint16_t f16[VEC_LANES];
            int8_t q8[VEC_LANES];
        } elements;
        if (format == COLIBRI_STATE_F32) {
            vec_store(elements.f32, part);
        } else if (format == COLIBRI_STATE_F16) {
            vec_store_f16(elements.f16, part);
        } else {
            vec_store_int8(elements.q8, vec_mul(part, inverse));
        }
        scatter(block + i * stride * size, stride, &elements, size, lanes_of(n - i));
    }
    return true;
}

VEC_INLINE bool put(uint32_t format, uint8_t *block, uint64_t slot_elements, const uint64_t stride, float *scale,
                    const float *x, uint32_t n) {
    uint8_t *place = block + slot_elements * element_size(format);
    switch (format) {
    case COLIBRI_STATE_F16:
        return put_row(COLIBRI_STATE_F16, place, stride, scale, x, n);
    case COLIBRI_STATE_Q8:
        return put_row(COLIBRI_STATE_Q8, place, stride, scale, x, n);
    default:
        return put_row(COLIBRI_STATE_F32, place, stride, scale, x, n);
    }
}

bool KERNEL(put_key)(uint32_t format, void *block, float *scales, uint32_t slot, const float *key, uint32_t key_dim) {
    float *scale = format == COLIBRI_STATE_Q8 ? scales + slot : NULL;
    return put(format, block, slot, CB_KEY_BLOCK, scale, key, key_dim);
}

bool KERNEL(put_value)(uint32_t format, void *block, float *scales, uint32_t slot, const float *value,
                       uint32_t value_dim) {
    float *scale = format == COLIBRI_STATE_Q8 ? scales + slot : NULL;
    return put(format, block, (uint64_t)slot * value_dim, 1, scale, value, value_dim);
}
