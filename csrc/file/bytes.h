/* Little-endian fields, and what the parts of the reader share. */
#ifndef CB_BYTES_H
#define CB_BYTES_H

#include "file/model.h"

/* No rule of the format bounds what a layer number means, but arrays are sized by it. */
#define CB_MAX_LAYERS 65536u

static inline uint16_t cb_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t cb_u32(const uint8_t *p) { return (uint32_t)cb_u16(p) | (uint32_t)cb_u16(p + 2) << 16; }
static inline uint64_t cb_u64(const uint8_t *p) { return (uint64_t)cb_u32(p) | (uint64_t)cb_u32(p + 4) << 32; }

/* offset + size <= limit, without overflow. */
static inline bool cb_fits(uint64_t offset, uint64_t size, uint64_t limit) {
    return size <= limit && offset <= limit - size;
}

typedef struct cb_range {
    uint64_t offset, size;
    uint32_t index; /* of the owner */
} cb_range;

/* The part of the file that a section holds; absent: size 0, found false. */
typedef struct cb_section {
    bool found;
    uint64_t offset, size;
} cb_section;

/* The path for messages: its end alone when it is so long that it would crowd out the rest. */
const char *cb_label(const cb_model *model);
/* True if all bytes are zero. */
bool cb_all_zero(const uint8_t *bytes, uint64_t size);
/* UTF-8 without control characters (a NUL would cut a name, a newline a message). */
bool cb_is_text(const uint8_t *bytes, uint64_t size);
/* Sorts by offset; true and the owners if two ranges share a byte. */
bool cb_find_overlap(cb_range *ranges, uint64_t count, uint32_t *a, uint32_t *b);

/* Each takes the bytes of one section and fills its part of the model. */
colibri_status cb_read_tensor_directory(cb_model *model, const uint8_t *bytes, uint64_t size, cb_section data,
                                        cb_error *error);
colibri_status cb_read_expert_directory(cb_model *model, const uint8_t *bytes, uint64_t size, cb_section data,
                                        uint32_t alignment, cb_error *error);
colibri_status cb_read_program(cb_model *model, const uint8_t *bytes, uint64_t size, cb_error *error);

#endif
