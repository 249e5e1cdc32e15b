/* Ops that take one row at a time. */
#include "vm/vm.h"

static const cb_value *value_of(const cb_vm *vm, uint32_t value) { return &vm->model->program.values[value]; }

static float *row_of(const cb_vm *vm, uint32_t value, uint32_t row) {
    const cb_register *reg = &vm->registers[value];
    return reg->values + row * reg->stride;
}

static const float *vector_of(const cb_vm *vm, uint32_t tensor) {
    return (const float *)(const void *)vm->model->tensors[tensor].data;
}

/* All ops here have their result as operand 0; most leave what is not finite to the op that reads it. */
static void run(cb_vm *vm, const cb_op *op, cb_row_work work) {
    uint32_t y = op->words[0];
    cb_for_rows(vm, cb_value_rows(vm, y), value_of(vm, y)->width, work, op);
}

static void embed_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    const cb_tensor *table = &vm->model->tensors[op->embed.table];
    vm->kernels->decode_row(table->format, table->layout, table->data, table->cols, vm->pass.tokens[row],
                            row_of(vm, op->embed.y, row));
    vm->row_failed[row] = !vm->kernels->all_finite(row_of(vm, op->embed.y, row), table->cols);
}

static void norm_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    uint32_t width = value_of(vm, op->rms_norm.y)->width, group = op->rms_norm.group;
    float *y = row_of(vm, op->rms_norm.y, row);
    const float *x = row_of(vm, op->rms_norm.x, row);
    const float *weight = vector_of(vm, op->rms_norm.weight);
    bool finite = true;
    for (uint32_t i = 0; i < width; i += group)
        finite &= vm->kernels->rms_norm(y + i, x + i, weight, group, op->rms_norm.epsilon);
    vm->row_failed[row] = !finite;
}

static void rope_table_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    vm->kernels->rope_table(row_of(vm, op->rope_table.table, row), vector_of(vm, op->rope_table.inverse_frequencies),
                            value_of(vm, op->rope_table.table)->width / 2, vm->pass.positions[row],
                            op->rope_table.scale);
}

static void rope_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    vm->kernels->rope(row_of(vm, op->rope.y, row), row_of(vm, op->rope.x, row), row_of(vm, op->rope.table, row),
                      value_of(vm, op->rope.y)->width / op->rope.head_dim, op->rope.head_dim,
                      value_of(vm, op->rope.table)->width, op->rope.pairing);
}

static void clamp_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    vm->row_failed[row] = !vm->kernels->clamp(row_of(vm, op->clamp.y, row), row_of(vm, op->clamp.x, row), op->clamp.low,
                                              op->clamp.high, value_of(vm, op->clamp.y)->width);
}

static void activation_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    vm->kernels->silu_mul(row_of(vm, op->gated_activation.y, row), row_of(vm, op->gated_activation.gate, row),
                          row_of(vm, op->gated_activation.up, row), value_of(vm, op->gated_activation.y)->width);
}

static void add_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    vm->row_failed[row] = !vm->kernels->add(row_of(vm, op->add.y, row), row_of(vm, op->add.a, row),
                                            row_of(vm, op->add.b, row), value_of(vm, op->add.y)->width);
}

static void gate_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const cb_op *op = context;
    float gate = *row_of(vm, op->sigmoid_gate.gate, row); /* infinity would pass as a factor of 0 or 1 */
    vm->row_failed[row] = !__builtin_isfinite(gate);
    vm->kernels->sigmoid_scale(row_of(vm, op->sigmoid_gate.y, row), row_of(vm, op->sigmoid_gate.x, row), gate,
                               value_of(vm, op->sigmoid_gate.y)->width);
}

void cb_run_embed(cb_vm *vm, const cb_op *op) {
    run(vm, op, embed_row);
    cb_report_rows(vm, op, op->embed.y, "op embed: NaN or infinity in the embedding of");
}

void cb_run_rms_norm(cb_vm *vm, const cb_op *op) {
    run(vm, op, norm_row);
    cb_report_rows(vm, op, op->rms_norm.y, "op rms_norm '%.100s': NaN, infinity or a sum of squares beyond float32 at",
                   vm->model->tensors[op->rms_norm.weight].name);
}

void cb_run_rope_table(cb_vm *vm, const cb_op *op) { run(vm, op, rope_table_row); }

void cb_run_rope(cb_vm *vm, const cb_op *op) { run(vm, op, rope_row); }

void cb_run_clamp(cb_vm *vm, const cb_op *op) {
    run(vm, op, clamp_row);
    cb_report_rows(vm, op, op->clamp.y, "op clamp: NaN or infinity in the input of");
}

void cb_run_gated_activation(cb_vm *vm, const cb_op *op) { run(vm, op, activation_row); }

void cb_run_add(cb_vm *vm, const cb_op *op) {
    run(vm, op, add_row);
    cb_report_rows(vm, op, op->add.y, "op add: NaN or infinity in the sum of");
}

void cb_run_sigmoid_gate(cb_vm *vm, const cb_op *op) {
    run(vm, op, gate_row);
    cb_report_rows(vm, op, op->sigmoid_gate.y, "op sigmoid_gate: NaN or infinity in the gate of");
}
