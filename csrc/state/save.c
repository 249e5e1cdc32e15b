#include "state/save.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/kernels.h"

#define VERSION 1
#define HEADER_BYTES 64

static const char magic[8] = "CBSTATE";

typedef struct header {
    char magic[8];
    uint32_t version, contract;
    uint8_t digest[32];
    uint32_t format, position;
    uint64_t size;
} header;
_Static_assert(sizeof(header) == HEADER_BYTES, "the header has no padding");

static uint64_t blocks_for(uint32_t position) { return ((uint64_t)position + CB_KEY_BLOCK - 1) / CB_KEY_BLOCK; }

static uint64_t size_for(const cb_timeline *timeline, uint32_t position) {
    return HEADER_BYTES + (uint64_t)position * sizeof(uint32_t) + blocks_for(position) * timeline->layout->block_bytes +
           sizeof(uint32_t);
}

uint64_t cb_timeline_size(const cb_timeline *timeline) { return size_for(timeline, timeline->position); }

/* Zeroes slots [used, 64): they may hold what was truncated, or another session's keys. */
static void clear_unused(const cb_block_layout *layout, uint8_t *block, uint32_t used) {
    for (uint32_t i = 0; i < layout->state_count; i++) {
        const cb_state_layout *state = &layout->states[i];
        uint64_t element = state->key_head_bytes / state->key_dim / CB_KEY_BLOCK;
        uint64_t key_rows = (uint64_t)state->kv_heads * state->key_dim;
        for (uint64_t row = 0; row < key_rows; row++)
            memset(block + state->keys + (row * CB_KEY_BLOCK + used) * element, 0, (CB_KEY_BLOCK - used) * element);
        uint64_t value_bytes = state->value_head_bytes / CB_KEY_BLOCK;
        for (uint32_t h = 0; h < state->kv_heads; h++) {
            memset(block + state->values + h * state->value_head_bytes + used * value_bytes, 0,
                   (CB_KEY_BLOCK - used) * value_bytes);
            if (state->format != COLIBRI_STATE_Q8)
                continue;
            uint64_t scale = ((uint64_t)h * CB_KEY_BLOCK + used) * sizeof(float);
            memset(block + state->key_scales + scale, 0, (CB_KEY_BLOCK - used) * sizeof(float));
            memset(block + state->value_scales + scale, 0, (CB_KEY_BLOCK - used) * sizeof(float));
        }
    }
}

void cb_timeline_save(const cb_timeline *timeline, uint8_t *buffer) {
    header head = {.version = VERSION,
                   .contract = COLIBRI_CONTRACT_VERSION,
                   .format = timeline->format,
                   .position = timeline->position,
                   .size = cb_timeline_size(timeline)};
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.digest, timeline->digest, sizeof head.digest);
    uint8_t *at = buffer;
    memcpy(at, &head, sizeof head);
    at += sizeof head;
    memcpy(at, timeline->tokens, (uint64_t)timeline->position * sizeof(uint32_t));
    at += (uint64_t)timeline->position * sizeof(uint32_t);
    for (uint64_t i = 0; i < blocks_for(timeline->position); i++) {
        memcpy(at, timeline->blocks[i]->data, timeline->layout->block_bytes);
        uint64_t used = timeline->position - i * CB_KEY_BLOCK;
        if (used < CB_KEY_BLOCK)
            clear_unused(timeline->layout, at, (uint32_t)used);
        at += timeline->layout->block_bytes;
    }
    uint32_t crc = cb_crc32c(0, buffer, (uint64_t)(at - buffer));
    memcpy(at, &crc, sizeof crc);
}

static colibri_status check_header(const cb_timeline *timeline, const header *head, uint64_t size, cb_error *error) {
    if (memcmp(head->magic, magic, sizeof magic) != 0)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has no magic 'CBSTATE'");
    if (head->version != VERSION)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has version %u, this build reads version %u",
                       head->version, VERSION);
    if (head->size != size)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has %" PRIu64 " bytes, its header says %" PRIu64,
                       size, head->size);
    if (head->contract != COLIBRI_CONTRACT_VERSION)
        return cb_fail(error, COLIBRI_BAD_STATE,
                       "the saved state was computed with numeric contract version %u, this build has version %u",
                       head->contract, COLIBRI_CONTRACT_VERSION);
    if (memcmp(head->digest, timeline->digest, sizeof head->digest) != 0)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state belongs to another model file (its digest differs)");
    if (head->format != timeline->format)
        return cb_fail(error, COLIBRI_BAD_STATE,
                       "the saved state has state format %u, the session has %u (1 = f32, 2 = f16, 3 = q8)",
                       head->format, timeline->format);
    if (head->position > timeline->context)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has %u positions, the session's context is %u",
                       head->position, timeline->context);
    if (size_for(timeline, head->position) != size)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has %" PRIu64 " bytes, %u positions need %" PRIu64,
                       size, head->position, size_for(timeline, head->position));
    return COLIBRI_OK;
}

colibri_status cb_timeline_restore(cb_timeline *timeline, const uint8_t *buffer, uint64_t size, cb_error *error) {
    header head;
    uint32_t crc;
    if (size < HEADER_BYTES + sizeof crc)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has %" PRIu64 " bytes, it is cut off", size);
    memcpy(&head, buffer, sizeof head);
    if (check_header(timeline, &head, size, error) != COLIBRI_OK)
        return error->status;
    memcpy(&crc, buffer + size - sizeof crc, sizeof crc);
    if (cb_crc32c(0, buffer, size - sizeof crc) != crc)
        return cb_fail(error, COLIBRI_BAD_STATE, "the saved state is damaged (its checksum differs)");
    const uint8_t *tokens = buffer + HEADER_BYTES;
    for (uint32_t i = 0; i < head.position; i++) {
        uint32_t token;
        memcpy(&token, tokens + (uint64_t)i * sizeof token, sizeof token);
        if (token >= timeline->vocabulary_size)
            return cb_fail(error, COLIBRI_BAD_STATE, "the saved state has token id %u, the vocabulary has %u", token,
                           timeline->vocabulary_size);
    }
    memcpy(timeline->tokens, tokens, (uint64_t)head.position * sizeof(uint32_t));
    const uint8_t *at = tokens + (uint64_t)head.position * sizeof(uint32_t);
    for (uint64_t i = 0; i < blocks_for(head.position); i++, at += timeline->layout->block_bytes)
        memcpy(timeline->blocks[i]->data, at, timeline->layout->block_bytes);
    timeline->position = head.position;
    return COLIBRI_OK;
}
