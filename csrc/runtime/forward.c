/* A batch: items are checked, their tokens cut into passes, positions moved on at the end. */
#include "runtime/runtime.h"

#include <stdio.h>
#include <string.h>

/* ---- before ---- */

static void check_item(const colibri_engine *engine, colibri_item *item) {
    const colibri_session *session = item->session;
    uint32_t vocabulary = engine->model->program.vocabulary_size, position = atomic_load(&session->position);
    if (item->tokens == NULL || item->token_count == 0) {
        cb_item_fail(item, COLIBRI_INVALID, "an item has no tokens, it needs at least 1");
        return;
    }
    if (item->logits_mode > COLIBRI_LOGITS_ALL) {
        cb_item_fail(item, COLIBRI_INVALID, "logits_mode is %u, it must be 0 (none), 1 (last) or 2 (all)",
                     item->logits_mode);
        return;
    }
    if (item->scores != NULL && item->logits_mode != COLIBRI_LOGITS_NONE) {
        cb_item_fail(item, COLIBRI_INVALID, "an item asks for scores and logits, use logits_mode 0 with scores");
        return;
    }
    if (item->logits == NULL && item->logits_mode != COLIBRI_LOGITS_NONE) {
        cb_item_fail(item, COLIBRI_INVALID, "logits is NULL with logits_mode %u", item->logits_mode);
        return;
    }
    if (item->token_count > session->context - position) {
        cb_item_fail(item, COLIBRI_CONTEXT_FULL,
                     "%u tokens do not fit behind position %u, the session's context is %u positions",
                     item->token_count, position, session->context);
        return;
    }
    for (uint32_t i = 0; i < item->token_count; i++)
        if (item->tokens[i] >= vocabulary) {
            cb_item_fail(item, COLIBRI_INVALID,
                         "token id %u (number %u of the item) is not below the vocabulary size %u", item->tokens[i], i,
                         vocabulary);
            return;
        }
}

static void admit_item(const colibri_engine *engine, colibri_item *items, uint32_t index) {
    colibri_item *item = &items[index];
    cb_error error = {0};
    item->status = COLIBRI_OK;
    item->message[0] = '\0';
    if (item->session != NULL && item->session->engine != engine) {
        cb_item_fail(item, COLIBRI_INVALID, "the session belongs to another engine");
        return;
    }
    if (cb_session_hold(item->session, item, &error) != COLIBRI_OK) {
        for (uint32_t i = 0; error.status == COLIBRI_BUSY && i < index; i++)
            if (items[i].session == item->session)
                cb_fail(&error, COLIBRI_INVALID, "the session is in the batch twice (items %u and %u)", i, index);
        cb_item_fail(item, error.status, "%s", error.message);
        return;
    }
    item->session->done = 0;
    check_item(engine, item);
}

/* ---- passes ---- */

static void add_outputs(const colibri_engine *engine, cb_pass *pass, const cb_segment *segment, uint32_t done) {
    const colibri_item *item = segment->item;
    uint64_t vocabulary = engine->model->program.vocabulary_size;
    for (uint32_t i = 0; i < segment->count; i++) {
        uint32_t token = done + i;
        bool last = token == item->token_count - 1;
        cb_output output = {.row = segment->first_row + i};
        if (item->scores != NULL && last) {
            item->scores[token] = __builtin_nanf("");
            continue;
        }
        if (item->scores != NULL) {
            output.score = item->scores + token;
            output.next = item->tokens[token + 1];
        } else if (item->logits_mode == COLIBRI_LOGITS_ALL) {
            output.logits = item->logits + token * vocabulary;
        } else if (item->logits_mode == COLIBRI_LOGITS_LAST && last) {
            output.logits = item->logits;
        } else {
            continue;
        }
        pass->outputs[pass->output_count++] = output;
    }
}

/* Takes the next rows of the items, in order; false when there are none. */
static bool fill_pass(colibri_engine *engine, colibri_item *items, uint32_t item_count) {
    cb_pass *pass = &engine->vm->pass;
    pass->rows = pass->segment_count = pass->output_count = 0;
    for (uint32_t i = 0; i < item_count && pass->rows < engine->vm->max_rows; i++) {
        colibri_item *item = &items[i];
        colibri_session *session = item->session;
        if (item->status != COLIBRI_OK || session->done == item->token_count)
            continue;
        uint32_t left = item->token_count - session->done, room = engine->vm->max_rows - pass->rows;
        cb_segment *segment = &pass->segments[pass->segment_count];
        *segment = (cb_segment){.item = item,
                                .cancel = &session->cancel,
                                .layout = &session->layout,
                                .blocks = session->blocks,
                                .first_row = pass->rows,
                                .count = left < room ? left : room,
                                .position = atomic_load(&session->position) + session->done};
        for (uint32_t j = 0; j < segment->count; j++, pass->rows++) {
            pass->tokens[pass->rows] = item->tokens[session->done + j];
            pass->positions[pass->rows] = segment->position + j;
            pass->segment_of[pass->rows] = pass->segment_count;
        }
        add_outputs(engine, pass, segment, session->done);
        session->done += segment->count;
        pass->segment_count++;
    }
    return pass->rows > 0;
}

/* ---- after ---- */

/* Positions move on only here, so that an item cancelled while others were still running is cancelled. */
static void settle_item(colibri_item *item) {
    colibri_session *session = item->session;
    if (session == NULL || atomic_load(&session->holder) != item)
        return; /* was not held for this item */
    bool ran = item->status == COLIBRI_OK || item->status == COLIBRI_CANCELLED || item->status == COLIBRI_NON_FINITE ||
               item->status == COLIBRI_IO || item->status == COLIBRI_BAD_FILE;
    if (ran && atomic_exchange(&session->cancel, false) && item->status == COLIBRI_OK)
        cb_item_fail(item, COLIBRI_CANCELLED, "cancelled; the session keeps its position");
    if (item->status == COLIBRI_OK) {
        uint32_t position = atomic_load(&session->position);
        memcpy(session->tokens + position, item->tokens, (uint64_t)item->token_count * sizeof(uint32_t));
        atomic_store(&session->position, position + item->token_count);
    }
    cb_session_release(session);
}

static void run_passes(colibri_engine *engine, colibri_item *items, uint32_t item_count) {
    pthread_mutex_lock(&engine->runtime->forward);
    cb_float_environment environment = cb_float_enter();
    cb_pool_begin(engine->runtime->pool);
    uint64_t start = cb_now();
    while (fill_pass(engine, items, item_count))
        cb_vm_run(engine->vm);
    cb_count(&engine->nanoseconds, cb_now() - start);
    cb_pool_end(engine->runtime->pool);
    cb_float_leave(environment);
    pthread_mutex_unlock(&engine->runtime->forward);
}

static void run_batch(colibri_engine *engine, colibri_item *items, uint32_t item_count) {
    bool any = false; /* a session that is busy is told so at once, not after the forward it is busy with */
    for (uint32_t i = 0; i < item_count; i++) {
        admit_item(engine, items, i);
        any = any || items[i].status == COLIBRI_OK;
    }
    if (any)
        run_passes(engine, items, item_count);
    for (uint32_t i = 0; i < item_count; i++)
        settle_item(&items[i]);
}

colibri_status colibri_forward_batch(colibri_engine *engine, colibri_item *items, uint32_t item_count, char *message,
                                     size_t message_size) {
    cb_error error = {0};
    if (engine == NULL || (items == NULL && item_count > 0))
        cb_fail(&error, COLIBRI_INVALID, "engine and items must not be NULL");
    else if (cb_forked(engine->runtime))
        cb_fail_forked(&error);
    else
        run_batch(engine, items, item_count);
    for (uint32_t i = 0; error.status != COLIBRI_OK && items != NULL && i < item_count; i++)
        cb_item_fail(&items[i], error.status, "%s", error.message);
    cb_copy_message(&error, message, message_size);
    return error.status;
}
