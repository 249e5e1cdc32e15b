/* The tensor and the expert directory. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file/bytes.h"

#define TENSOR_ENTRY 96
#define MAX_TENSORS 1000000u
#define MAX_DIMENSION (UINT64_C(1) << 31)
#define SET_HEAD 32
#define EXPERT_ENTRY 160
#define MAX_SETS 65536u
#define MAX_EXPERTS 65536u

static colibri_status no_memory(const cb_model *model, cb_error *error) {
    return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for its directories", cb_label(model));
}

static const char *format_name(uint32_t format) {
    return format < CB_FORMAT_LIMIT && cb_format_table[format].name != NULL ? cb_format_table[format].name : NULL;
}

/* ---- tensors ---- */

static colibri_status read_tensor(const cb_model *model, const uint8_t *entry, uint32_t index, const uint8_t *names,
                                  uint32_t name_bytes, cb_section data, cb_tensor *tensor, cb_error *error) {
    const char *label = cb_label(model);
    uint32_t name_offset = cb_u32(entry), length = cb_u32(entry + 4);
    if (length < 1 || length > 255)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor %u: name length is %u, not 1 to 255", label, index, length);
    if (!cb_fits(name_offset, length, name_bytes))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor %u: its name ends outside the %u bytes of names", label,
                       index, name_bytes);
    if (!cb_is_text(names + name_offset, length))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor %u: its name is not UTF-8 text", label, index);
    memcpy(tensor->name, names + name_offset, length);
    const char *name = tensor->name;

    tensor->format = cb_u16(entry + 8);
    tensor->layout = cb_u16(entry + 10);
    tensor->rows = cb_u64(entry + 16);
    tensor->cols = cb_u64(entry + 24);
    tensor->offset = cb_u64(entry + 32);
    tensor->size = cb_u64(entry + 40);
    tensor->crc32c = cb_u32(entry + 48);
    const char *format = format_name(tensor->format);
    if (format == NULL)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: tensor '%s': format %u is not known to this build", label, name,
                       tensor->format);
    if (tensor->layout < CB_LAYOUT_ROWS || tensor->layout > CB_LAYOUT_TILED16X4)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: tensor '%s': layout %u is not known to this build", label, name,
                       tensor->layout);
    if (cb_u32(entry + 12) != 0 || cb_u32(entry + 52) != 0 || !cb_all_zero(entry + 88, 8))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': a reserved field is not zero", label, name);
    if (tensor->rows < 1 || tensor->rows > MAX_DIMENSION)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': rows is %" PRIu64 ", not 1 to 2^31", label, name,
                       tensor->rows);
    if (tensor->cols < 1 || tensor->cols > MAX_DIMENSION)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': columns is %" PRIu64 ", not 1 to 2^31", label, name,
                       tensor->cols);
    uint32_t wrong_layout = cb_format_table[tensor->format].group == 0 ? CB_LAYOUT_TILED16X4 : CB_LAYOUT_TILED16;
    if (tensor->layout == wrong_layout)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': layout %u does not go with format %s", label, name,
                       tensor->layout, format);
    uint64_t needed = cb_packed_size(tensor->format, tensor->layout, tensor->rows, tensor->cols);
    if (needed == 0)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: tensor '%s': %" PRIu64 " rows of %" PRIu64 " columns are too large", label, name,
                       tensor->rows, tensor->cols);
    if (tensor->size != needed)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: tensor '%s': size %" PRIu64 " is not the %" PRIu64 " that format %s needs", label, name,
                       tensor->size, needed, format);
    if (tensor->offset % 64 != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': offset %" PRIu64 " is not a multiple of 64", label,
                       name, tensor->offset);
    if (!data.found || tensor->offset < data.offset || !cb_fits(tensor->offset - data.offset, tensor->size, data.size))
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: tensor '%s': %" PRIu64 " bytes at offset %" PRIu64 " do not lie in a tensor data section",
                       label, name, tensor->size, tensor->offset);
    return COLIBRI_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const cb_tensor *const *)a)->name, (*(const cb_tensor *const *)b)->name);
}

/* Shared bytes or names would silently make one weight stand for two. */
static colibri_status check_tensors_distinct(const cb_model *model, cb_error *error) {
    uint32_t n = model->tensor_count, a, b;
    const cb_tensor **order = cb_alloc(cb_multiply(n, sizeof *order));
    cb_range *ranges = cb_alloc(cb_multiply(n, sizeof *ranges));
    colibri_status status = COLIBRI_OK;
    if (order == NULL || ranges == NULL) {
        status = no_memory(model, error);
        goto end;
    }
    for (uint32_t i = 0; i < n; i++) {
        order[i] = &model->tensors[i];
        ranges[i] = (cb_range){model->tensors[i].offset, model->tensors[i].size, i};
    }
    qsort(order, n, sizeof *order, by_name);
    for (uint32_t i = 1; i < n && status == COLIBRI_OK; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            status = cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor '%s': two tensors have this name", cb_label(model),
                             order[i]->name);
    if (status == COLIBRI_OK && cb_find_overlap(ranges, n, &a, &b))
        status = cb_fail(error, COLIBRI_BAD_FILE, "%s: tensors '%.80s' and '%.80s' overlap", cb_label(model),
                         model->tensors[a].name, model->tensors[b].name);
end:
    cb_free(order);
    cb_free(ranges);
    return status;
}

colibri_status cb_read_tensor_directory(cb_model *model, const uint8_t *bytes, uint64_t size, cb_section data,
                                        cb_error *error) {
    const char *label = cb_label(model);
    if (size < 8)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor directory: has %" PRIu64 " bytes, at least 8 are needed",
                       label, size);
    uint32_t count = cb_u32(bytes), name_bytes = cb_u32(bytes + 4);
    if (count > MAX_TENSORS)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: tensor directory: tensor count is %u, at most %u are allowed",
                       label, count, MAX_TENSORS);
    uint64_t needed = 8 + (uint64_t)count * TENSOR_ENTRY + name_bytes;
    if (size != needed)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: tensor directory: has %" PRIu64 " bytes, %u tensors and %u bytes of names need %" PRIu64,
                       label, size, count, name_bytes, needed);
    if (count == 0)
        return COLIBRI_OK;
    model->tensors = cb_alloc(cb_multiply(count, sizeof *model->tensors));
    if (model->tensors == NULL)
        return no_memory(model, error);
    model->tensor_count = count;
    const uint8_t *names = bytes + 8 + (uint64_t)count * TENSOR_ENTRY;
    for (uint32_t i = 0; i < count; i++)
        if (read_tensor(model, bytes + 8 + (uint64_t)i * TENSOR_ENTRY, i, names, name_bytes, data, &model->tensors[i],
                        error) != COLIBRI_OK)
            return error->status;
    return check_tensors_distinct(model, error);
}

/* ---- experts ---- */

static colibri_status read_expert(const cb_model *model, const uint8_t *entry, uint32_t set_index, uint32_t index,
                                  cb_section data, uint32_t alignment, const cb_expert_set *set, cb_expert *expert,
                                  cb_error *error) {
    static const char *const part_names[3] = {"gate", "up", "down"};
    char label[300];
    snprintf(label, sizeof label, "%s: expert %u of set %u", cb_label(model), index, set_index);
    expert->offset = cb_u64(entry);
    expert->size = cb_u64(entry + 8);
    expert->crc32c = cb_u32(entry + 28);
    memcpy(expert->sha256, entry + 96, sizeof expert->sha256);
    if (cb_u32(entry + 24) != 0)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: codec %u is not known to this build", label,
                       cb_u32(entry + 24));
    if (cb_u64(entry + 16) != expert->size)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: plain bytes %" PRIu64 " are not the stored bytes %" PRIu64 ", as codec 0 demands", label,
                       cb_u64(entry + 16), expert->size);
    if (!cb_all_zero(entry + 64, 28))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: nonce or tag is not zero, as codec 0 demands", label);
    if (cb_u16(entry + 38) != 0 || cb_u32(entry + 92) != 0 || !cb_all_zero(entry + 128, 32))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: a reserved field is not zero", label);
    if (expert->offset % alignment != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: offset %" PRIu64 " is not a multiple of the alignment %u", label,
                       expert->offset, alignment);
    if (!data.found || expert->offset < data.offset || !cb_fits(expert->offset - data.offset, expert->size, data.size))
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: %" PRIu64 " bytes at offset %" PRIu64 " do not lie in an expert data section", label,
                       expert->size, expert->offset);
    cb_range parts[3];
    for (uint32_t i = 0; i < 3; i++) {
        expert->format[i] = cb_u16(entry + 32 + 2 * i);
        expert->part[i] = cb_u64(entry + 40 + 8 * i);
        const char *format = format_name(expert->format[i]);
        if (format == NULL)
            return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: format %u of %s is not known to this build", label,
                           expert->format[i], part_names[i]);
        uint32_t layout = cb_format_table[expert->format[i]].group == 0 ? CB_LAYOUT_TILED16 : CB_LAYOUT_TILED16X4;
        uint64_t needed = i < 2 ? cb_packed_size(expert->format[i], layout, set->ffn, set->width)
                                : cb_packed_size(expert->format[i], layout, set->width, set->ffn);
        if (expert->part[i] % 64 != 0)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: offset %" PRIu64 " of %s is not a multiple of 64", label,
                           expert->part[i], part_names[i]);
        if (needed == 0 || !cb_fits(expert->part[i], needed, expert->size))
            return cb_fail(error, COLIBRI_BAD_FILE,
                           "%s: %s (%" PRIu64 " bytes of format %s at %" PRIu64
                           ") does not end inside the record of %" PRIu64,
                           label, part_names[i], needed, format, expert->part[i], expert->size);
        parts[i] = (cb_range){expert->part[i], needed, i};
    }
    uint32_t a, b;
    if (cb_find_overlap(parts, 3, &a, &b))
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: %s and %s overlap", label, part_names[a], part_names[b]);
    return COLIBRI_OK;
}

static colibri_status check_records_distinct(const cb_model *model, uint32_t total, cb_error *error) {
    cb_range *ranges = cb_alloc(cb_multiply(total, sizeof *ranges));
    if (ranges == NULL)
        return no_memory(model, error);
    uint32_t n = 0, a, b;
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++, n++)
            ranges[n] = (cb_range){model->sets[s].experts[i].offset, model->sets[s].experts[i].size, n};
    bool overlap = cb_find_overlap(ranges, n, &a, &b);
    cb_free(ranges);
    if (!overlap)
        return COLIBRI_OK;
    uint32_t set[2] = {0, 0}, expert[2] = {a, b};
    for (int i = 0; i < 2; i++)
        for (; expert[i] >= model->sets[set[i]].count; set[i]++)
            expert[i] -= model->sets[set[i]].count;
    return cb_fail(error, COLIBRI_BAD_FILE, "%s: the records of expert %u of set %u and expert %u of set %u overlap",
                   cb_label(model), expert[0], set[0], expert[1], set[1]);
}

colibri_status cb_read_expert_directory(cb_model *model, const uint8_t *bytes, uint64_t size, cb_section data,
                                        uint32_t alignment, cb_error *error) {
    const char *label = cb_label(model);
    if (size < 8)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert directory: has %" PRIu64 " bytes, at least 8 are needed",
                       label, size);
    uint32_t set_count = cb_u32(bytes);
    if (set_count > MAX_SETS)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert directory: set count is %u, at most %u are allowed", label,
                       set_count, MAX_SETS);
    if (cb_u32(bytes + 4) != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert directory: the reserved field is not zero", label);
    uint64_t heads = 8 + (uint64_t)set_count * SET_HEAD;
    if (size < heads)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: expert directory: has %" PRIu64 " bytes, the heads of %u sets alone need %" PRIu64, label,
                       size, set_count, heads);
    uint64_t room = (size - heads) / EXPERT_ENTRY;
    if (set_count > 0) {
        model->sets = cb_alloc(cb_multiply(set_count, sizeof *model->sets));
        cb_expert *experts = cb_alloc(cb_multiply(room, sizeof *experts));
        if (model->sets == NULL || experts == NULL) {
            cb_free(experts);
            return no_memory(model, error);
        }
        model->sets[0].experts = experts;
    }
    model->set_count = set_count;
    const uint8_t *p = bytes + 8;
    uint64_t used = 0;
    for (uint32_t s = 0; s < set_count; s++) {
        cb_expert_set *set = &model->sets[s];
        set->count = cb_u32(p);
        set->width = cb_u32(p + 4);
        set->ffn = cb_u32(p + 8);
        set->layer = cb_u32(p + 12);
        if (set->count < 1 || set->count > MAX_EXPERTS)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert set %u: expert count is %u, not 1 to %u", label, s,
                           set->count, MAX_EXPERTS);
        if (set->count > room - used)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert set %u: the directory ends before its %u experts",
                           label, s, set->count);
        if (set->width < 1 || set->ffn < 1)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert set %u: width %u and ffn %u must be at least 1", label,
                           s, set->width, set->ffn);
        if (set->layer >= CB_MAX_LAYERS)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert set %u: layer %u is not below %u", label, s, set->layer,
                           CB_MAX_LAYERS);
        if (!cb_all_zero(p + 16, 16))
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert set %u: a reserved field is not zero", label, s);
        p += SET_HEAD;
        set->experts = model->sets[0].experts + used;
        for (uint32_t i = 0; i < set->count; i++, p += EXPERT_ENTRY)
            if (read_expert(model, p, s, i, data, alignment, set, &set->experts[i], error) != COLIBRI_OK)
                return error->status;
        used += set->count;
    }
    if ((uint64_t)(p - bytes) != size)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: expert directory: %" PRIu64 " bytes are left behind its last set",
                       label, size - (uint64_t)(p - bytes));
    return check_records_distinct(model, (uint32_t)used, error);
}
