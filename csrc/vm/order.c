/* The order in which ops run: the program's, but for matmuls that move forward to another of the same input, so that
 * they run as one parallel region (q, k and v, whose norms and rotations stand between them). */
#include "vm/vm.h"

static bool uses(const cb_op *op, uint32_t value, bool reads) {
    const cb_op_info *info = &cb_op_table[op->opcode];
    for (uint32_t i = 0; i < info->operand_count; i++) {
        bool out = info->operands[i].kind == CB_OPERAND_OUT, in = info->operands[i].kind == CB_OPERAND_IN;
        if ((out || (in && reads)) && op->words[i] == value)
            return true;
    }
    return false;
}

/* `matmul` gives the same before `op` as after it. */
static bool may_pass(const cb_op *matmul, const cb_op *op) {
    return !uses(op, matmul->matmul.x, false) && !uses(op, matmul->matmul.y, true);
}

static void move_forward(cb_op *ops, uint32_t from, uint32_t to) {
    cb_op moved = ops[from];
    for (uint32_t i = from; i > to; i--)
        ops[i] = ops[i - 1];
    ops[to] = moved;
}

void cb_order_ops(cb_op *ops, uint32_t count) {
    for (uint32_t i = 0, group; i < count; i += group) {
        group = ops[i].opcode == CB_OP_MATMUL ? cb_matmul_group(&ops[i], count - i) : 1;
        if (ops[i].opcode != CB_OP_MATMUL)
            continue;
        for (uint32_t j = i + group; j < count && ops[j].layer == ops[i].layer && group < CB_MAX_GROUP; j++) {
            bool passes = ops[j].opcode == CB_OP_MATMUL && ops[j].matmul.x == ops[i].matmul.x;
            for (uint32_t k = i; passes && k < j; k++)
                passes = may_pass(&ops[j], &ops[k]);
            if (passes)
                move_forward(ops, j, i + group++);
        }
    }
}
