/* A parsed and checked model file. cb_model_load fills it, then nothing changes it. */
#ifndef CB_MODEL_H
#define CB_MODEL_H

#include "core/core.h"
#include "file/formats_generated.h"
#include "vm/ops_generated.h"

typedef struct cb_tensor {
    char name[256];
    uint32_t format; /* CB_FORMAT_* */
    uint32_t layout; /* CB_LAYOUT_* */
    uint64_t rows, cols;
    uint64_t offset, size; /* in the file */
    uint32_t crc32c;
    const uint8_t *data; /* resident copy, 64-byte aligned; NULL before loading */
} cb_tensor;

typedef struct cb_expert {
    uint64_t offset, size; /* record in the file */
    uint32_t crc32c;
    uint32_t format[3]; /* gate, up, down */
    uint64_t part[3];   /* offsets inside the record */
    uint8_t sha256[32];
} cb_expert;

typedef struct cb_expert_set {
    uint32_t count, width, ffn, layer;
    cb_expert *experts;
} cb_expert_set;

typedef struct cb_value {
    uint32_t kind, width, extent; /* CB_VALUE_* */
    char name[21];
} cb_value;

typedef struct cb_state_info {
    uint32_t kind, kv_heads, key_dim, value_dim, layer;
} cb_state_info;

typedef struct cb_program {
    uint32_t vocabulary_size, context_limit, default_state_format;
    uint32_t value_count, state_count, op_count, first_op; /* of entry "main" */
    uint32_t logits;                                       /* value */
    uint32_t layer_count;                                  /* highest layer of an op + 1 */
    cb_value *values;
    cb_state_info *states;
    cb_op *ops; /* all ops of entry "main": ops[0..op_count) */
} cb_program;

typedef struct cb_model {
    int fd;
    char *path;
    uint64_t file_size;
    uint8_t digest[32];
    uint32_t tensor_count, set_count;
    cb_tensor *tensors;
    cb_expert_set *sets;
    cb_program program;
} cb_model;

/* Bytes that a matrix takes; 0 if format and layout do not fit together or it overflows. */
uint64_t cb_packed_size(uint32_t format, uint32_t layout, uint64_t rows, uint64_t cols);

/* Opens and checks everything but the weight bytes. Errors name the file and the field. */
colibri_status cb_model_open(const char *path, cb_model **model, cb_error *error);
void cb_model_close(cb_model *model);
/* Reads [offset, offset+size) with EINTR and short-count retries; errors name file, offset, wanted, got. */
colibri_status cb_model_read(const cb_model *model, uint64_t offset, void *buffer, uint64_t size, cb_error *error);
/* Reads until `size` bytes are there; fewer: *cause is errno, or 0 when the file ends. */
uint64_t cb_read_at(int fd, uint64_t offset, void *buffer, uint64_t size, int *cause);
/* IO, "<what>: reading .. bytes at offset .. gave only ..: <cause>"; what begins with the file. */
colibri_status cb_fail_read(cb_error *error, const char *what, uint64_t offset, uint64_t size, uint64_t got, int cause);
/* Semantic checks of the program against the op table, the tensors and sets (validate.c). */
colibri_status cb_validate_program(const cb_model *model, cb_error *error);

#endif
