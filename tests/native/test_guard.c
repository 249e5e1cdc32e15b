/* NaN, infinity and numbers too large end the item that has them with an error that names the layer, wherever they
 * come from, and change nothing for the item beside it.
 *
 *   test_guard tiny.cbi */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "runtime/runtime.h"

#define TOKENS 20

static const char *path;

typedef struct setup {
    colibri_runtime *runtime;
    colibri_engine *engine;
} setup;

static setup open_setup(const char *cpu) {
    setup s;
    colibri_runtime_options options = {.threads = 2, .cpu = cpu};
    CHECK(colibri_init(&options, &s.runtime, NULL, 0) == COLIBRI_OK);
    CHECK(colibri_engine_open(s.runtime, path, NULL, &s.engine, NULL, 0) == COLIBRI_OK);
    return s;
}

static void close_setup(setup s) {
    CHECK(colibri_engine_close(s.engine) == COLIBRI_OK && colibri_free(s.runtime) == COLIBRI_OK);
}

static colibri_session *open_session(colibri_engine *engine, uint32_t format) {
    colibri_session_options options = {TOKENS, format};
    colibri_session *session;
    CHECK(colibri_session_open(engine, &options, &session, NULL, 0) == COLIBRI_OK);
    return session;
}

/* ---- weights ---- */

static uint8_t *find_tensor(colibri_engine *engine, const char *name, const cb_tensor **found) {
    const cb_tensor *tensor = engine->model->tensors;
    while (strcmp(tensor->name, name) != 0)
        tensor++;
    *found = tensor;
    return (uint8_t *)(uintptr_t)tensor->data;
}

static void set_floats(uint8_t *data, uint64_t count, float value) {
    for (uint64_t i = 0; i < count; i++)
        memcpy(data + i * sizeof value, &value, sizeof value);
}

/* The whole tensor; in a quantised one the scales become NaN (half 0x7c7c). */
static void spoil(colibri_engine *engine, const char *name, float value) {
    const cb_tensor *tensor;
    uint8_t *data = find_tensor(engine, name, &tensor);
    if (tensor->format == CB_FORMAT_F32)
        set_floats(data, tensor->size / sizeof(float), value);
    else
        memset(data, 0x7c, tensor->size);
}

/* The gate (0), up (1) or down (2) of every expert. */
static void spoil_experts(colibri_engine *engine, uint32_t set, int part, float value) {
    const cb_expert_set *info = &engine->model->sets[set];
    for (uint32_t e = 0; e < info->count; e++) {
        const cb_expert *expert = &info->experts[e];
        cb_store_ready ready;
        cb_store_begin(engine->store, set, &e, 1);
        CHECK(cb_store_next(engine->store, &ready, 1) == 1 && ready.record != NULL);
        uint8_t *data = (uint8_t *)(uintptr_t)ready.record + expert->part[part];
        uint32_t rows = part == 2 ? info->width : info->ffn, cols = part == 2 ? info->ffn : info->width;
        if (expert->format[part] == CB_FORMAT_F32)
            set_floats(data, (uint64_t)rows * cols, value);
        else
            memset(data, 0x7c, cb_packed_size(expert->format[part], CB_LAYOUT_TILED16X4, rows, cols));
        cb_store_end(engine->store);
    }
}

typedef struct spoilt {
    const char *tensor; /* or NULL: experts */
    uint32_t set;
    int part;
    float value;
    const char *message; /* of both; the beginning */
} spoilt;

static const spoilt cases[] = {
    {"embed", 0, 0, 0, "op embed: NaN or infinity in the embedding of token position 0"},
    {"rope_inverse_frequencies", 0, 0, NAN,
     "layer 0, op attention: NaN or infinity in a key or value of token position"},
    {"layers.0.norm", 0, 0, INFINITY,
     "layer 0, op matmul 'layers.0.q': NaN or infinity in the input of token position 0"},
    {"layers.0.q", 0, 0, 0, "layer 0, op attention: NaN or infinity in the scores or the result of token position 0"},
    {"layers.0.k", 0, 0, 0, "layer 0, op attention: NaN or infinity in a key or value of token position 0"},
    {"layers.0.v", 0, 0, INFINITY, "layer 0, op clamp: NaN or infinity in the input of token position 0"},
    {"layers.0.v", 0, 0, 3e38f, "layer 0, op clamp: NaN or infinity in the input of token position 0"},
    {"layers.1.q_bias", 0, 0, -INFINITY, "layer 1, op attention: NaN or infinity in the scores or the result of token"},
    {"layers.1.q_bias", 0, 0, 3e38f, "layer 1, op attention: NaN or infinity in the scores or the result of token"},
    {"layers.0.o", 0, 0, 0, "layer 0, op add: NaN or infinity in the sum of token position 0"},
    {"layers.0.norm2", 0, 0, NAN,
     "layer 0, op matmul 'layers.0.router': NaN or infinity in the input of token position 0"},
    {"layers.0.norm2", 0, 0, 1e13f,
     "layer 1, op rms_norm 'layers.1.norm': NaN, infinity or a sum of squares beyond float32 at token position 0"},
    {"layers.1.router", 0, 0, NAN, "layer 1, op route: NaN or infinity in the router's logits of token position 0"},
    {NULL, 0, 0, 0, "layer 0, expert 0: NaN or infinity in the hidden values of token position "},
    {NULL, 0, 1, 0, "layer 0, expert 0: NaN or infinity in the hidden values of token position "},
    {NULL, 0, 2, 0, "layer 0, expert 0: NaN or infinity in the output of token position "},
    {NULL, 1, 0, 3e38f, "layer 1, expert 0: NaN or infinity in the hidden values of token position "},
    {NULL, 1, 1, NAN, "layer 1, expert 0: NaN or infinity in the hidden values of token position "},
    {NULL, 1, 2, INFINITY, "layer 1, expert 0: NaN or infinity in the output of token position "},
    {"layers.1.shared.gate", 0, 0, 0,
     "layer 1, op matmul 'layers.1.shared.down': NaN or infinity in the input of token position 0"},
    {"layers.1.shared.up", 0, 0, 0,
     "layer 1, op matmul 'layers.1.shared.down': NaN or infinity in the input of token position 0"},
    {"layers.1.shared.switch", 0, 0, 3e38f, "layer 1, op sigmoid_gate: NaN or infinity in the gate of token position "},
    {"layers.1.shared.down", 0, 0, 0, "layer 1, op add: NaN or infinity in the sum of token position 0"},
    {"norm", 0, 0, NAN, "op matmul 'head': NaN or infinity in the input of token position 19"},
    {"head", 0, 0, 0, "output 'logits': NaN or infinity at token position 19"},
};

/* Every weight, spoilt, with f16 and f32 state. */
static void test_weights(const char *cpu) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup s = open_setup(cpu);
        uint32_t tokens[TOKENS] = {1, 2, 3, 4, 5, 6, 7};
        float *logits = malloc(s.engine->model->program.vocabulary_size * sizeof *logits);
        colibri_item items[2];
        CHECK(logits != NULL);
        if (cases[i].tensor != NULL)
            spoil(s.engine, cases[i].tensor, cases[i].value);
        else
            spoil_experts(s.engine, cases[i].set, cases[i].part, cases[i].value);
        for (uint32_t j = 0; j < 2; j++)
            items[j] = (colibri_item){.session = open_session(s.engine, j == 0 ? COLIBRI_STATE_F16 : COLIBRI_STATE_F32),
                                      .tokens = tokens,
                                      .token_count = TOKENS,
                                      .logits_mode = COLIBRI_LOGITS_LAST,
                                      .logits = logits};
        CHECK(colibri_forward_batch(s.engine, items, 2, NULL, 0) == COLIBRI_OK);
        for (int j = 0; j < 2; j++) {
            if (items[j].status != COLIBRI_NON_FINITE ||
                strncmp(items[j].message, cases[i].message, strlen(cases[i].message)) != 0)
                fprintf(stderr, "%s: case %zu: status %d, %s\n   wanted %s\n", cpu, i, items[j].status,
                        items[j].message, cases[i].message);
            CHECK(items[j].status == COLIBRI_NON_FINITE && colibri_position(items[j].session) == 0);
            CHECK(strncmp(items[j].message, cases[i].message, strlen(cases[i].message)) == 0);
            CHECK(colibri_session_close(items[j].session) == COLIBRI_OK);
        }
        free(logits);
        close_setup(s);
    }
}

/* One token's embedding is spoilt: the item with that token fails, the other has the bits it has alone. */
static void test_batch(const char *cpu) {
    setup s = open_setup(cpu);
    const cb_tensor *embed;
    uint8_t *data = find_tensor(s.engine, "embed", &embed);
    CHECK(embed->layout == CB_LAYOUT_ROWS && embed->format == CB_FORMAT_Q8_G32);
    memset(data + 9 * (embed->size / embed->rows), 0x7c, embed->size / embed->rows);
    uint32_t good[TOKENS] = {1, 2, 3, 4, 5}, bad[TOKENS] = {1, 2, 3, 9, 5};
    uint32_t vocabulary = s.engine->model->program.vocabulary_size;
    float *alone = malloc(TOKENS * vocabulary * sizeof *alone), *beside = malloc(TOKENS * vocabulary * sizeof *beside);
    CHECK(alone != NULL && beside != NULL);
    colibri_item items[2] = {{.session = open_session(s.engine, 0),
                              .tokens = good,
                              .token_count = TOKENS,
                              .logits_mode = COLIBRI_LOGITS_ALL,
                              .logits = alone},
                             {.session = open_session(s.engine, 0), .tokens = bad, .token_count = TOKENS}};
    CHECK(colibri_forward_batch(s.engine, items, 1, NULL, 0) == COLIBRI_OK && items[0].status == COLIBRI_OK);
    CHECK(colibri_truncate(items[0].session, 0, NULL, 0) == COLIBRI_OK);
    items[0].logits = beside;
    CHECK(colibri_forward_batch(s.engine, items, 2, NULL, 0) == COLIBRI_OK && items[0].status == COLIBRI_OK);
    CHECK(items[1].status == COLIBRI_NON_FINITE);
    CHECK(strcmp(items[1].message, "op embed: NaN or infinity in the embedding of token position 3") == 0);
    CHECK(memcmp(alone, beside, TOKENS * vocabulary * sizeof *alone) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(colibri_session_close(items[i].session) == COLIBRI_OK);
    free(alone);
    free(beside);
    close_setup(s);
}

/* ---- op by op ---- */

static void run_op(cb_vm *vm, const cb_op *op) {
    static void (*const run[CB_OP_LIMIT])(cb_vm *vm, const cb_op *op) = {
        [CB_OP_RMS_NORM] = cb_run_rms_norm,
        [CB_OP_ROPE] = cb_run_rope,
        [CB_OP_CLAMP] = cb_run_clamp,
        [CB_OP_ATTENTION] = cb_run_attention,
        [CB_OP_ROUTE] = cb_run_route,
        [CB_OP_EXPERTS] = cb_run_experts,
        [CB_OP_GATED_ACTIVATION] = cb_run_gated_activation,
        [CB_OP_ADD] = cb_run_add,
        [CB_OP_SIGMOID_GATE] = cb_run_sigmoid_gate,
    };
    if (op->opcode == CB_OP_MATMUL)
        cb_run_matmuls(vm, op, 1);
    else
        run[op->opcode](vm, op);
}

/* Two rows of every value, those of two items; all but routing from a simple generator. */
static void fill_values(cb_vm *vm) {
    const cb_program *program = &vm->model->program;
    uint32_t state = 1;
    for (uint32_t v = 0; v < program->value_count; v++) {
        cb_register *reg = &vm->registers[v];
        reg->stamp = ++vm->last_stamp;
        for (uint32_t row = 0; row < 2; row++)
            for (uint32_t i = 0; i < program->values[v].width; i++) {
                state = state * 1664525u + 1013904223u;
                reg->values[row * reg->stride + i] = (float)(state >> 8) * 0x1p-23f - 1;
                if (reg->experts != NULL)
                    reg->experts[row * reg->stride + i] = i;
            }
    }
}

static bool finite_row(const cb_vm *vm, uint32_t value, uint32_t row) {
    const cb_register *reg = &vm->registers[value];
    for (uint32_t i = 0; i < vm->model->program.values[value].width; i++)
        if (!isfinite(reg->values[row * reg->stride + i]))
            return false;
    return true;
}

/* In every op of layer 1, in every input: what is not finite is an error or stands in the result, for the next op to
 * find, and the row beside it keeps its bits. */
static void test_ops(const char *cpu) {
    static const float values[] = {NAN, INFINITY, -INFINITY, 1e30f};
    setup s = open_setup(cpu);
    cb_vm *vm = s.engine->vm;
    colibri_item items[2];
    colibri_session *sessions[2];
    vm->phase = &vm->phases[0];
    vm->pass.rows = vm->pass.segment_count = 2;
    for (uint32_t i = 0; i < 2; i++) {
        sessions[i] = open_session(s.engine, COLIBRI_STATE_F32);
        vm->pass.segments[i] = (cb_segment){.item = &items[i],
                                            .cancel = &sessions[i]->cancel,
                                            .layout = &sessions[i]->layout,
                                            .blocks = sessions[i]->blocks,
                                            .first_row = i,
                                            .count = 1};
        vm->pass.segment_of[i] = i;
        vm->pass.positions[i] = 0;
    }
    uint32_t seen = 0;
    for (uint32_t o = 0; o < vm->model->program.op_count; o++) {
        const cb_op *op = &vm->model->program.ops[o];
        const cb_op_info *info = &cb_op_table[op->opcode];
        if (op->layer != 1)
            continue;
        seen |= 1u << op->opcode;
        uint32_t y = op->words[0], width = vm->model->program.values[y].width;
        const cb_register *result = &vm->registers[y];
        float *expected = malloc(width * sizeof *expected);
        CHECK(expected != NULL);
        items[0].status = items[1].status = COLIBRI_OK;
        fill_values(vm);
        run_op(vm, op);
        CHECK(items[0].status == COLIBRI_OK && items[1].status == COLIBRI_OK && finite_row(vm, y, 0));
        memcpy(expected, result->values + result->stride, width * sizeof *expected);
        for (uint32_t operand = 0; operand < info->operand_count; operand++) {
            if (info->operands[operand].kind != CB_OPERAND_IN || info->operands[operand].value_kind == CB_VALUE_ROUTING)
                continue;
            for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
                uint32_t x = op->words[operand];
                items[0].status = items[1].status = COLIBRI_OK;
                fill_values(vm);
                vm->registers[x].values[vm->model->program.values[x].width / 2] = values[i];
                run_op(vm, op);
                bool error = items[0].status == COLIBRI_NON_FINITE, large = isfinite(values[i]);
                if (!error && !large && finite_row(vm, y, 0))
                    fprintf(stderr, "%s: op %s hides %g in %s\n", cpu, info->name, (double)values[i],
                            info->operands[operand].name);
                CHECK(error || large || !finite_row(vm, y, 0));
                CHECK(!large || op->opcode != CB_OP_RMS_NORM || error);
                CHECK(!error || strncmp(items[0].message, "layer 1, ", 9) == 0);
                CHECK(items[1].status == COLIBRI_OK);
                CHECK(memcmp(expected, result->values + result->stride, width * sizeof *expected) == 0);
            }
        }
        free(expected);
    }
    /* matmul, rms_norm, rope, clamp, attention, route, experts, gated_activation, add, sigmoid_gate */
    CHECK(__builtin_popcount(seen) == 10);
    for (uint32_t i = 0; i < 2; i++)
        CHECK(colibri_session_close(sessions[i]) == COLIBRI_OK);
    close_setup(s);
}

/* Keys large enough for the f16 state only. */
static void test_f16_state(void) {
    setup s = open_setup(NULL);
    uint32_t tokens[TOKENS] = {1, 2, 3};
    colibri_item items[2];
    spoil(s.engine, "layers.0.norm", 1e7f);
    for (uint32_t j = 0; j < 2; j++)
        items[j] = (colibri_item){.session = open_session(s.engine, j == 0 ? COLIBRI_STATE_F16 : COLIBRI_STATE_F32),
                                  .tokens = tokens,
                                  .token_count = TOKENS};
    CHECK(colibri_forward_batch(s.engine, items, 2, NULL, 0) == COLIBRI_OK);
    CHECK(items[0].status == COLIBRI_NON_FINITE && items[1].status == COLIBRI_OK);
    CHECK(strcmp(items[0].message, "layer 0, op attention: a key or value of token position 0 does not fit the f16 "
                                   "state; use kv='f32'") == 0);
    for (uint32_t j = 0; j < 2; j++)
        CHECK(colibri_session_close(items[j].session) == COLIBRI_OK);
    close_setup(s);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    path = argv[1];
    for (int isa = 0; isa < CB_ISA_COUNT; isa++) {
        if (!cb_isa_supported((cb_isa)isa))
            continue;
        test_weights(cb_isa_name((cb_isa)isa));
        test_batch(cb_isa_name((cb_isa)isa));
        test_ops(cb_isa_name((cb_isa)isa));
    }
    test_f16_state();
    puts("guard: all tests passed");
    return 0;
}
