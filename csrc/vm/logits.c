/* What becomes of a row of logits. */
#include "vm/vm.h"

#include <string.h>

float cb_log_softmax(const cb_kernels *kernels, float *logits, uint32_t n, float *largest) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    *largest = logits[best];
    kernels->softmax(logits, n);
    return cb_log(logits[best]);
}

static void deliver_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)context;
    (void)worker;
    const cb_output *output = &vm->pass.outputs[vm->pass.chunk_first + row];
    const cb_register *reg = &vm->registers[vm->model->program.logits];
    uint32_t width = vm->model->program.vocabulary_size;
    float *logits = reg->values + row * reg->stride;
    vm->row_failed[row] = 0;
    if (!cb_row_alive(&vm->pass, output->row))
        return;
    if (!vm->kernels->all_finite(logits, width)) {
        vm->row_failed[row] = 1;
    } else if (output->score != NULL) {
        float next = logits[output->next], largest;
        float base = cb_log_softmax(vm->kernels, logits, width, &largest);
        *output->score = (next - largest) + base;
    } else {
        memcpy(output->logits, logits, width * sizeof(float));
    }
}

void cb_deliver_logits(cb_vm *vm) {
    const cb_op outside = {.layer = CB_ABSENT};
    cb_for_rows(vm, vm->pass.chunk_count, vm->model->program.vocabulary_size, deliver_row, NULL);
    for (uint32_t row = 0; row < vm->pass.chunk_count; row++) {
        if (vm->row_failed[row])
            cb_row_fail(vm, &outside, vm->pass.outputs[vm->pass.chunk_first + row].row, "",
                        "output 'logits': NaN or infinity at");
        vm->row_failed[row] = 0;
    }
}
