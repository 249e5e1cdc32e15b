/* Decodes the program section. What an op may refer to is checked in validate.c. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "file/bytes.h"

#define VALUE_BYTES 32
#define STATE_BYTES 20
#define ENTRY_BYTES (32 + 12)
#define OUTPUT_BYTES (32 + 4)
#define MAX_WIDTH (1u << 24)
#define MAX_ROUTED 256u
#define MAX_EXTENT 65536u

typedef struct cursor {
    const uint8_t *p;
    uint64_t left;
} cursor;

/* The next `size` bytes, or NULL. */
static const uint8_t *take(cursor *c, uint64_t size) {
    if (size > c->left)
        return NULL;
    const uint8_t *p = c->p;
    c->p += size;
    c->left -= size;
    return p;
}

static bool name_is(const uint8_t field[32], const char *name) {
    size_t length = strlen(name);
    return memcmp(field, name, length) == 0 && cb_all_zero(field + length, 32 - length);
}

static bool out_of(uint32_t value, uint32_t least, uint32_t most) { return value < least || value > most; }

static colibri_status ends(const cb_model *model, const char *what, cb_error *error) {
    return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: it ends inside its %s", cb_label(model), what);
}

static colibri_status out_of_range(const cb_model *model, const char *field, uint32_t value, uint32_t least,
                                   uint32_t most, cb_error *error) {
    return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: %s is %u, not %u to %u", cb_label(model), field, value, least,
                   most);
}

static colibri_status no_memory(const cb_model *model, cb_error *error) {
    return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory for its program", cb_label(model));
}

static colibri_status read_values(cb_model *model, cursor *c, cb_error *error) {
    cb_program *program = &model->program;
    const uint8_t *p = take(c, (uint64_t)program->value_count * VALUE_BYTES);
    if (p == NULL)
        return ends(model, "values", error);
    program->values = cb_alloc(cb_multiply(program->value_count, sizeof *program->values));
    if (program->values == NULL)
        return no_memory(model, error);
    for (uint32_t i = 0; i < program->value_count; i++, p += VALUE_BYTES) {
        cb_value *value = &program->values[i];
        value->kind = cb_u32(p);
        value->width = cb_u32(p + 4);
        value->extent = cb_u32(p + 8);
        size_t length = strnlen((const char *)p + 12, 20);
        if (!cb_is_text(p + 12, length) || !cb_all_zero(p + 12 + length, 20 - length))
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: value %u: its name is not text padded with zeros",
                           cb_label(model), i);
        memcpy(value->name, p + 12, length);
        char field[64];
        if (out_of(value->kind, CB_VALUE_TOKENS, CB_VALUE_ROUTING)) {
            snprintf(field, sizeof field, "value %u '%s': kind", i, value->name);
            return out_of_range(model, field, value->kind, CB_VALUE_TOKENS, CB_VALUE_ROUTING, error);
        }
        bool routing = value->kind == CB_VALUE_ROUTING;
        uint32_t most = routing ? MAX_ROUTED : MAX_WIDTH;
        if (out_of(value->width, 1, most)) {
            snprintf(field, sizeof field, "value %u '%s': width", i, value->name);
            return out_of_range(model, field, value->width, 1, most, error);
        }
        if (out_of(value->extent, routing ? 1 : 0, routing ? MAX_EXTENT : 0)) {
            snprintf(field, sizeof field, "value %u '%s': extent", i, value->name);
            return out_of_range(model, field, value->extent, routing ? 1 : 0, routing ? MAX_EXTENT : 0, error);
        }
    }
    return COLIBRI_OK;
}

static colibri_status read_states(cb_model *model, cursor *c, cb_error *error) {
    static const char *const names[5] = {"kind", "kv_heads", "key_dim", "value_dim", "layer"};
    static const uint32_t least[5] = {CB_STATE_ATTENTION, 1, 1, 1, 0};
    static const uint32_t most[5] = {CB_STATE_ATTENTION, 65536, 65536, 65536, CB_MAX_LAYERS - 1};
    cb_program *program = &model->program;
    const uint8_t *p = take(c, (uint64_t)program->state_count * STATE_BYTES);
    if (p == NULL)
        return ends(model, "states", error);
    program->states = cb_alloc(cb_multiply(program->state_count, sizeof *program->states));
    if (program->states == NULL)
        return no_memory(model, error);
    for (uint32_t i = 0; i < program->state_count; i++) {
        uint32_t fields[5];
        for (int j = 0; j < 5; j++, p += 4) {
            fields[j] = cb_u32(p);
            if (out_of(fields[j], least[j], most[j])) {
                char field[64];
                snprintf(field, sizeof field, "state %u: %s", i, names[j]);
                return out_of_range(model, field, fields[j], least[j], most[j], error);
            }
        }
        program->states[i] = (cb_state_info){fields[0], fields[1], fields[2], fields[3], fields[4]};
    }
    return COLIBRI_OK;
}

/* Version 1 has one entry, "main", which is all of the ops and gives "logits". */
static colibri_status read_entry(cb_model *model, cursor *c, cb_error *error) {
    cb_program *program = &model->program;
    const char *label = cb_label(model);
    const uint8_t *p = take(c, ENTRY_BYTES);
    if (p == NULL)
        return ends(model, "entries", error);
    if (!name_is(p, "main"))
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: program: its entry is not named 'main'", label);
    program->first_op = cb_u32(p + 32);
    if (program->first_op != 0 || cb_u32(p + 36) != program->op_count)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: program: entry 'main' has %u ops from op %u, not all %u ops of the program", label,
                       cb_u32(p + 36), program->first_op, program->op_count);
    if (cb_u32(p + 40) != 1)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: program: entry 'main' has %u outputs, this build reads 1",
                       label, cb_u32(p + 40));
    p = take(c, OUTPUT_BYTES);
    if (p == NULL)
        return ends(model, "outputs", error);
    if (!name_is(p, "logits"))
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: program: the output of entry 'main' is not named 'logits'",
                       label);
    program->logits = cb_u32(p + 32);
    return COLIBRI_OK;
}

static colibri_status read_ops(cb_model *model, cursor *c, uint32_t word_count, cb_error *error) {
    cb_program *program = &model->program;
    const char *label = cb_label(model);
    if (c->left != (uint64_t)word_count * 4)
        return cb_fail(error, COLIBRI_BAD_FILE,
                       "%s: program: %" PRIu64 " bytes are left for its ops, word count %u needs %" PRIu64, label,
                       c->left, word_count, (uint64_t)word_count * 4);
    /* An op has at least 2 words: so much is known before memory is taken for them. */
    if ((uint64_t)program->op_count * 2 > word_count)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: word count %u is too small for %u ops", label, word_count,
                       program->op_count);
    program->ops = cb_alloc(cb_multiply(program->op_count, sizeof *program->ops));
    if (program->ops == NULL)
        return no_memory(model, error);
    for (uint32_t i = 0; i < program->op_count; i++) {
        cb_op *op = &program->ops[i];
        const uint8_t *p = take(c, 8);
        if (p == NULL)
            return ends(model, "ops", error);
        op->opcode = cb_u32(p);
        op->layer = cb_u32(p + 4);
        if (op->opcode >= CB_OP_LIMIT || cb_op_table[op->opcode].name == NULL)
            return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: program: op %u: number %u is not known to this build",
                           label, i, op->opcode);
        if (op->layer != CB_ABSENT && op->layer >= CB_MAX_LAYERS)
            return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: op %u (%s): layer %u is not below %u", label, i,
                           cb_op_table[op->opcode].name, op->layer, CB_MAX_LAYERS);
        if (op->layer != CB_ABSENT && op->layer >= program->layer_count)
            program->layer_count = op->layer + 1;
        uint32_t operands = cb_op_table[op->opcode].operand_count;
        p = take(c, 4 * (uint64_t)operands);
        if (p == NULL)
            return ends(model, "ops", error);
        for (uint32_t j = 0; j < operands; j++)
            op->words[j] = cb_u32(p + 4 * j);
    }
    if (c->left != 0)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: %" PRIu64 " bytes are left behind its last op", label,
                       c->left);
    return COLIBRI_OK;
}

colibri_status cb_read_program(cb_model *model, const uint8_t *bytes, uint64_t size, cb_error *error) {
    cb_program *program = &model->program;
    cursor c = {bytes, size};
    const uint8_t *p = take(&c, 36);
    if (p == NULL)
        return ends(model, "head", error);
    if (cb_u32(p) != CB_OPS_VERSION)
        return cb_fail(error, COLIBRI_UNSUPPORTED, "%s: program: has op table version %u, this build reads version %u",
                       cb_label(model), cb_u32(p), CB_OPS_VERSION);
    static const struct {
        const char *name;
        uint32_t least, most;
    } fields[8] = {{"op table version", CB_OPS_VERSION, CB_OPS_VERSION},
                   {"vocabulary size", 1, MAX_WIDTH},
                   {"context limit", 1, MAX_WIDTH},
                   {"default state format", COLIBRI_STATE_F32, COLIBRI_STATE_Q8},
                   {"value count", 1, 4096},
                   {"state count", 0, 4096},
                   {"entry count", 1, 1},
                   {"op count", 1, 1000000}};
    for (int i = 1; i < 8; i++)
        if (out_of(cb_u32(p + 4 * i), fields[i].least, fields[i].most))
            return out_of_range(model, fields[i].name, cb_u32(p + 4 * i), fields[i].least, fields[i].most, error);
    program->vocabulary_size = cb_u32(p + 4);
    program->context_limit = cb_u32(p + 8);
    program->default_state_format = cb_u32(p + 12);
    program->value_count = cb_u32(p + 16);
    program->state_count = cb_u32(p + 20);
    program->op_count = cb_u32(p + 28);
    uint32_t word_count = cb_u32(p + 32);
    if (read_values(model, &c, error) != COLIBRI_OK || read_states(model, &c, error) != COLIBRI_OK ||
        read_entry(model, &c, error) != COLIBRI_OK)
        return error->status;
    return read_ops(model, &c, word_count, error);
}
