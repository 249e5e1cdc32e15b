/* The walk over the program, and what its ops share. */
#include "vm/vm.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SMALL_FLOATS 16384 /* fewer are not worth waking a thread for */

void cb_item_fail(colibri_item *item, colibri_status status, const char *format, ...) {
    item->status = status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(item->message, sizeof item->message, format, arguments);
    va_end(arguments);
}

void cb_row_fail(cb_vm *vm, const cb_op *op, uint32_t row, const char *end, const char *format, ...) {
    colibri_item *item = vm->pass.segments[vm->pass.segment_of[row]].item;
    if (item->status != COLIBRI_OK)
        return;
    char layer[32] = "", text[320];
    if (op->layer != CB_ABSENT)
        snprintf(layer, sizeof layer, "layer %u, ", op->layer);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cb_item_fail(item, COLIBRI_NON_FINITE, "%s%s token position %u%s", layer, text, vm->pass.positions[row], end);
}

void cb_report_rows(cb_vm *vm, const cb_op *op, uint32_t value, const char *format, ...) {
    uint32_t kind = vm->model->program.values[value].kind;
    char text[320] = "";
    for (uint32_t row = 0; row < cb_value_rows(vm, value); row++) {
        if (!vm->row_failed[row])
            continue;
        vm->row_failed[row] = 0;
        if (text[0] == '\0') {
            va_list arguments;
            va_start(arguments, format);
            vsnprintf(text, sizeof text, format, arguments);
            va_end(arguments);
        }
        cb_row_fail(vm, op, cb_pass_row(&vm->pass, kind, row), "", "%s", text);
    }
}

uint32_t cb_pass_row(const cb_pass *pass, uint32_t kind, uint32_t row) {
    return kind == CB_VALUE_OUTPUTS ? pass->outputs[pass->chunk_first + row].row : row;
}

bool cb_pass_abandoned(const cb_pass *pass) {
    for (uint32_t i = 0; i < pass->segment_count; i++) {
        const cb_segment *segment = &pass->segments[i];
        if (segment->item->status == COLIBRI_OK && !atomic_load_explicit(segment->cancel, memory_order_relaxed))
            return false;
    }
    return true;
}

uint32_t cb_value_rows(const cb_vm *vm, uint32_t value) {
    return vm->model->program.values[value].kind == CB_VALUE_OUTPUTS ? vm->pass.chunk_count : vm->pass.rows;
}

typedef struct row_job {
    cb_vm *vm;
    const void *context;
    cb_row_work work;
    uint32_t rows, chunk;
} row_job;

static void row_task(void *context, uint32_t task, uint32_t worker) {
    const row_job *job = context;
    uint32_t first = task * job->chunk;
    uint32_t last = job->rows - first < job->chunk ? job->rows : first + job->chunk;
    for (uint32_t row = first; row < last; row++)
        job->work(job->vm, job->context, row, worker);
}

void cb_for_rows(cb_vm *vm, uint32_t rows, uint64_t floats_per_row, cb_row_work work, const void *context) {
    uint64_t chunk = floats_per_row < SMALL_FLOATS ? SMALL_FLOATS / floats_per_row : 1;
    row_job job = {vm, context, work, rows, (uint32_t)chunk};
    cb_pool_run(vm->pool, (uint32_t)((rows + chunk - 1) / chunk), row_task, &job);
}

/* ---- memory ---- */

void *cb_arena_take(cb_arena *arena, uint64_t count, uint64_t size) {
    uint64_t bytes = cb_multiply(count, size);
    uint64_t start = arena->size;
    if (bytes > PTRDIFF_MAX || start > PTRDIFF_MAX) {
        arena->size = UINT64_MAX;
        return NULL;
    }
    arena->size = start + cb_round_up(bytes, CB_CACHE_LINE);
    return arena->base != NULL ? arena->base + start : NULL;
}

static void plan_pass(cb_vm *vm, cb_arena *arena) {
    cb_pass *pass = &vm->pass;
    pass->tokens = cb_arena_take(arena, vm->max_rows, sizeof *pass->tokens);
    pass->positions = cb_arena_take(arena, vm->max_rows, sizeof *pass->positions);
    pass->segment_of = cb_arena_take(arena, vm->max_rows, sizeof *pass->segment_of);
    pass->segments = cb_arena_take(arena, vm->max_rows, sizeof *pass->segments);
    pass->outputs = cb_arena_take(arena, vm->max_rows, sizeof *pass->outputs);
    vm->row_failed = cb_arena_take(arena, vm->max_rows, 1);
    vm->first_tasks = cb_arena_take(arena, vm->threads, sizeof *vm->first_tasks);
}

static void plan_values(cb_vm *vm, cb_arena *arena) {
    const cb_program *program = &vm->model->program;
    for (uint32_t i = 0; i < program->value_count; i++) {
        const cb_value *value = &program->values[i];
        cb_register *reg = &vm->registers[i];
        uint64_t rows =
            value->kind == CB_VALUE_OUTPUTS && vm->max_rows > CB_OUTPUT_ROWS ? CB_OUTPUT_ROWS : vm->max_rows;
        reg->stride = cb_round_up(value->width, CB_LANES);
        reg->values = cb_arena_take(arena, cb_multiply(rows, reg->stride), sizeof(float));
        if (value->kind == CB_VALUE_ROUTING)
            reg->experts = cb_arena_take(arena, cb_multiply(rows, reg->stride), sizeof(uint32_t));
    }
    uint32_t gathers = 0;
    for (uint32_t i = 0; i < program->op_count; i++) {
        const cb_op *op = &program->ops[i];
        if (op->opcode == CB_OP_GATHER_OUTPUTS)
            vm->gathered[gathers++] = cb_arena_take(
                arena, cb_multiply(vm->max_rows, vm->registers[op->gather_outputs.y].stride), sizeof(float));
    }
}

/* Places for the quantised form of any value that a quantised weight reads. */
static void plan_shadow(cb_vm *vm, cb_arena *arena) {
    const cb_program *program = &vm->model->program;
    uint64_t width = 0;
    for (uint32_t i = 0; i < program->op_count; i++) {
        const cb_op *op = &program->ops[i];
        if (op->opcode == CB_OP_MATMUL || op->opcode == CB_OP_EXPERTS) {
            uint64_t x = program->values[op->words[1]].width;
            width = x > width ? x : width;
        }
    }
    uint64_t padded = cb_round_up(width, CB_ACTIVATION_BLOCK);
    vm->shadow.codes = cb_arena_take(arena, cb_multiply(vm->max_rows, padded), 1);
    vm->shadow.scales =
        cb_arena_take(arena, cb_multiply(vm->max_rows, padded / CB_ACTIVATION_BLOCK), sizeof *vm->shadow.scales);
    vm->shadow.sums = cb_arena_take(arena, cb_multiply(vm->max_rows, padded / 32), sizeof *vm->shadow.sums);
}

static void plan(cb_vm *vm, cb_arena *arena) {
    plan_pass(vm, arena);
    plan_values(vm, arena);
    plan_shadow(vm, arena);
    uint64_t worker_bytes = 0;
    cb_plan_attention(vm, arena, &worker_bytes);
    cb_plan_experts(vm, arena, &worker_bytes);
    cb_plan_route(vm, &worker_bytes);
    cb_plan_prediction(vm, arena);
    vm->worker_bytes = cb_round_up(worker_bytes, CB_CACHE_LINE);
    vm->worker_scratch = cb_arena_take(arena, vm->threads, worker_bytes == UINT64_MAX ? UINT64_MAX : vm->worker_bytes);
}

static colibri_status check_format(const cb_vm *vm, uint32_t format, const char *what, cb_error *error) {
    if (vm->kernels->matmul[format] != NULL)
        return COLIBRI_OK;
    return cb_fail(error, COLIBRI_UNSUPPORTED,
                   "%.200s: %s has format %s, for which this build has no kernel; convert the model again",
                   vm->model->path, what, cb_format_table[format].name);
}

static colibri_status check_formats(const cb_vm *vm, cb_error *error) {
    const cb_model *model = vm->model;
    char what[160];
    for (uint32_t i = 0; i < model->program.op_count; i++) {
        const cb_op *op = &model->program.ops[i];
        if (op->opcode != CB_OP_MATMUL && op->opcode != CB_OP_EMBED)
            continue;
        const cb_tensor *tensor = &model->tensors[op->opcode == CB_OP_MATMUL ? op->matmul.weight : op->embed.table];
        snprintf(what, sizeof what, "tensor '%.100s'", tensor->name);
        if (check_format(vm, tensor->format, what, error) != COLIBRI_OK)
            return error->status;
    }
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t e = 0; e < model->sets[s].count; e++)
            for (int part = 0; part < 3; part++) {
                snprintf(what, sizeof what, "expert %u of layer %u", e, model->sets[s].layer);
                if (check_format(vm, model->sets[s].experts[e].format[part], what, error) != COLIBRI_OK)
                    return error->status;
            }
    return COLIBRI_OK;
}

static bool open_counters(cb_vm *vm) {
    const cb_model *model = vm->model;
    for (int i = 0; i < 2; i++) {
        vm->phases[i].op_nanoseconds =
            cb_alloc(cb_multiply(model->program.layer_count + 1u, CB_OP_LIMIT * sizeof(cb_counter)));
        if (vm->phases[i].op_nanoseconds == NULL)
            return false;
    }
    vm->sets = cb_alloc(cb_multiply(model->set_count, sizeof *vm->sets));
    if (vm->sets == NULL)
        return false;
    for (uint32_t s = 0; s < model->set_count; s++) {
        vm->sets[s].tokens = cb_alloc(cb_multiply(model->sets[s].count, sizeof *vm->sets[s].tokens));
        if (vm->sets[s].tokens == NULL)
            return false;
    }
    return true;
}

static uint32_t count_gathers(const cb_program *program) {
    uint32_t gathers = 0;
    for (uint32_t i = 0; i < program->op_count; i++)
        gathers += program->ops[i].opcode == CB_OP_GATHER_OUTPUTS;
    return gathers;
}

/* Everything but the arena, whose size it plans. */
static colibri_status open_tables(const cb_model *model, const cb_kernels *kernels, uint32_t threads,
                                  const cb_vm_options *options, cb_vm **result, cb_error *error) {
    const cb_program *program = &model->program;
    *result = NULL;
    cb_vm *vm = cb_alloc(sizeof *vm);
    if (vm == NULL)
        return cb_fail(error, COLIBRI_OUT_OF_MEMORY, "not enough memory for an engine");
    vm->model = model;
    vm->kernels = kernels;
    vm->threads = threads;
    vm->max_rows = options->max_rows;
    vm->resident = options->resident;
    cb_arena arena = {0};
    if (check_formats(vm, error) != COLIBRI_OK)
        goto fail;
    vm->ops = cb_alloc(cb_multiply(program->op_count, sizeof *vm->ops));
    vm->registers = cb_alloc(cb_multiply(program->value_count, sizeof *vm->registers));
    vm->gathered = cb_alloc(cb_multiply(count_gathers(program), sizeof *vm->gathered));
    if (vm->ops == NULL || vm->registers == NULL || vm->gathered == NULL || !open_counters(vm) ||
        !cb_open_prediction(vm, options->prefetch_depth)) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY, "%.200s: not enough memory for an engine's tables", model->path);
        goto fail;
    }
    memcpy(vm->ops, program->ops, program->op_count * sizeof *vm->ops);
    cb_order_ops(vm->ops, program->op_count);
    plan(vm, &arena);
    vm->arena_bytes = arena.size;
    *result = vm;
    return COLIBRI_OK;

fail:
    cb_vm_close(vm);
    return error->status;
}

colibri_status cb_vm_plan(const cb_model *model, const cb_kernels *kernels, uint32_t threads,
                          const cb_vm_options *options, uint64_t *arena_bytes, uint64_t *table_bytes, cb_error *error) {
    cb_vm *vm;
    if (open_tables(model, kernels, threads, options, &vm, error) != COLIBRI_OK)
        return error->status;
    *arena_bytes = vm->arena_bytes;
    *table_bytes = sizeof *vm + model->program.value_count * sizeof *vm->registers +
                   count_gathers(&model->program) * sizeof *vm->gathered + model->set_count * sizeof *vm->sets +
                   cb_prediction_table_bytes(vm);
    *table_bytes += model->program.op_count * sizeof *vm->ops +
                    2 * (model->program.layer_count + UINT64_C(1)) * CB_OP_LIMIT * sizeof(cb_counter);
    for (uint32_t s = 0; s < model->set_count; s++)
        *table_bytes += model->sets[s].count * sizeof *vm->sets[s].tokens;
    cb_vm_close(vm);
    return COLIBRI_OK;
}

colibri_status cb_vm_open(const cb_model *model, cb_expert_store *store, const cb_kernels *kernels, cb_pool *pool,
                          const cb_vm_options *options, cb_vm **result, cb_error *error) {
    cb_vm *vm;
    *result = NULL;
    if (open_tables(model, kernels, cb_pool_threads(pool), options, &vm, error) != COLIBRI_OK)
        return error->status;
    vm->store = store;
    vm->pool = pool;
    vm->arena = cb_alloc(vm->arena_bytes);
    if (vm->arena == NULL) {
        cb_fail(error, COLIBRI_OUT_OF_MEMORY,
                "%.200s: not enough memory for %" PRIu64 " bytes to work in; lower max_batch_tokens (now %u)",
                model->path, vm->arena_bytes, options->max_rows);
        cb_vm_close(vm);
        return error->status;
    }
    cb_arena arena = {.base = vm->arena};
    plan(vm, &arena);
    *result = vm;
    return COLIBRI_OK;
}

void cb_vm_close(cb_vm *vm) {
    if (vm == NULL)
        return;
    for (uint32_t s = 0; vm->sets != NULL && s < vm->model->set_count; s++)
        cb_free(vm->sets[s].tokens);
    cb_free(vm->sets);
    for (int i = 0; i < 2; i++)
        cb_free(vm->phases[i].op_nanoseconds);
    cb_close_prediction(vm);
    cb_free(vm->arena);
    cb_free(vm->gathered);
    cb_free(vm->registers);
    cb_free(vm->ops);
    cb_free(vm);
}

/* ---- the walk ---- */

/* Marks items whose cancel flag is up; false when none is left alive. */
static bool poll_items(cb_pass *pass) {
    bool alive = false;
    for (uint32_t i = 0; i < pass->segment_count; i++) {
        const cb_segment *segment = &pass->segments[i];
        if (segment->item->status != COLIBRI_OK)
            continue;
        if (atomic_load_explicit(segment->cancel, memory_order_relaxed))
            cb_item_fail(segment->item, COLIBRI_CANCELLED, "cancelled; the session keeps its position");
        else
            alive = true;
    }
    return alive;
}

static void copy_rows(const cb_pass *pass, float *to, const float *from, uint64_t stride, uint32_t width) {
    for (uint32_t i = 0; i < pass->output_count; i++)
        memcpy(to + i * stride, from + pass->outputs[i].row * stride, width * sizeof(float));
}

static void run_op(cb_vm *vm, const cb_op *ops, uint32_t count) {
    switch (ops->opcode) {
    case CB_OP_EMBED:
        cb_run_embed(vm, ops);
        break;
    case CB_OP_RMS_NORM:
        cb_run_rms_norm(vm, ops);
        break;
    case CB_OP_MATMUL:
        cb_run_matmuls(vm, ops, count);
        break;
    case CB_OP_ROPE_TABLE:
        cb_run_rope_table(vm, ops);
        break;
    case CB_OP_ROPE:
        cb_run_rope(vm, ops);
        break;
    case CB_OP_CLAMP:
        cb_run_clamp(vm, ops);
        break;
    case CB_OP_ATTENTION:
        cb_run_attention(vm, ops);
        break;
    case CB_OP_ROUTE:
        cb_run_route(vm, ops);
        break;
    case CB_OP_EXPERTS:
        cb_run_experts(vm, ops);
        break;
    case CB_OP_GATED_ACTIVATION:
        cb_run_gated_activation(vm, ops);
        break;
    case CB_OP_ADD:
        cb_run_add(vm, ops);
        break;
    case CB_OP_SIGMOID_GATE:
        cb_run_sigmoid_gate(vm, ops);
        break;
    }
    for (uint32_t i = 0; i < count; i++)
        vm->registers[ops[i].words[0]].stamp = ++vm->last_stamp;
}

static void run_timed(cb_vm *vm, const cb_op *ops, uint32_t count) {
    uint32_t layer = ops->layer != CB_ABSENT ? ops->layer : vm->model->program.layer_count;
    uint64_t start = cb_now();
    run_op(vm, ops, count);
    uint64_t end = cb_now();
    cb_count(&vm->phase->op_nanoseconds[layer * CB_OP_LIMIT + ops->opcode], end - start);
    if (ops->opcode == CB_OP_ROUTE)
        vm->routed = end;
}

/* Ops on outputs read no tokens value but through gather_outputs, and nothing reads them back: so the ops on
 * tokens run first, gathering as they pass, and the ops on outputs follow over a few rows at a time. */
static bool walk(cb_vm *vm, bool outputs) {
    const cb_program *program = &vm->model->program;
    uint32_t gathers = 0;
    for (uint32_t i = 0, count; i < program->op_count; i += count) {
        const cb_op *op = &vm->ops[i];
        count = op->opcode == CB_OP_MATMUL ? cb_matmul_group(op, program->op_count - i) : 1;
        bool on_outputs = program->values[op->words[0]].kind == CB_VALUE_OUTPUTS;
        if (op->opcode == CB_OP_GATHER_OUTPUTS) {
            cb_register *y = &vm->registers[op->gather_outputs.y];
            float *gathered = vm->gathered[gathers++];
            const cb_register *x = &vm->registers[op->gather_outputs.x];
            uint32_t width = program->values[op->gather_outputs.y].width;
            if (outputs) {
                memcpy(y->values, gathered + vm->pass.chunk_first * y->stride,
                       vm->pass.chunk_count * y->stride * sizeof(float));
                y->stamp = ++vm->last_stamp;
            } else {
                copy_rows(&vm->pass, gathered, x->values, y->stride, width);
            }
            continue;
        }
        if (on_outputs != outputs)
            continue;
        if (!poll_items(&vm->pass))
            return false;
        if (i + count < program->op_count && op[count].opcode == CB_OP_ROUTE)
            cb_pool_watch(vm->pool); /* for cb_run_dispatched */
        run_timed(vm, op, count);
    }
    return poll_items(&vm->pass); /* tasks of the last op may have been skipped */
}

void cb_vm_run(cb_vm *vm) {
    cb_pass *pass = &vm->pass;
    vm->phase = &vm->phases[pass->rows == pass->segment_count ? COLIBRI_PHASE_DECODE : COLIBRI_PHASE_PROMPT];
    vm->routed = 0;
    uint64_t start = cb_now(), regions = cb_pool_regions(vm->pool);
    cb_count(&vm->phase->passes, 1);
    cb_count(&vm->phase->tokens, pass->rows);
    cb_prediction_start(vm);
    bool alive = walk(vm, false);
    if (alive)
        cb_prediction_end(vm);
    for (uint32_t first = 0; alive && first < pass->output_count; first += CB_OUTPUT_ROWS) {
        uint32_t left = pass->output_count - first;
        pass->chunk_first = first;
        pass->chunk_count = left < CB_OUTPUT_ROWS ? left : CB_OUTPUT_ROWS;
        alive = walk(vm, true);
        if (alive)
            cb_deliver_logits(vm);
    }
    cb_count(&vm->phase->parallel_regions, cb_pool_regions(vm->pool) - regions);
    cb_count(&vm->phase->nanoseconds, cb_now() - start);
}
