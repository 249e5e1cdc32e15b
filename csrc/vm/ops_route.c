/* The router's choice: probabilities of all experts, the best of them with their weights. */
#include "vm/vm.h"

#include <string.h>

void cb_plan_route(const cb_vm *vm, uint64_t *worker_bytes) {
    const cb_program *program = &vm->model->program;
    for (uint32_t i = 0; i < program->op_count; i++) {
        const cb_op *op = &program->ops[i];
        if (op->opcode == CB_OP_ROUTE && program->values[op->route.logits].width * sizeof(float) > *worker_bytes)
            *worker_bytes = program->values[op->route.logits].width * sizeof(float);
    }
}

static void route_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    const cb_op *op = context;
    const cb_register *logits = &vm->registers[op->route.logits], *routing = &vm->registers[op->route.routing];
    uint32_t count = vm->model->program.values[op->route.logits].width;
    uint32_t chosen = vm->model->program.values[op->route.routing].width;
    float *p = cb_worker(vm, worker), *weights = routing->values + row * routing->stride;
    uint32_t *experts = routing->experts + row * routing->stride;
    memcpy(p, logits->values + row * logits->stride, count * sizeof(float));
    if (!vm->kernels->all_finite(p, count)) {
        vm->row_failed[row] = 1;
        return;
    }
    vm->kernels->softmax(p, count);
    float sum = 0.0f;
    for (uint32_t rank = 0; rank < chosen; rank++) {
        uint32_t best = 0;
        for (uint32_t i = 1; i < count; i++)
            if (p[i] > p[best])
                best = i;
        experts[rank] = best;
        weights[rank] = p[best];
        sum = rank == 0 ? p[best] : sum + p[best];
        p[best] = -1.0f; /* below every probability: taken */
    }
    for (uint32_t rank = 0; rank < chosen; rank++) {
        float weight = op->route.normalise == CB_FLAG_YES ? weights[rank] / sum : weights[rank];
        weights[rank] = weight * op->route.scale;
    }
}

void cb_run_route(cb_vm *vm, const cb_op *op) {
    uint64_t width = vm->model->program.values[op->route.logits].width;
    uint64_t chosen = vm->model->program.values[op->route.routing].width;
    cb_for_rows(vm, vm->pass.rows, width * (chosen + 4), route_row, op);
    cb_report_rows(vm, op, op->route.logits, "op route: NaN or infinity in the router's logits of");
}
