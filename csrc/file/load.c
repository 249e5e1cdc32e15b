#include "file/load.h"

#include <inttypes.h>
#include <stdio.h>

#include "file/bytes.h"

#define PIECE (UINT64_C(1) << 20)

uint64_t cb_piece_size(const cb_model *model) { return model->file_size < PIECE ? model->file_size : PIECE; }

colibri_status cb_load_checked(const cb_model *model, uint64_t offset, uint64_t size, uint32_t crc32c, uint8_t *memory,
                               uint8_t *buffer, const char *what, cb_error *error) {
    uint32_t crc = 0;
    for (uint64_t done = 0; done < size;) {
        uint64_t piece = size - done < PIECE ? size - done : PIECE;
        uint8_t *to = memory != NULL ? memory + done : buffer;
        if (cb_model_read(model, offset + done, to, piece, error) != COLIBRI_OK)
            return error->status;
        crc = cb_crc32c(crc, to, piece);
        done += piece;
    }
    if (crc != crc32c)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: %s is damaged (the checksum of %" PRIu64 " bytes at offset %" PRIu64 " differs)",
                       cb_label(model), what, size, offset);
    return COLIBRI_OK;
}

colibri_status cb_model_load_tensors(cb_model *model, uint64_t *bytes, cb_error *error) {
    /* Tensors do not overlap and begin at multiples of 64: the sum is below the file's size + 64. */
    uint64_t total = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++)
        total += cb_round_up(model->tensors[i].size, CB_CACHE_LINE);
    *bytes = total;
    uint8_t *block = cb_alloc(total);
    if (block == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for %" PRIu64 " bytes of tensors",
                       cb_label(model), total);
    uint64_t at = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const cb_tensor *tensor = &model->tensors[i];
        char what[280];
        snprintf(what, sizeof what, "tensor '%s'", tensor->name);
        if (cb_load_checked(model, tensor->offset, tensor->size, tensor->crc32c, block + at, NULL, what, error) !=
            COLIBRI_OK) {
            cb_free(block);
            return error->status;
        }
        at += cb_round_up(tensor->size, CB_CACHE_LINE);
    }
    at = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        model->tensors[i].data = block + at;
        at += cb_round_up(model->tensors[i].size, CB_CACHE_LINE);
    }
    return COLIBRI_OK;
}
