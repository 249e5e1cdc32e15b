#include "file/bytes.h"

#include <stdlib.h>
#include <string.h>

#define LONGEST_LABEL 200

const char *cb_label(const cb_model *model) {
    size_t length = strlen(model->path);
    return length <= LONGEST_LABEL ? model->path : model->path + length - LONGEST_LABEL;
}

bool cb_all_zero(const uint8_t *bytes, uint64_t size) {
    uint8_t any = 0;
    for (uint64_t i = 0; i < size; i++)
        any |= bytes[i];
    return any == 0;
}

bool cb_is_text(const uint8_t *p, uint64_t size) {
    const uint8_t *end = p + size;
    while (p < end) {
        uint32_t lead = *p++;
        if (lead < 0x80) {
            if (lead < 0x20 || lead == 0x7f)
                return false;
            continue;
        }
        int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4 || end - p < more)
            return false;
        uint32_t code = lead & (0x3fu >> more);
        for (int i = 0; i < more; i++, p++) {
            if ((*p & 0xc0) != 0x80)
                return false;
            code = code << 6 | (*p & 0x3fu);
        }
        static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
        if (code < least[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
            return false;
    }
    return true;
}

static int by_offset(const void *a, const void *b) {
    const cb_range *x = a, *y = b;
    return x->offset < y->offset ? -1 : x->offset > y->offset ? 1 : x->size < y->size ? -1 : x->size > y->size;
}

bool cb_find_overlap(cb_range *ranges, uint64_t count, uint32_t *a, uint32_t *b) {
    qsort(ranges, count, sizeof *ranges, by_offset);
    for (uint64_t i = 1; i < count; i++) {
        if (ranges[i - 1].offset + ranges[i - 1].size > ranges[i].offset) {
            *a = ranges[i - 1].index;
            *b = ranges[i].index;
            return true;
        }
    }
    return false;
}

uint64_t cb_packed_size(uint32_t format, uint32_t layout, uint64_t rows, uint64_t cols) {
    const uint64_t most = UINT64_C(1) << 31;
    if (format >= CB_FORMAT_LIMIT || cb_format_table[format].name == NULL || rows == 0 || cols == 0 || rows > most ||
        cols > most)
        return 0;
    const cb_format_info *info = &cb_format_table[format];
    uint64_t tiles = cb_round_up(rows, 16) / 16;
    if (info->group == 0) {
        /* 2^31 rows of 2^31 values of 4 bytes are 2^64: the one product that can overflow. */
        uint64_t width = cb_multiply(cols, info->bits / 8);
        uint64_t stored = layout == CB_LAYOUT_ROWS ? rows : layout == CB_LAYOUT_TILED16 ? tiles * 16 : 0;
        uint64_t size = cb_multiply(stored, width);
        return size == UINT64_MAX ? 0 : size;
    }
    uint64_t blocks = cb_round_up(cols, CB_ACTIVATION_BLOCK) / CB_ACTIVATION_BLOCK;
    uint64_t groups = CB_ACTIVATION_BLOCK / info->group;
    uint64_t row_block = CB_ACTIVATION_BLOCK * info->bits / 8 + groups * 2;
    uint64_t size = 0;
    if (layout == CB_LAYOUT_ROWS)
        size = cb_multiply(rows, blocks * row_block);
    else if (layout == CB_LAYOUT_TILED16X4)
        size = cb_multiply(tiles, blocks * 16 * row_block);
    return size == UINT64_MAX ? 0 : size;
}
