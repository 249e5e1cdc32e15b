/* Attention: keys and values into the state, then every query over the keys it sees.
 *
 * A task takes a few neighbouring query tokens of one item and the query heads that share a kv head. Splits of
 * CB_SPLIT_KEYS absolute positions are always computed on their own and merged in order, so it does not matter for
 * the bits whether one task goes through all splits or each has its own task. */
#include "vm/vm.h"

#include <string.h>

#define TASK_ROWS 64 /* query rows of a task, as long as one token has fewer */
#define MAX_QUERY_TOKENS 32
#define PUT_ROWS 16      /* rows of a head that are put into the state together */
#define PARTIAL_ROWS 256 /* (token, split) pairs whose splits may run side by side */
#define SPLIT_BLOCKS (CB_SPLIT_KEYS / CB_KEY_BLOCK)

/* Query rows as (token, head) with their sums so far. */
typedef struct sums {
    float *m, *l, *out; /* [rows], [rows], [rows][value_dim] */
} sums;

typedef struct scratch {
    float *q; /* [rows][key_dim] */
    sums total, split;
    uint8_t *first, *last;
} scratch;

typedef struct attention_job {
    cb_vm *vm;
    const cb_op *op;
    const cb_register *y, *q, *k, *v;
    uint32_t kv_heads, group, key_dim, value_dim, window;
    uint32_t max_tokens; /* of a chunk */
    uint32_t chunk_count;
    uint32_t splits; /* side by side: places for each (chunk, kv head) */
} attention_job;

static uint32_t tokens_of_task(uint32_t group) {
    uint32_t tokens = TASK_ROWS / group;
    return tokens < 1 ? 1 : tokens > MAX_QUERY_TOKENS ? MAX_QUERY_TOKENS : tokens;
}

static sums take_sums(cb_arena *arena, uint64_t rows, uint32_t value_dim) {
    sums s;
    s.m = cb_arena_take(arena, rows, sizeof(float));
    s.l = cb_arena_take(arena, rows, sizeof(float));
    s.out = cb_arena_take(arena, cb_multiply(rows, value_dim), sizeof(float));
    return s;
}

static scratch take_scratch(cb_arena *arena, uint64_t rows, uint32_t key_dim, uint32_t value_dim) {
    scratch s;
    s.q = cb_arena_take(arena, cb_multiply(rows, key_dim), sizeof(float));
    s.total = take_sums(arena, rows, value_dim);
    s.split = take_sums(arena, rows, value_dim);
    s.first = cb_arena_take(arena, rows, 1);
    s.last = cb_arena_take(arena, rows, 1);
    return s;
}

void cb_plan_attention(cb_vm *vm, cb_arena *arena, uint64_t *worker_bytes) {
    const cb_program *program = &vm->model->program;
    uint64_t partial_floats = 0;
    for (uint32_t i = 0; i < program->op_count; i++) {
        const cb_op *op = &program->ops[i];
        if (op->opcode != CB_OP_ATTENTION)
            continue;
        const cb_state_info *state = &program->states[op->attention.cache];
        uint64_t group = op->attention.heads / state->kv_heads;
        cb_arena worker = {0};
        take_scratch(&worker, tokens_of_task((uint32_t)group) * group, state->key_dim, state->value_dim);
        if (worker.size > *worker_bytes)
            *worker_bytes = worker.size;
        uint64_t floats = cb_multiply((uint64_t)op->attention.heads * PARTIAL_ROWS, (uint64_t)state->value_dim + 2);
        if (floats > partial_floats)
            partial_floats = floats;
    }
    vm->query_chunks = cb_arena_take(arena, vm->max_rows, sizeof *vm->query_chunks);
    /* One thread takes the splits one after the other. */
    vm->partial_floats = vm->threads > 1 ? partial_floats : 0;
    vm->partials = cb_arena_take(arena, vm->partial_floats, sizeof *vm->partials);
}

/* ---- keys and values ---- */

static const float *key_of(const attention_job *job, uint32_t row, uint32_t head) {
    return job->k->values + row * job->k->stride + (uint64_t)head * job->key_dim;
}

static const float *value_of(const attention_job *job, uint32_t row, uint32_t head) {
    return job->v->values + row * job->v->stride + (uint64_t)head * job->value_dim;
}

static void put_row(const attention_job *job, uint32_t row, uint32_t head) {
    const cb_vm *vm = job->vm;
    const cb_segment *segment = &vm->pass.segments[vm->pass.segment_of[row]];
    const cb_state_layout *layout = &segment->layout->states[job->op->attention.cache];
    uint32_t position = vm->pass.positions[row], slot = position % CB_KEY_BLOCK;
    uint8_t *data = segment->blocks[position / CB_KEY_BLOCK]->data;
    bool scaled = layout->format == COLIBRI_STATE_Q8;
    float *key_scales = scaled ? (float *)(void *)(data + layout->key_scales) + head * CB_KEY_BLOCK : NULL;
    float *value_scales = scaled ? (float *)(void *)(data + layout->value_scales) + head * CB_KEY_BLOCK : NULL;
    bool key_fits = vm->kernels->put_key(layout->format, data + layout->keys + head * layout->key_head_bytes,
                                         key_scales, slot, key_of(job, row, head), job->key_dim);
    bool value_fits = vm->kernels->put_value(layout->format, data + layout->values + head * layout->value_head_bytes,
                                             value_scales, slot, value_of(job, row, head), job->value_dim);
    if (!key_fits || !value_fits) /* several heads may fail at once */
        __atomic_store_n(&vm->row_failed[row], 1, __ATOMIC_RELAXED);
}

static void prefetch_floats(const float *x, uint32_t count) {
    for (uint32_t i = 0; i < count; i += CB_CACHE_LINE / sizeof *x)
        __builtin_prefetch(x + i);
}

/* Neighbouring keys of a head share cache lines: those lines stay near while PUT_ROWS keys are written. What is read
 * is a short piece of each row, which the hardware does not foresee. */
static void put_head(cb_vm *vm, const void *context, uint32_t task, uint32_t worker) {
    (void)worker;
    const attention_job *job = context;
    uint32_t head = task % job->kv_heads, first = task / job->kv_heads * PUT_ROWS;
    uint32_t end = vm->pass.rows - first < PUT_ROWS ? vm->pass.rows : first + PUT_ROWS;
    for (uint32_t row = first; row < end; row++) {
        prefetch_floats(key_of(job, row, head), job->key_dim);
        prefetch_floats(value_of(job, row, head), job->value_dim);
    }
    for (uint32_t row = first; row < end; row++)
        put_row(job, row, head);
}

static void put_rows(const attention_job *job) {
    cb_vm *vm = job->vm;
    uint32_t k_width = job->kv_heads * job->key_dim, v_width = job->kv_heads * job->value_dim;
    uint32_t rows = vm->pass.rows, together = rows < PUT_ROWS ? rows : PUT_ROWS;
    uint32_t tasks = (rows + PUT_ROWS - 1) / PUT_ROWS * job->kv_heads;
    cb_for_rows(vm, tasks, ((uint64_t)job->key_dim + job->value_dim) * together, put_head, job);
    for (uint32_t row = 0; row < vm->pass.rows; row++) {
        if (!vm->row_failed[row])
            continue;
        vm->row_failed[row] = 0;
        if (vm->kernels->all_finite(job->k->values + row * job->k->stride, k_width) &&
            vm->kernels->all_finite(job->v->values + row * job->v->stride, v_width))
            cb_row_fail(vm, job->op, row, " does not fit the f16 state; use kv='f32'",
                        "op attention: a key or value of");
        else
            cb_row_fail(vm, job->op, row, "", "op attention: NaN or infinity in a key or value of");
    }
}

/* ---- queries ---- */

/* Absolute keys [first, last) that the query at `position` sees. */
static uint32_t first_key(const attention_job *job, uint32_t position) {
    return job->window != 0 && position >= job->window ? position + 1 - job->window : 0;
}

static uint32_t in_block(uint32_t key, uint32_t start) {
    return key <= start ? 0 : key - start < CB_KEY_BLOCK ? key - start : CB_KEY_BLOCK;
}

static uint32_t chunk_position(const attention_job *job, const cb_query_chunk *chunk) {
    return job->vm->pass.positions[chunk->first_row];
}

static uint32_t first_split(const attention_job *job, const cb_query_chunk *chunk) {
    return first_key(job, chunk_position(job, chunk)) / CB_SPLIT_KEYS;
}

static uint32_t split_count(const attention_job *job, const cb_query_chunk *chunk) {
    return (chunk_position(job, chunk) + chunk->count - 1) / CB_SPLIT_KEYS - first_split(job, chunk) + 1;
}

static void gather_queries(const attention_job *job, const cb_query_chunk *chunk, uint32_t head, float *q) {
    uint64_t width = (uint64_t)job->group * job->key_dim;
    for (uint32_t t = 0; t < chunk->count; t++)
        memcpy(q + t * width, job->q->values + (chunk->first_row + t) * job->q->stride + head * width,
               width * sizeof(float));
}

/* Fills `sums` from the keys of one split. */
static void attend_split(const attention_job *job, const cb_query_chunk *chunk, uint32_t head, uint32_t split,
                         const scratch *s, sums *sums) {
    const cb_vm *vm = job->vm;
    const cb_segment *segment = &vm->pass.segments[chunk->segment];
    const cb_state_layout *layout = &segment->layout->states[job->op->attention.cache];
    uint32_t position = chunk_position(job, chunk), rows = chunk->count * job->group;
    for (uint32_t i = 0; i < rows; i++) {
        sums->m[i] = -__builtin_inff();
        sums->l[i] = 0.0f;
    }
    memset(sums->out, 0, (uint64_t)rows * job->value_dim * sizeof(float));
    uint32_t block = first_key(job, position) / CB_KEY_BLOCK;
    uint32_t end = (position + chunk->count - 1) / CB_KEY_BLOCK + 1;
    block = block > split * SPLIT_BLOCKS ? block : split * SPLIT_BLOCKS;
    end = end < (split + 1) * SPLIT_BLOCKS ? end : (split + 1) * SPLIT_BLOCKS;
    for (; block < end; block++) {
        uint32_t start = block * CB_KEY_BLOCK;
        for (uint32_t t = 0; t < chunk->count; t++) {
            uint32_t first = in_block(first_key(job, position + t), start);
            uint32_t last = in_block(position + t + 1, start);
            memset(s->first + t * job->group, (int)first, job->group);
            memset(s->last + t * job->group, (int)last, job->group);
        }
        const uint8_t *data = segment->blocks[block]->data;
        const uint8_t *next =
            block + 1 < end ? segment->blocks[block + 1]->data + layout->keys + head * layout->key_head_bytes : NULL;
        cb_attention_block block_job = {
            .q = s->q,
            .q_stride = job->key_dim,
            .k = data + layout->keys + head * layout->key_head_bytes,
            .v = data + layout->values + head * layout->value_head_bytes,
            .key_dim = job->key_dim,
            .value_dim = job->value_dim,
            .scale = job->op->attention.scale,
            .count = rows,
            .first = s->first,
            .last = s->last,
            .m = sums->m,
            .l = sums->l,
            .out = sums->out,
            .out_stride = job->value_dim,
            .format = layout->format,
            .key_scales = (const float *)(const void *)(data + layout->key_scales) + head * CB_KEY_BLOCK,
            .value_scales = (const float *)(const void *)(data + layout->value_scales) + head * CB_KEY_BLOCK,
            .next_k = next};
        vm->kernels->attention_block(&block_job);
    }
}

static void merge_sums(const attention_job *job, uint32_t rows, sums *total, const sums *split) {
    for (uint32_t i = 0; i < rows; i++)
        job->vm->kernels->attention_merge(&total->m[i], &total->l[i], total->out + (uint64_t)i * job->value_dim,
                                          split->m[i], split->l[i], split->out + (uint64_t)i * job->value_dim,
                                          job->value_dim);
}

static void finish(const attention_job *job, const cb_query_chunk *chunk, uint32_t head, const sums *total) {
    for (uint32_t t = 0; t < chunk->count; t++) {
        float *y =
            job->y->values + (chunk->first_row + t) * job->y->stride + (uint64_t)head * job->group * job->value_dim;
        bool finite = true;
        for (uint32_t g = 0; g < job->group; g++) {
            uint64_t i = (uint64_t)t * job->group + g;
            finite &= job->vm->kernels->attention_finish(y + (uint64_t)g * job->value_dim,
                                                         total->out + i * job->value_dim, total->l[i], job->value_dim);
        }
        if (!finite) /* several heads may fail at once */
            __atomic_store_n(&job->vm->row_failed[chunk->first_row + t], 1, __ATOMIC_RELAXED);
    }
}

static scratch worker_scratch(const attention_job *job, uint32_t worker) {
    cb_arena arena = {.base = cb_worker(job->vm, worker)};
    return take_scratch(&arena, (uint64_t)job->max_tokens * job->group, job->key_dim, job->value_dim);
}

/* One (chunk, kv head), splits in turn. */
static void attend_task(void *context, uint32_t task, uint32_t worker) {
    const attention_job *job = context;
    if (cb_pass_abandoned(&job->vm->pass))
        return;
    const cb_query_chunk *chunk = &job->vm->query_chunks[task / job->kv_heads];
    uint32_t head = task % job->kv_heads, rows = chunk->count * job->group;
    scratch s = worker_scratch(job, worker);
    gather_queries(job, chunk, head, s.q);
    uint32_t first = first_split(job, chunk), count = split_count(job, chunk);
    attend_split(job, chunk, head, first, &s, &s.total);
    for (uint32_t i = 1; i < count; i++) {
        attend_split(job, chunk, head, first + i, &s, &s.split);
        merge_sums(job, rows, &s.total, &s.split);
    }
    finish(job, chunk, head, &s.total);
}

static uint64_t partial_size(const attention_job *job) {
    return (uint64_t)job->max_tokens * job->group * (job->value_dim + UINT64_C(2));
}

static sums partial_of(const attention_job *job, uint64_t index) {
    uint64_t rows = (uint64_t)job->max_tokens * job->group;
    float *at = job->vm->partials + index * partial_size(job);
    return (sums){at, at + rows, at + 2 * rows};
}

/* One (chunk, kv head, split). */
static void split_task(void *context, uint32_t task, uint32_t worker) {
    const attention_job *job = context;
    uint32_t pair = task / job->splits, split = task % job->splits;
    const cb_query_chunk *chunk = &job->vm->query_chunks[pair / job->kv_heads];
    if (split >= split_count(job, chunk) || cb_pass_abandoned(&job->vm->pass))
        return;
    scratch s = worker_scratch(job, worker);
    sums partial = partial_of(job, task);
    gather_queries(job, chunk, pair % job->kv_heads, s.q);
    attend_split(job, chunk, pair % job->kv_heads, first_split(job, chunk) + split, &s, &partial);
}

static void merge_task(void *context, uint32_t pair, uint32_t worker) {
    (void)worker;
    const attention_job *job = context;
    const cb_query_chunk *chunk = &job->vm->query_chunks[pair / job->kv_heads];
    sums total = partial_of(job, (uint64_t)pair * job->splits);
    for (uint32_t i = 1; i < split_count(job, chunk); i++) {
        sums split = partial_of(job, (uint64_t)pair * job->splits + i);
        merge_sums(job, chunk->count * job->group, &total, &split);
    }
    finish(job, chunk, pair % job->kv_heads, &total);
}

static void cut_queries(attention_job *job) {
    const cb_pass *pass = &job->vm->pass;
    uint32_t most = tokens_of_task(job->group);
    for (uint32_t i = 0; i < pass->segment_count; i++) {
        const cb_segment *segment = &pass->segments[i];
        if (segment->item->status != COLIBRI_OK)
            continue;
        for (uint32_t done = 0; done < segment->count; done += most) {
            uint32_t left = segment->count - done, count = left < most ? left : most;
            cb_query_chunk *chunk = &job->vm->query_chunks[job->chunk_count++];
            *chunk = (cb_query_chunk){i, segment->first_row + done, count};
            uint32_t splits = split_count(job, chunk);
            job->splits = splits > job->splits ? splits : job->splits;
            job->max_tokens = count > job->max_tokens ? count : job->max_tokens;
        }
    }
}

void cb_run_attention(cb_vm *vm, const cb_op *op) {
    const cb_state_info *state = &vm->model->program.states[op->attention.cache];
    attention_job job = {.vm = vm,
                         .op = op,
                         .y = &vm->registers[op->attention.y],
                         .q = &vm->registers[op->attention.q],
                         .k = &vm->registers[op->attention.k],
                         .v = &vm->registers[op->attention.v],
                         .kv_heads = state->kv_heads,
                         .group = op->attention.heads / state->kv_heads,
                         .key_dim = state->key_dim,
                         .value_dim = state->value_dim,
                         .window = op->attention.window};
    put_rows(&job);
    cut_queries(&job);
    uint32_t pairs = job.chunk_count * job.kv_heads;
    bool too_few = job.splits > 1 && pairs < 4 * vm->threads;
    uint64_t tasks = (uint64_t)pairs * job.splits;
    if (too_few && tasks <= UINT32_MAX && cb_multiply(tasks, partial_size(&job)) <= vm->partial_floats) {
        cb_pool_run(vm->pool, (uint32_t)tasks, split_task, &job);
        cb_pool_run(vm->pool, pairs, merge_task, &job);
    } else {
        cb_pool_run(vm->pool, pairs, attend_task, &job);
    }
    cb_report_rows(vm, op, op->attention.y, "op attention: NaN or infinity in the scores or the result of");
}
