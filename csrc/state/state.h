/* Attention state: reference-counted blocks of 64 positions, shared by a runtime's sessions. */
#ifndef CB_STATE_H
#define CB_STATE_H

#include "core/core.h"
#include "file/model.h"

/* Where the parts of one state lie inside a block (bytes from its start). */
typedef struct cb_state_layout {
    uint32_t kv_heads, key_dim, value_dim, format; /* COLIBRI_STATE_* */
    uint64_t keys, values;                         /* head h: keys + h * key_head_bytes */
    uint64_t key_head_bytes, value_head_bytes;
    uint64_t key_scales, value_scales; /* q8: float [kv_heads][64] each */
} cb_state_layout;

typedef struct cb_block_layout {
    uint32_t state_count;
    cb_state_layout *states;
    uint64_t block_bytes;
} cb_block_layout;

colibri_status cb_block_layout_make(const cb_program *program, uint32_t format, cb_block_layout *layout,
                                    cb_error *error);
void cb_block_layout_free(cb_block_layout *layout);

/* Blocks of any size, kept for reuse by size; thread-safe. */
typedef struct cb_block_pool cb_block_pool;
typedef struct cb_block {
    atomic_uint references;
    uint64_t bytes;
    struct cb_block *next_free;
    uint8_t *data; /* 64-byte aligned */
} cb_block;

colibri_status cb_block_pool_open(cb_block_pool **pool, cb_error *error);
void cb_block_pool_close(cb_block_pool *pool);                /* every block must have been released */
cb_block *cb_block_take(cb_block_pool *pool, uint64_t bytes); /* one reference; NULL: out of memory */
void cb_block_retain(cb_block *block);
void cb_block_release(cb_block_pool *pool, cb_block *block);
/* Gives released blocks back to the system, but those of `kept` bytes (UINT64_MAX: all go). */
void cb_block_pool_trim(cb_block_pool *pool, uint64_t kept);

#endif
