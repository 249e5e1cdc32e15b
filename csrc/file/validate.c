/* Semantic checks of a program. Nothing here relies on what wrote the file. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "file/bytes.h"
#include "file/model.h"

static uint64_t cb_rule_width(const cb_model *m, uint32_t value) { return m->program.values[value].width; }
static uint64_t cb_rule_extent(const cb_model *m, uint32_t value) { return m->program.values[value].extent; }
static uint64_t cb_rule_rows(const cb_model *m, uint32_t tensor) { return m->tensors[tensor].rows; }
static uint64_t cb_rule_cols(const cb_model *m, uint32_t tensor) { return m->tensors[tensor].cols; }
static uint64_t cb_rule_expert_count(const cb_model *m, uint32_t set) { return m->sets[set].count; }
static uint64_t cb_rule_expert_width(const cb_model *m, uint32_t set) { return m->sets[set].width; }
static uint64_t cb_rule_kv_heads(const cb_model *m, uint32_t state) { return m->program.states[state].kv_heads; }
static uint64_t cb_rule_key_dim(const cb_model *m, uint32_t state) { return m->program.states[state].key_dim; }
static uint64_t cb_rule_value_dim(const cb_model *m, uint32_t state) { return m->program.states[state].value_dim; }
static bool cb_rule_finite(float value) { return isfinite(value); }

#include "file/op_rules_generated.h"

/* "model.cbi: op 12 (matmul, layer 3): <text>" */
__attribute__((format(printf, 4, 5))) static colibri_status op_fails(const cb_model *model, uint32_t index,
                                                                     cb_error *error, const char *format, ...) {
    const cb_op *op = &model->program.ops[index];
    char layer[32] = "", text[256];
    if (op->layer != CB_ABSENT)
        snprintf(layer, sizeof layer, ", layer %u", op->layer);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return cb_fail(error, COLIBRI_BAD_FILE, "%s: op %u (%s%s): %s", cb_label(model), index,
                   cb_op_table[op->opcode].name, layer, text);
}

static const char *kind_name(uint32_t kind) {
    static const char *const names[] = {"tokens or outputs", "tokens", "outputs", "routing"};
    return names[kind];
}

/* What is known while walking over the ops. */
typedef struct walk {
    uint8_t *written;    /* [value_count] */
    uint8_t *state_used; /* [state_count] */
    uint32_t layer;      /* of the last op that has one */
} walk;

static colibri_status check_value(const cb_model *model, uint32_t index, const cb_operand_info *info, uint32_t value,
                                  const walk *walk, uint32_t *any_kind, cb_error *error) {
    if (value >= model->program.value_count)
        return op_fails(model, index, error, "%s is value %u, there are %u", info->name, value,
                        model->program.value_count);
    uint32_t kind = model->program.values[value].kind;
    bool fits = info->value_kind != 0 ? kind == info->value_kind : kind != CB_VALUE_ROUTING;
    if (!fits)
        return op_fails(model, index, error, "%s is a value of kind %s, not %s", info->name, kind_name(kind),
                        kind_name(info->value_kind));
    if (info->value_kind == 0) {
        if (*any_kind != 0 && *any_kind != kind)
            return op_fails(model, index, error, "%s is a value of kind %s, the operands before it of kind %s",
                            info->name, kind_name(kind), kind_name(*any_kind));
        *any_kind = kind;
    }
    if (info->kind == CB_OPERAND_IN && !walk->written[value])
        return op_fails(model, index, error, "%s (value %u '%s') is read before it is written", info->name, value,
                        model->program.values[value].name);
    return COLIBRI_OK;
}

static colibri_status check_operands(const cb_model *model, uint32_t index, walk *walk, cb_error *error) {
    const cb_op *op = &model->program.ops[index];
    const cb_op_info *info = &cb_op_table[op->opcode];
    uint32_t any_kind = 0;
    for (uint32_t i = 0; i < info->operand_count; i++) {
        const cb_operand_info *operand = &info->operands[i];
        uint32_t word = op->words[i];
        switch (operand->kind) {
        case CB_OPERAND_OUT:
        case CB_OPERAND_IN:
            if (check_value(model, index, operand, word, walk, &any_kind, error) != COLIBRI_OK)
                return error->status;
            break;
        case CB_OPERAND_WEIGHT:
            if (word >= model->tensor_count && !(operand->optional && word == CB_ABSENT))
                return op_fails(model, index, error, "%s is tensor %u, there are %u", operand->name, word,
                                model->tensor_count);
            break;
        case CB_OPERAND_EXPERTS:
            if (model->set_count == 0)
                return op_fails(model, index, error, "the file has no expert directory with sets");
            if (word >= model->set_count)
                return op_fails(model, index, error, "%s is expert set %u, there are %u", operand->name, word,
                                model->set_count);
            break;
        case CB_OPERAND_STATE:
            if (word >= model->program.state_count)
                return op_fails(model, index, error, "%s is state %u, there are %u", operand->name, word,
                                model->program.state_count);
            if (walk->state_used[word])
                return op_fails(model, index, error, "%s is state %u, which an op before uses", operand->name, word);
            walk->state_used[word] = 1;
            break;
        default:
            break;
        }
    }
    return COLIBRI_OK;
}

static bool is_vector(const cb_tensor *t) {
    return t->format == CB_FORMAT_F32 && t->layout == CB_LAYOUT_ROWS && t->rows == 1;
}

/* The kernels read each weight in one way only: the op decides which. */
static colibri_status check_weights(const cb_model *model, uint32_t index, cb_error *error) {
    const cb_op *op = &model->program.ops[index];
    const cb_op_info *info = &cb_op_table[op->opcode];
    for (uint32_t i = 0; i < info->operand_count; i++) {
        if (info->operands[i].kind != CB_OPERAND_WEIGHT || op->words[i] == CB_ABSENT)
            continue;
        const cb_tensor *tensor = &model->tensors[op->words[i]];
        const char *name = info->operands[i].name;
        bool matrix = op->opcode == CB_OP_MATMUL && strcmp(name, "weight") == 0;
        if (op->opcode == CB_OP_EMBED) {
            if (tensor->rows != model->program.vocabulary_size)
                return op_fails(model, index, error, "%s '%.100s' has %llu rows, the vocabulary size is %u", name,
                                tensor->name, (unsigned long long)tensor->rows, model->program.vocabulary_size);
        } else if (matrix && tensor->layout == CB_LAYOUT_ROWS) {
            return op_fails(model, index, error, "%s '%.100s' has layout rows, a matrix must be tiled", name,
                            tensor->name);
        } else if (!matrix && !is_vector(tensor)) {
            return op_fails(model, index, error, "%s '%.100s' is not a vector (1 row, format f32, layout rows)", name,
                            tensor->name);
        }
    }
    return COLIBRI_OK;
}

static colibri_status check_op(const cb_model *model, uint32_t index, walk *walk, cb_error *error) {
    const cb_op *op = &model->program.ops[index];
    if (op->layer != CB_ABSENT) {
        if (op->layer < walk->layer)
            return op_fails(model, index, error, "an op before has layer %u, layers must not fall", walk->layer);
        walk->layer = op->layer;
    }
    if (check_operands(model, index, walk, error) != COLIBRI_OK || check_weights(model, index, error) != COLIBRI_OK)
        return error->status;
    const char *rule = cb_broken_rule(model, op);
    if (rule != NULL)
        return op_fails(model, index, error, "breaks a rule: %s", rule);
    const cb_op_info *info = &cb_op_table[op->opcode];
    for (uint32_t i = 0; i < info->operand_count; i++)
        if (info->operands[i].kind == CB_OPERAND_OUT)
            walk->written[op->words[i]] = 1;
    return COLIBRI_OK;
}

static colibri_status check_logits(const cb_model *model, const walk *walk, cb_error *error) {
    const cb_program *program = &model->program;
    const char *label = cb_label(model);
    if (program->logits >= program->value_count)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: output 'logits' is value %u, there are %u", label,
                       program->logits, program->value_count);
    const cb_value *logits = &program->values[program->logits];
    if (logits->kind != CB_VALUE_OUTPUTS)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: output 'logits' is a value of kind %s, not outputs",
                       label, kind_name(logits->kind));
    if (logits->width != program->vocabulary_size)
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: output 'logits' has width %u, the vocabulary size is %u",
                       label, logits->width, program->vocabulary_size);
    if (!walk->written[program->logits])
        return cb_fail(error, COLIBRI_BAD_FILE, "%s: program: output 'logits' is never written", label);
    return COLIBRI_OK;
}

colibri_status cb_validate_program(const cb_model *model, cb_error *error) {
    const cb_program *program = &model->program;
    walk walk = {.written = cb_alloc(program->value_count), .state_used = cb_alloc(program->state_count)};
    colibri_status status = COLIBRI_OK;
    if (walk.written == NULL || walk.state_used == NULL) {
        status = cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%s: not enough memory to check its program", cb_label(model));
        goto end;
    }
    for (uint32_t i = 0; i < program->op_count && status == COLIBRI_OK; i++)
        status = check_op(model, i, &walk, error);
    for (uint32_t i = 0; i < program->state_count && status == COLIBRI_OK; i++)
        if (!walk.state_used[i])
            status = cb_fail(error, COLIBRI_BAD_FILE, "%s: program: state %u is used by no op", cb_label(model), i);
    /* Registers are allocated by width, so one that no op fills would cost memory that no weight accounts for. */
    for (uint32_t i = 0; i < program->value_count && status == COLIBRI_OK; i++)
        if (!walk.written[i] && i != program->logits)
            status = cb_fail(error, COLIBRI_BAD_FILE, "%s: program: value %u '%s' is written by no op", cb_label(model),
                             i, program->values[i].name);
    if (status == COLIBRI_OK)
        status = check_logits(model, &walk, error);
end:
    cb_free(walk.written);
    cb_free(walk.state_used);
    return status;
}
