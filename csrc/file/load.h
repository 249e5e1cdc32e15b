/* Reads weights and checks them while they are in the cache. */
#ifndef CB_LOAD_H
#define CB_LOAD_H

#include "file/model.h"

/* Reads [offset, offset + size) and checks its CRC32C. `memory` gets the bytes, or is NULL: then they
 * pass through `buffer` of cb_piece_size(model) bytes. A wrong checksum is BAD_FILE, "<file>: <what> is damaged". */
colibri_status cb_load_checked(const cb_model *model, uint64_t offset, uint64_t size, uint32_t crc32c, uint8_t *memory,
                               uint8_t *buffer, const char *what, cb_error *error);
uint64_t cb_piece_size(const cb_model *model);
/* Reads all tensors into one block, sets their data; `bytes` gets its size. cb_model_close frees it. */
colibri_status cb_model_load_tensors(cb_model *model, uint64_t *bytes, cb_error *error);

#endif
