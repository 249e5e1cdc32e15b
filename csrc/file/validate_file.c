#include <inttypes.h>
#include <stdio.h>

#include "file/bytes.h"
#include "file/load.h"

static colibri_status check_data(const cb_model *model, uint8_t *buffer, cb_error *error) {
    char what[280];
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        const cb_tensor *tensor = &model->tensors[i];
        snprintf(what, sizeof what, "tensor '%s'", tensor->name);
        if (cb_load_checked(model, tensor->offset, tensor->size, tensor->crc32c, NULL, buffer, what, error) !=
            COLIBRI_OK)
            return error->status;
    }
    for (uint32_t s = 0; s < model->set_count; s++) {
        for (uint32_t i = 0; i < model->sets[s].count; i++) {
            const cb_expert *expert = &model->sets[s].experts[i];
            snprintf(what, sizeof what, "expert %u of layer %u", i, model->sets[s].layer);
            if (cb_load_checked(model, expert->offset, expert->size, expert->crc32c, NULL, buffer, what, error) !=
                COLIBRI_OK)
                return error->status;
        }
    }
    return COLIBRI_OK;
}

colibri_status colibri_validate(const char *path, char *message, size_t message_size) {
    cb_error error = {0};
    cb_model *model = NULL;
    if (path == NULL)
        cb_fail(&error, COLIBRI_INVALID, "path is NULL, give the path of a .cbi file");
    else
        cb_model_open(path, &model, &error);
    if (model != NULL) {
        uint8_t *buffer = cb_alloc(cb_piece_size(model));
        if (buffer == NULL)
            cb_fail(&error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory to read it", cb_label(model));
        else
            check_data(model, buffer, &error);
        cb_free(buffer);
        cb_model_close(model);
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}
