#include "runtime/runtime.h"

#include <inttypes.h>

#define MAX_CONTEXT (1u << 24)

colibri_status cb_session_hold(colibri_session *session, const void *holder, cb_error *error) {
    const void *expected = NULL;
    if (session == NULL)
        return cb_fail(error, COLIBRI_INVALID, "session is NULL");
    if (cb_forked(session->engine->runtime))
        return cb_fail_forked(error);
    if (!atomic_compare_exchange_strong(&session->holder, &expected, holder))
        return cb_fail(error, COLIBRI_BUSY, "the session is busy with another call");
    return COLIBRI_OK;
}

void cb_session_release(colibri_session *session) { atomic_store(&session->holder, NULL); }

static uint32_t blocks_for(uint32_t context) { return (context + CB_KEY_BLOCK - 1) / CB_KEY_BLOCK; }

uint64_t cb_session_bytes(const cb_block_layout *layout, uint32_t context) {
    uint64_t blocks = blocks_for(context);
    uint64_t block_bytes = cb_alloc_bytes(layout->block_bytes) + cb_alloc_bytes(sizeof(cb_block));
    return cb_multiply(blocks, block_bytes) + cb_alloc_bytes(blocks * sizeof(cb_block *)) +
           cb_alloc_bytes((uint64_t)context * sizeof(uint32_t)) + cb_alloc_bytes(sizeof(colibri_session)) +
           cb_alloc_bytes(layout->state_count * sizeof *layout->states);
}

/* Counts the session's bytes in the engine's, which other sessions may change meanwhile. */
static colibri_status reserve(colibri_session *session, cb_error *error) {
    colibri_engine *engine = session->engine;
    uint64_t wanted = cb_session_bytes(&session->layout, session->context), held = atomic_load(&engine->state_bytes);
    do {
        if (wanted > engine->state_limit || held > engine->state_limit - wanted)
            return cb_fail(error, COLIBRI_OUT_OF_MEMORY,
                           "a session of %u positions takes %" PRIu64 " bytes, open sessions hold %" PRIu64
                           " and all together may hold %" PRIu64 "; ask for a smaller context or close a session",
                           session->context, wanted, held, engine->state_limit);
    } while (!atomic_compare_exchange_weak(&engine->state_bytes, &held, held + wanted));
    session->bytes = wanted;
    return COLIBRI_OK;
}

static void close_parts(colibri_session *session) {
    atomic_fetch_sub(&session->engine->state_bytes, session->bytes);
    for (uint32_t i = 0; session->blocks != NULL && i < session->block_count; i++)
        if (session->blocks[i] != NULL)
            cb_block_release(session->engine->runtime->blocks, session->blocks[i]);
    cb_free(session->blocks);
    cb_free(session->tokens);
    cb_block_layout_free(&session->layout);
    cb_free(session);
}

static colibri_status open_parts(colibri_session *session, cb_error *error) {
    colibri_engine *engine = session->engine;
    if (cb_block_layout_make(&engine->model->program, session->format, &session->layout, error) != COLIBRI_OK)
        return error->status;
    if (reserve(session, error) != COLIBRI_OK)
        return error->status;
    if (engine->state_limit != UINT64_MAX)
        cb_block_pool_trim(engine->runtime->blocks, session->layout.block_bytes);
    session->block_count = blocks_for(session->context);
    session->blocks = cb_alloc(cb_multiply(session->block_count, sizeof(cb_block *)));
    session->tokens = cb_alloc(cb_multiply(session->context, sizeof *session->tokens));
    bool have = session->blocks != NULL && session->tokens != NULL;
    for (uint32_t i = 0; have && i < session->block_count; i++) {
        session->blocks[i] = cb_block_take(engine->runtime->blocks, session->layout.block_bytes);
        have = session->blocks[i] != NULL;
    }
    if (!have)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY,
                       "not enough memory for a context of %u positions (%" PRIu64 " bytes); ask for fewer",
                       session->context, cb_multiply(session->block_count, session->layout.block_bytes));
    return COLIBRI_OK;
}

colibri_status cb_check_session_options(const colibri_session_options *options, cb_error *error) {
    if (options->context < 1 || options->context > MAX_CONTEXT)
        return cb_fail(error, COLIBRI_INVALID, "context is %u, it must be 1 to %u positions", options->context,
                       MAX_CONTEXT);
    if (options->state_format > COLIBRI_STATE_Q8)
        return cb_fail(error, COLIBRI_INVALID, "state_format is %u, it must be 0 (default), 1 (f32), 2 (f16) or 3 (q8)",
                       options->state_format);
    return COLIBRI_OK;
}

colibri_status colibri_session_open(colibri_engine *engine, const colibri_session_options *options,
                                    colibri_session **result, char *message, size_t message_size) {
    cb_error error = {0};
    if (result != NULL)
        *result = NULL;
    if (engine == NULL || options == NULL || result == NULL) {
        cb_fail(&error, COLIBRI_INVALID, "engine, options and session must not be NULL");
    } else if (cb_forked(engine->runtime)) {
        cb_fail_forked(&error);
    } else if (cb_check_session_options(options, &error) == COLIBRI_OK) {
        colibri_session *session = cb_alloc(sizeof *session);
        if (session == NULL) {
            cb_fail(&error, COLIBRI_OUT_OF_MEMORY, "not enough memory for a session");
        } else {
            session->engine = engine;
            session->context = options->context;
            session->format = options->state_format != COLIBRI_STATE_DEFAULT
                                  ? options->state_format
                                  : engine->model->program.default_state_format;
            if (open_parts(session, &error) == COLIBRI_OK) {
                atomic_fetch_add(&engine->sessions, 1);
                *result = session;
            } else {
                close_parts(session);
            }
        }
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}

colibri_status colibri_session_close(colibri_session *session) {
    cb_error error = {0};
    if (session == NULL || cb_session_hold(session, &error, &error) != COLIBRI_OK)
        return error.status;
    colibri_engine *engine = session->engine;
    close_parts(session);
    atomic_fetch_sub(&engine->sessions, 1);
    return COLIBRI_OK;
}

uint32_t colibri_position(const colibri_session *session) { return atomic_load(&session->position); }

uint32_t colibri_context(const colibri_session *session) { return session->context; }

const uint32_t *colibri_tokens(const colibri_session *session) { return session->tokens; }

void colibri_cancel(colibri_session *session) { atomic_store(&session->cancel, true); }

colibri_status colibri_truncate(colibri_session *session, uint32_t position, char *message, size_t message_size) {
    cb_error error = {0};
    if (cb_session_hold(session, &error, &error) == COLIBRI_OK) {
        uint32_t now = atomic_load(&session->position);
        if (position > now) {
            cb_fail(&error, COLIBRI_INVALID, "cannot truncate to position %u, the session is at %u", position, now);
        } else {
            atomic_store(&session->position, position);
            atomic_store(&session->cancel, false);
        }
        cb_session_release(session);
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}

static cb_timeline timeline_of(const colibri_session *session) {
    const cb_model *model = session->engine->model;
    return (cb_timeline){.digest = model->digest,
                         .layout = &session->layout,
                         .format = session->format,
                         .vocabulary_size = model->program.vocabulary_size,
                         .context = session->context,
                         .position = atomic_load(&session->position),
                         .blocks = session->blocks,
                         .tokens = session->tokens};
}

uint64_t colibri_state_size(const colibri_session *session) {
    cb_timeline timeline = timeline_of(session);
    return cb_timeline_size(&timeline);
}

colibri_status colibri_state_save(colibri_session *session, void *buffer, uint64_t size, char *message,
                                  size_t message_size) {
    cb_error error = {0};
    if (cb_session_hold(session, &error, &error) == COLIBRI_OK) {
        cb_timeline timeline = timeline_of(session);
        uint64_t needed = cb_timeline_size(&timeline);
        if (buffer == NULL || size != needed)
            cb_fail(&error, COLIBRI_INVALID, "the buffer has %" PRIu64 " bytes, the state needs %" PRIu64,
                    buffer == NULL ? 0 : size, needed);
        else
            cb_timeline_save(&timeline, buffer);
        cb_session_release(session);
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}

colibri_status colibri_state_restore(colibri_session *session, const void *buffer, uint64_t size, char *message,
                                     size_t message_size) {
    cb_error error = {0};
    if (cb_session_hold(session, &error, &error) == COLIBRI_OK) {
        cb_timeline timeline = timeline_of(session);
        if (buffer == NULL)
            cb_fail(&error, COLIBRI_INVALID, "buffer is NULL");
        else if (cb_timeline_restore(&timeline, buffer, size, &error) == COLIBRI_OK)
            atomic_store(&session->position, timeline.position);
        cb_session_release(session);
    }
    cb_copy_message(&error, message, message_size);
    return error.status;
}
