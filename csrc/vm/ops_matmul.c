/* Matrix times rows. Neighbouring matmuls of one input run as one parallel region. */
#include "vm/vm.h"

#include <string.h>

#define TASK_BYTES (32 * 1024)
#define TASKS_PER_THREAD 8
#define MAX_WIDE_TILES 16 /* for many rows: so few tiles stay in the cache while the row chunks pass */

cb_matrix cb_matrix_make(const uint8_t *tiles, uint32_t format, uint64_t rows, uint64_t k) {
    uint32_t layout = cb_is_quantised(format) ? CB_LAYOUT_TILED16X4 : CB_LAYOUT_TILED16;
    return (cb_matrix){tiles, format, (uint32_t)rows, (uint32_t)k, cb_packed_size(format, layout, CB_LANES, k)};
}

cb_rows cb_rows_from(const cb_rows *x, uint64_t first, uint32_t k) {
    cb_rows rows = *x;
    uint64_t padded = cb_round_up(k, CB_ACTIVATION_BLOCK);
    if (rows.values != NULL)
        rows.values += first * rows.stride;
    if (rows.codes != NULL) {
        rows.codes += first * padded;
        rows.scales += first * (padded / CB_ACTIVATION_BLOCK);
        rows.sums += first * (padded / 32);
    }
    return rows;
}

void cb_multiply_tiles(const cb_vm *vm, const cb_matrix *matrix, uint32_t tile, uint32_t tiles, const cb_rows *x,
                       const uint32_t *index, uint32_t count, float *out, uint64_t out_stride) {
    uint32_t first = tile * CB_LANES, left = matrix->rows - first;
    cb_matmul job = {.tiles = matrix->tiles + tile * matrix->tile_bytes,
                     .rows = left / CB_LANES < tiles ? left : tiles * CB_LANES,
                     .k = matrix->k,
                     .x = x,
                     .index = index,
                     .count = count,
                     .out = out + first,
                     .out_stride = out_stride};
    vm->kernels->matmul[matrix->format](&job);
}

void cb_note_matmul(cb_vm *vm, uint32_t format) {
    atomic_store_explicit(&vm->matmul_names[format], vm->kernels->matmul_name[format], memory_order_relaxed);
}

cb_row_chunks cb_cut_rows(uint32_t rows) {
    uint32_t count = (rows + CB_ROW_CHUNK - 1) / CB_ROW_CHUNK;
    uint32_t each = count == 0 ? 0 : (rows + count - 1) / count;
    return (cb_row_chunks){count, (uint32_t)cb_round_up(each, CB_LANES)};
}

uint32_t cb_task_tiles(const cb_vm *vm, uint64_t all_tiles, uint64_t tile_bytes) {
    uint64_t least = (TASK_BYTES + tile_bytes - 1) / tile_bytes;
    uint64_t fair = all_tiles / ((uint64_t)vm->threads * TASKS_PER_THREAD);
    return (uint32_t)(fair > least ? fair : least);
}

/* ---- the input ---- */

typedef struct prepare_job {
    const cb_register *x;
    uint32_t width;
    bool quantise;
} prepare_job;

static void prepare_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const prepare_job *job = context;
    const float *x = job->x->values + row * job->x->stride;
    uint64_t padded = cb_round_up(job->width, CB_ACTIVATION_BLOCK);
    bool finite = job->quantise ? vm->kernels->quantise_row(x, job->width, vm->shadow.codes + row * padded,
                                                            vm->shadow.scales + row * (padded / CB_ACTIVATION_BLOCK),
                                                            vm->shadow.sums + row * (padded / 32))
                                : vm->kernels->all_finite(x, job->width);
    vm->row_failed[row] = !finite;
}

void cb_prepare_rows(cb_vm *vm, const cb_op *op, uint32_t value, bool quantise, const char *what, const char *name) {
    const cb_register *x = &vm->registers[value];
    const cb_value *info = &vm->model->program.values[value];
    if (vm->shadow.stamp == x->stamp || (!quantise && vm->finite_stamp == x->stamp))
        return;
    uint32_t rows = cb_value_rows(vm, value);
    prepare_job job = {x, info->width, quantise};
    cb_for_rows(vm, rows, info->width, prepare_row, &job);
    cb_report_rows(vm, op, value, "op %s%s: NaN or infinity in the input of", what, name);
    vm->finite_stamp = x->stamp;
    if (quantise)
        vm->shadow.stamp = x->stamp;
}

/* ---- the product ---- */

typedef struct part {
    cb_matrix matrix;
    const float *bias; /* or NULL */
    float *out;
    uint64_t out_stride;
    uint32_t task_tiles, first_task;
} part;

typedef struct matmul_job {
    cb_vm *vm;
    cb_rows x;
    uint32_t rows, part_count;
    cb_row_chunks chunks;
    part parts[CB_MAX_GROUP];
} matmul_job;

static void matmul_task(void *context, uint32_t task, uint32_t worker) {
    (void)worker;
    const matmul_job *job = context;
    if (cb_pass_abandoned(&job->vm->pass))
        return;
    const part *p = &job->parts[job->part_count - 1];
    while (task < p->first_task)
        p--;
    task -= p->first_task;
    uint32_t tile = task / job->chunks.count * p->task_tiles, all = cb_tiles(&p->matrix);
    uint32_t tiles = all - tile < p->task_tiles ? all - tile : p->task_tiles;
    uint32_t row = task % job->chunks.count * job->chunks.rows;
    uint32_t rows = job->rows - row < job->chunks.rows ? job->rows - row : job->chunks.rows;
    cb_rows x = cb_rows_from(&job->x, row, p->matrix.k);
    float *out = p->out + row * p->out_stride;
    cb_multiply_tiles(job->vm, &p->matrix, tile, tiles, &x, NULL, rows, out, p->out_stride);
    if (p->bias == NULL)
        return;
    uint32_t first = tile * CB_LANES, left = p->matrix.rows - first;
    uint32_t width = left / CB_LANES < tiles ? left : tiles * CB_LANES;
    for (uint32_t i = 0; i < rows; i++) {
        float *y = out + i * p->out_stride + first;
        job->vm->kernels->add(y, y, p->bias + first, width);
    }
}

/* Matmuls never write what they read, so ops of one input are independent unless they write the same value. */
uint32_t cb_matmul_group(const cb_op *ops, uint32_t left) {
    uint32_t count = 1;
    for (; count < left && count < CB_MAX_GROUP; count++) {
        const cb_op *next = &ops[count];
        if (next->opcode != CB_OP_MATMUL || next->matmul.x != ops->matmul.x)
            break;
        for (uint32_t i = 0; i < count; i++)
            if (ops[i].matmul.y == next->matmul.y)
                return count;
    }
    return count;
}

void cb_run_matmuls(cb_vm *vm, const cb_op *ops, uint32_t count) {
    const cb_model *model = vm->model;
    uint32_t value = ops->matmul.x;
    const cb_register *x = &vm->registers[value];
    matmul_job job = {.vm = vm, .rows = cb_value_rows(vm, value), .part_count = count};
    job.chunks = cb_cut_rows(job.rows);
    bool quantise = false;
    uint64_t all_tiles = 0;
    for (uint32_t i = 0; i < count; i++) {
        const cb_tensor *weight = &model->tensors[ops[i].matmul.weight];
        part *p = &job.parts[i];
        p->matrix = cb_matrix_make(weight->data, weight->format, weight->rows, weight->cols);
        p->bias = ops[i].matmul.bias == CB_ABSENT
                      ? NULL
                      : (const float *)(const void *)model->tensors[ops[i].matmul.bias].data;
        p->out = vm->registers[ops[i].matmul.y].values;
        p->out_stride = vm->registers[ops[i].matmul.y].stride;
        quantise |= cb_is_quantised(weight->format);
        all_tiles += cb_tiles(&p->matrix);
        cb_note_matmul(vm, weight->format);
    }
    char name[128];
    const char *first_name = model->tensors[ops->matmul.weight].name;
    size_t length = strnlen(first_name, sizeof name - 4);
    name[0] = ' ';
    name[1] = '\'';
    memcpy(name + 2, first_name, length);
    memcpy(name + 2 + length, "'", 2);
    cb_prepare_rows(vm, ops, value, quantise, "matmul", name);
    job.x = (cb_rows){.values = x->values,
                      .stride = x->stride,
                      .codes = vm->shadow.codes,
                      .scales = vm->shadow.scales,
                      .sums = vm->shadow.sums};
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < count; i++) {
        part *p = &job.parts[i];
        p->task_tiles = cb_task_tiles(vm, all_tiles, p->matrix.tile_bytes);
        if (job.chunks.count > 1 && p->task_tiles > MAX_WIDE_TILES)
            p->task_tiles = MAX_WIDE_TILES;
        p->first_task = tasks;
        tasks += (cb_tiles(&p->matrix) + p->task_tiles - 1) / p->task_tiles * job.chunks.count;
    }
    cb_pool_run(vm->pool, tasks, matmul_task, &job);
}
