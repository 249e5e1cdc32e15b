#include <pthread.h>

#include "kernels/kernels.h"
#include "state/state.h"

static uint64_t element_bytes(uint32_t format) {
    return format == COLIBRI_STATE_F32 ? 4 : format == COLIBRI_STATE_F16 ? 2 : 1;
}

/* The dimensions are at most 65536, so that a state takes at most 2^42 bytes and 4096 of them cannot overflow.
 * Every part is a multiple of 64 bytes: a block has no padding. */
colibri_status cb_block_layout_make(const cb_program *program, uint32_t format, cb_block_layout *layout,
                                    cb_error *error) {
    uint64_t at = 0;
    layout->state_count = program->state_count;
    layout->states = cb_alloc(cb_multiply(program->state_count, sizeof *layout->states));
    if (layout->states == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for a session");
    for (uint32_t i = 0; i < program->state_count; i++) {
        const cb_state_info *info = &program->states[i];
        cb_state_layout *state = &layout->states[i];
        state->kv_heads = info->kv_heads;
        state->key_dim = info->key_dim;
        state->value_dim = info->value_dim;
        state->format = format;
        state->key_head_bytes = CB_KEY_BLOCK * element_bytes(format) * info->key_dim;
        state->value_head_bytes = CB_KEY_BLOCK * element_bytes(format) * info->value_dim;
        uint64_t scale_bytes = format == COLIBRI_STATE_Q8 ? CB_KEY_BLOCK * sizeof(float) * info->kv_heads : 0;
        state->keys = at;
        at += state->key_head_bytes * info->kv_heads;
        state->values = at;
        at += state->value_head_bytes * info->kv_heads;
        state->key_scales = at;
        at += scale_bytes;
        state->value_scales = at;
        at += scale_bytes;
    }
    layout->block_bytes = at;
    return COLIBRI_OK;
}

void cb_block_layout_free(cb_block_layout *layout) {
    cb_free(layout->states);
    layout->states = NULL;
}

struct cb_block_pool {
    pthread_mutex_t lock;
    cb_block *free; /* released blocks, of mixed sizes */
};

colibri_status cb_block_pool_open(cb_block_pool **pool, cb_error *error) {
    *pool = cb_alloc(sizeof **pool);
    if (*pool == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for a runtime");
    pthread_mutex_init(&(*pool)->lock, NULL);
    return COLIBRI_OK;
}

void cb_block_pool_trim(cb_block_pool *pool, uint64_t kept) {
    cb_block *block = NULL;
    pthread_mutex_lock(&pool->lock);
    for (cb_block **link = &pool->free; *link != NULL;) {
        cb_block *one = *link;
        if (one->bytes == kept) {
            link = &one->next_free;
            continue;
        }
        *link = one->next_free;
        one->next_free = block;
        block = one;
    }
    pthread_mutex_unlock(&pool->lock);
    while (block != NULL) {
        cb_block *next = block->next_free;
        cb_free(block->data);
        cb_free(block);
        block = next;
    }
}

void cb_block_pool_close(cb_block_pool *pool) {
    if (pool == NULL)
        return;
    cb_block_pool_trim(pool, UINT64_MAX);
    pthread_mutex_destroy(&pool->lock);
    cb_free(pool);
}

/* An engine's blocks have one size for each state format, so the first of the list nearly always fits. */
static cb_block *take_free(cb_block_pool *pool, uint64_t bytes) {
    pthread_mutex_lock(&pool->lock);
    cb_block **link = &pool->free;
    while (*link != NULL && (*link)->bytes != bytes)
        link = &(*link)->next_free;
    cb_block *block = *link;
    if (block != NULL)
        *link = block->next_free;
    pthread_mutex_unlock(&pool->lock);
    return block;
}

cb_block *cb_block_take(cb_block_pool *pool, uint64_t bytes) {
    cb_block *block = take_free(pool, bytes);
    if (block == NULL) {
        block = cb_alloc(sizeof *block);
        uint8_t *data = cb_alloc(bytes);
        if (block == NULL || data == NULL) {
            cb_free(block);
            cb_free(data);
            return NULL;
        }
        block->bytes = bytes;
        block->data = data;
    }
    block->next_free = NULL;
    atomic_store(&block->references, 1);
    return block;
}

void cb_block_retain(cb_block *block) { atomic_fetch_add(&block->references, 1); }

void cb_block_release(cb_block_pool *pool, cb_block *block) {
    if (atomic_fetch_sub(&block->references, 1) != 1)
        return;
    pthread_mutex_lock(&pool->lock);
    block->next_free = pool->free;
    pool->free = block;
    pthread_mutex_unlock(&pool->lock);
}
