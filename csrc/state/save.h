/* A session's state as bytes that do not depend on its context.
 *
 *   u8[8] magic "CBSTATE\0", u32 version 1, u32 numeric contract version, u8[32] digest of the model file,
 *   u32 state format, u32 position, u64 size of all, u32 token ids [position],
 *   for each block of 64 positions: its bytes (state.h), places beyond the position zero,
 *   u32 CRC32C of everything before. */
#ifndef CB_SAVE_H
#define CB_SAVE_H

#include "state/state.h"

/* What of a session is saved. */
typedef struct cb_timeline {
    const uint8_t *digest; /* [32] */
    const cb_block_layout *layout;
    uint32_t format, vocabulary_size, context, position;
    cb_block **blocks;
    uint32_t *tokens; /* [context] */
} cb_timeline;

uint64_t cb_timeline_size(const cb_timeline *timeline);
/* `buffer` has cb_timeline_size bytes. */
void cb_timeline_save(const cb_timeline *timeline, uint8_t *buffer);
/* Sets position, tokens and blocks; changes nothing when it fails. BAD_STATE says what does not fit. */
colibri_status cb_timeline_restore(cb_timeline *timeline, const uint8_t *buffer, uint64_t size, cb_error *error);

#endif
