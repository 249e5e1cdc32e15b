/* The chosen experts of every token: tokens are sorted by expert, so that an expert's weights are read once.
 *
 * A slot is one (token, expert) pair. Slots lie in the order of experts, then tokens, and have a row of outputs each; a
 * token's outputs are added up in the order of their rank when all are there. The store hands experts out in the order
 * in which they are in memory; those that come together are a batch, whose slots have rows of hidden values. With every
 * expert in memory, one batch is all. */
#include "vm/vm.h"

#include <string.h>

#ifndef EXPERTS_AT_ONCE
#define EXPERTS_AT_ONCE UINT32_MAX /* that share a queue of tasks; bench/grouped.c measures against 1 */
#endif
#define SLOT_LIMIT (UINT64_C(64) << 20) /* bytes of slots; more tokens are taken in several rounds */
#define MAX_TASK_TILES 16               /* of gate and up: bounds the scratch of a task */
/* A batch takes no further expert once it has so many slots: there is work for every thread, and the memory of an
 * expert that is done takes the next one all the sooner. */
#define STREAM_BATCH 128

typedef struct active_expert {
    uint32_t expert, first_slot, count;
    uint32_t first_hidden; /* in its batch */
    uint32_t first_task;
    cb_row_chunks chunks;
    cb_matrix gate, up, down;
} active_expert;

typedef struct slots {
    float *hidden, *out; /* [hidden_limit][hidden_stride], [slots][out_stride] */
    uint64_t hidden_stride, out_stride;
    int8_t *codes; /* of hidden */
    float *scales;
    int16_t *sums;
    uint32_t hidden_limit;
    uint32_t *hidden_slot; /* [hidden_limit] whose hidden values */
    uint32_t *row;         /* [slots] pass row of the token */
    uint32_t *active_of;   /* [slots] */
    uint32_t *slot_of;     /* [tokens][chosen] */
    uint32_t *place;       /* [experts] */
    uint8_t *hidden_failed, *out_failed;
    active_expert *active; /* [experts] */
    uint32_t *asked;       /* [experts] as the store is asked for them, */
    uint32_t *asked_for;   /* and which active expert each is */
    uint32_t *batch;       /* [experts] active experts computed together */
    cb_store_ready *ready; /* [experts] */
} slots;

typedef struct experts_job {
    cb_vm *vm;
    const cb_op *op;
    const cb_expert_set *set;
    const cb_register *routing, *y;
    cb_rows x;
    uint32_t chosen;
    uint32_t first_row, rows; /* of this round */
    uint32_t slot_count, active_count;
    uint32_t batch_count, hidden_count, task_tiles;
    slots s;
} experts_job;

static uint64_t slot_bytes(const cb_expert_set *set) {
    uint64_t padded = cb_round_up(set->ffn, CB_ACTIVATION_BLOCK);
    return (cb_round_up(set->ffn, CB_LANES) + cb_round_up(set->width, CB_LANES)) * sizeof(float) + padded +
           padded / CB_ACTIVATION_BLOCK * sizeof(float) + padded / 32 * sizeof(int16_t);
}

/* Tokens whose slots stay under the limit. Experts that are read from the file are read once for all tokens. */
static uint32_t most_tokens(const cb_vm *vm, const cb_expert_set *set, uint32_t chosen) {
    if (!vm->resident)
        return vm->max_rows;
    uint64_t most = SLOT_LIMIT / (slot_bytes(set) * chosen);
    return most < 1 ? 1 : most < vm->max_rows ? (uint32_t)most : vm->max_rows;
}

static slots take_slots(const cb_vm *vm, cb_arena *arena, const cb_expert_set *set, uint32_t chosen, uint32_t tokens) {
    uint64_t count = (uint64_t)tokens * chosen, padded = cb_round_up(set->ffn, CB_ACTIVATION_BLOCK);
    uint64_t hidden = count;
    if (!vm->resident) { /* an expert has at most one slot of each token */
        hidden = tokens > 2 * STREAM_BATCH ? tokens : 2 * STREAM_BATCH;
        hidden = hidden < count ? hidden : count;
    }
    slots s = {.hidden_stride = cb_round_up(set->ffn, CB_LANES),
               .out_stride = cb_round_up(set->width, CB_LANES),
               .hidden_limit = (uint32_t)hidden};
    s.hidden = cb_arena_take(arena, cb_multiply(hidden, s.hidden_stride), sizeof(float));
    s.out = cb_arena_take(arena, cb_multiply(count, s.out_stride), sizeof(float));
    s.codes = cb_arena_take(arena, cb_multiply(hidden, padded), 1);
    s.scales = cb_arena_take(arena, cb_multiply(hidden, padded / CB_ACTIVATION_BLOCK), sizeof *s.scales);
    s.sums = cb_arena_take(arena, cb_multiply(hidden, padded / 32), sizeof *s.sums);
    s.hidden_slot = cb_arena_take(arena, hidden, sizeof *s.hidden_slot);
    s.row = cb_arena_take(arena, count, sizeof *s.row);
    s.active_of = cb_arena_take(arena, count, sizeof *s.active_of);
    s.slot_of = cb_arena_take(arena, count, sizeof *s.slot_of);
    s.place = cb_arena_take(arena, set->count, sizeof *s.place);
    s.hidden_failed = cb_arena_take(arena, count, 1);
    s.out_failed = cb_arena_take(arena, count, 1);
    s.active = cb_arena_take(arena, set->count, sizeof *s.active);
    s.asked = cb_arena_take(arena, set->count, sizeof *s.asked);
    s.asked_for = cb_arena_take(arena, set->count, sizeof *s.asked_for);
    s.batch = cb_arena_take(arena, set->count, sizeof *s.batch);
    s.ready = cb_arena_take(arena, set->count, sizeof *s.ready);
    return s;
}

void cb_plan_experts(cb_vm *vm, cb_arena *arena, uint64_t *worker_bytes) {
    const cb_model *model = vm->model;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->program.op_count; i++) {
        const cb_op *op = &model->program.ops[i];
        if (op->opcode != CB_OP_EXPERTS)
            continue;
        const cb_expert_set *set = &model->sets[op->experts.set];
        uint32_t chosen = model->program.values[op->experts.routing].width;
        cb_arena needed = {0};
        take_slots(vm, &needed, set, chosen, most_tokens(vm, set, chosen));
        bytes = needed.size > bytes ? needed.size : bytes;
    }
    vm->expert_scratch = cb_arena_take(arena, bytes, 1);
    uint64_t up_bytes = (uint64_t)CB_ROW_CHUNK * MAX_TASK_TILES * CB_LANES * sizeof(float);
    if (bytes > 0 && up_bytes > *worker_bytes)
        *worker_bytes = up_bytes;
}

/* ---- sorting ---- */

/* A counting sort of the live rows of the round. */
static void sort_tokens(experts_job *job) {
    const slots *s = &job->s;
    const cb_pass *pass = &job->vm->pass;
    memset(s->place, 0, job->set->count * sizeof *s->place);
    for (uint32_t i = 0; i < job->rows; i++) {
        const uint32_t *experts = job->routing->experts + (job->first_row + i) * job->routing->stride;
        if (cb_row_alive(pass, job->first_row + i))
            for (uint32_t r = 0; r < job->chosen; r++)
                s->place[experts[r]]++;
    }
    job->slot_count = job->active_count = 0;
    for (uint32_t e = 0; e < job->set->count; e++) {
        uint32_t count = s->place[e];
        s->place[e] = job->slot_count;
        if (count == 0)
            continue;
        active_expert *a = &s->active[job->active_count];
        a->first_slot = job->slot_count;
        a->count = count;
        a->expert = e;
        for (uint32_t i = 0; i < count; i++)
            s->active_of[job->slot_count++] = job->active_count;
        job->active_count++;
    }
    for (uint32_t i = 0; i < job->rows; i++) {
        uint32_t row = job->first_row + i;
        const uint32_t *experts = job->routing->experts + row * job->routing->stride;
        if (!cb_row_alive(pass, row))
            continue;
        for (uint32_t r = 0; r < job->chosen; r++) {
            uint32_t slot = s->place[experts[r]]++;
            s->row[slot] = row;
            s->slot_of[(uint64_t)i * job->chosen + r] = slot;
        }
    }
}

/* The order to ask in: experts with many tokens first, so that little is left to compute when the last has come. */
static void order_experts(experts_job *job) {
    uint32_t all = 0, asked = 0;
    for (uint32_t i = 0; i < job->active_count; i++)
        all |= job->s.active[i].count;
    /* By powers of two is good enough. */
    for (uint32_t power = UINT32_C(1) << 31; power != 0; power >>= 1) {
        if (power > all)
            continue;
        for (uint32_t i = 0; i < job->active_count; i++) {
            uint32_t count = job->s.active[i].count;
            if (count < power || count / 2 >= power)
                continue;
            job->s.asked[asked] = job->s.active[i].expert;
            job->s.asked_for[asked++] = i;
        }
    }
}

/* ---- a batch ---- */

/* Numbers the tasks of (expert, tiles, row chunk) and returns how many there are. */
static uint32_t cut_tasks(experts_job *job, bool down) {
    uint64_t all_tiles = 0, least_bytes = UINT64_MAX;
    for (uint32_t i = 0; i < job->batch_count; i++) {
        const active_expert *a = &job->s.active[job->s.batch[i]];
        const cb_matrix *matrix = down ? &a->down : &a->gate;
        uint64_t bytes = down ? matrix->tile_bytes : matrix->tile_bytes + a->up.tile_bytes;
        all_tiles += cb_tiles(matrix);
        least_bytes = bytes < least_bytes ? bytes : least_bytes;
    }
    job->task_tiles = cb_task_tiles(job->vm, all_tiles, least_bytes);
    if (job->task_tiles > MAX_TASK_TILES)
        job->task_tiles = MAX_TASK_TILES;
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < job->batch_count; i++) {
        active_expert *a = &job->s.active[job->s.batch[i]];
        a->first_task = tasks;
        tasks += (cb_tiles(down ? &a->down : &a->gate) + job->task_tiles - 1) / job->task_tiles * a->chunks.count;
    }
    return tasks;
}

typedef struct expert_task {
    const active_expert *a;
    uint32_t tile, tiles, slot, hidden, count;
} expert_task;

static expert_task find_task(const experts_job *job, uint32_t task, bool down) {
    uint32_t low = 0, high = job->batch_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (job->s.active[job->s.batch[middle]].first_task <= task)
            low = middle;
        else
            high = middle;
    }
    expert_task found = {.a = &job->s.active[job->s.batch[low]]};
    task -= found.a->first_task;
    uint32_t all = cb_tiles(down ? &found.a->down : &found.a->gate);
    found.tile = task / found.a->chunks.count * job->task_tiles;
    found.tiles = all - found.tile < job->task_tiles ? all - found.tile : job->task_tiles;
    uint32_t rows = found.a->chunks.rows, done = task % found.a->chunks.count * rows;
    found.slot = found.a->first_slot + done;
    found.hidden = found.a->first_hidden + done;
    found.count = found.a->count - done < rows ? found.a->count - done : rows;
    return found;
}

static void gate_up_task(void *context, uint32_t task, uint32_t worker) {
    const experts_job *job = context;
    if (cb_pass_abandoned(&job->vm->pass))
        return;
    expert_task t = find_task(job, task, false);
    const uint32_t *index = job->s.row + t.slot;
    uint32_t first = t.tile * CB_LANES, left = job->set->ffn - first;
    uint32_t width = left / CB_LANES < t.tiles ? left : t.tiles * CB_LANES;
    float *gate = job->s.hidden + t.hidden * job->s.hidden_stride, *up = cb_worker(job->vm, worker);
    uint64_t up_stride = (uint64_t)t.tiles * CB_LANES;
    cb_multiply_tiles(job->vm, &t.a->gate, t.tile, t.tiles, &job->x, index, t.count, gate, job->s.hidden_stride);
    cb_matrix part = t.a->up; /* from the task's first tile on, so that its columns begin at 0 in the scratch */
    part.tiles += t.tile * part.tile_bytes;
    part.rows = width;
    cb_multiply_tiles(job->vm, &part, 0, t.tiles, &job->x, index, t.count, up, up_stride);
    for (uint32_t i = 0; i < t.count; i++) {
        float *hidden = gate + i * job->s.hidden_stride + first;
        job->vm->kernels->silu_mul(hidden, hidden, up + i * up_stride, width);
    }
}

static void hidden_row(cb_vm *vm, const void *context, uint32_t row, uint32_t worker) {
    (void)worker;
    const experts_job *job = context;
    const slots *s = &job->s;
    uint32_t ffn = job->set->ffn, slot = s->hidden_slot[row];
    uint64_t padded = cb_round_up(ffn, CB_ACTIVATION_BLOCK);
    const float *hidden = s->hidden + row * s->hidden_stride;
    bool finite =
        cb_is_quantised(s->active[s->active_of[slot]].down.format)
            ? vm->kernels->quantise_row(hidden, ffn, s->codes + row * padded,
                                        s->scales + row * (padded / CB_ACTIVATION_BLOCK), s->sums + row * (padded / 32))
            : vm->kernels->all_finite(hidden, ffn);
    s->hidden_failed[slot] = !finite;
}

static void down_task(void *context, uint32_t task, uint32_t worker) {
    (void)worker;
    const experts_job *job = context;
    if (cb_pass_abandoned(&job->vm->pass))
        return;
    const slots *s = &job->s;
    expert_task t = find_task(job, task, true);
    cb_rows all = {
        .values = s->hidden, .stride = s->hidden_stride, .codes = s->codes, .scales = s->scales, .sums = s->sums};
    cb_rows x = cb_rows_from(&all, t.hidden, job->set->ffn);
    cb_multiply_tiles(job->vm, &t.a->down, t.tile, t.tiles, &x, NULL, t.count, s->out + t.slot * s->out_stride,
                      s->out_stride);
}

static void add_to_batch(experts_job *job, uint32_t active, const uint8_t *record) {
    active_expert *a = &job->s.active[active];
    const cb_expert_set *set = job->set;
    const cb_expert *e = &set->experts[a->expert];
    for (uint32_t i = 0; i < a->count; i++)
        job->s.hidden_slot[job->hidden_count + i] = a->first_slot + i;
    a->first_hidden = job->hidden_count;
    job->hidden_count += a->count;
    job->s.batch[job->batch_count++] = active;
    a->chunks = cb_cut_rows(a->count);
    a->gate = cb_matrix_make(record + e->part[0], e->format[0], set->ffn, set->width);
    a->up = cb_matrix_make(record + e->part[1], e->format[1], set->ffn, set->width);
    a->down = cb_matrix_make(record + e->part[2], e->format[2], set->width, set->ffn);
    cb_set_counters *counters = &job->vm->sets[job->op->experts.set];
    cb_count(&counters->experts_computed, 1);
    cb_count(&counters->expert_tokens, a->count);
    cb_count(&counters->bytes_touched, e->size);
    cb_count(&counters->tokens[a->expert], a->count);
    for (int part = 0; part < 3; part++)
        cb_note_matmul(job->vm, e->format[part]);
}

/* Tokens that need an expert which cannot be read end here, the others go on. */
static void fail_expert(experts_job *job, const active_expert *a, const cb_error *error) {
    const cb_pass *pass = &job->vm->pass;
    for (uint32_t i = 0; i < a->count; i++) {
        uint32_t row = job->s.row[a->first_slot + i];
        if (cb_row_alive(pass, row))
            cb_item_fail(pass->segments[pass->segment_of[row]].item, error->status, "%s", error->message);
    }
}

static void compute_batch(experts_job *job) {
    cb_vm *vm = job->vm;
    cb_run_dispatched(vm, cut_tasks(job, false), gate_up_task, job);
    if (cb_pass_abandoned(&vm->pass))
        return;
    cb_for_rows(vm, job->hidden_count, job->set->ffn, hidden_row, job);
    cb_pool_run(vm->pool, cut_tasks(job, true), down_task, job);
}

/* Computes the experts that the store has handed out, in batches, and gives each back as soon as it is done. */
static void compute_ready(experts_job *job, uint32_t count) {
    const slots *s = &job->s;
    for (uint32_t next = 0; next < count && !cb_pass_abandoned(&job->vm->pass);) {
        uint32_t first = next;
        job->batch_count = job->hidden_count = 0;
        for (; next < count; next++) {
            const cb_store_ready *ready = &s->ready[next];
            uint32_t active = s->asked_for[ready->index];
            if (ready->record == NULL) {
                fail_expert(job, &s->active[active], ready->error);
                continue;
            }
            bool full = !job->vm->resident && job->hidden_count >= STREAM_BATCH;
            if (full || job->hidden_count + s->active[active].count > s->hidden_limit)
                break;
            add_to_batch(job, active, ready->record);
        }
        if (job->batch_count > 0)
            compute_batch(job);
        for (; first < next; first++)
            cb_store_release(job->vm->store, s->ready[first].index);
    }
}

/* ---- a round ---- */

static void combine_row(cb_vm *vm, const void *context, uint32_t i, uint32_t worker) {
    (void)worker;
    const experts_job *job = context;
    const slots *s = &job->s;
    uint32_t row = job->first_row + i, width = job->set->width;
    float *y = job->y->values + row * job->y->stride;
    memset(y, 0, width * sizeof(float));
    if (!cb_row_alive(&vm->pass, row))
        return;
    const float *weights = job->routing->values + row * job->routing->stride;
    for (uint32_t r = 0; r < job->chosen; r++) {
        uint32_t slot = s->slot_of[(uint64_t)i * job->chosen + r];
        const float *out = s->out + slot * s->out_stride;
        s->out_failed[slot] = !vm->kernels->add_scaled(y, out, weights[r], width);
    }
}

static void report(experts_job *job, const uint8_t *failed, const char *what) {
    for (uint32_t slot = 0; slot < job->slot_count; slot++)
        if (failed[slot])
            cb_row_fail(job->vm, job->op, job->s.row[slot], "", "expert %u: NaN or infinity in the %s of",
                        job->s.active[job->s.active_of[slot]].expert, what);
}

static uint64_t stall_nanoseconds(const experts_job *job) {
    cb_store_stats stats;
    cb_store_get_stats(job->vm->store, job->op->experts.set, &stats);
    return stats.stall_nanoseconds;
}

static void run_round(experts_job *job) {
    cb_vm *vm = job->vm;
    sort_tokens(job);
    order_experts(job);
    cb_judge_prediction(vm, job->op, job->s.asked, job->active_count);
    cb_store_begin(vm->store, job->op->experts.set, job->s.asked, job->active_count);
    cb_predict_experts(vm, job->op);
    uint32_t count;
    uint64_t stall = stall_nanoseconds(job);
    while ((count = cb_store_next(vm->store, job->s.ready, EXPERTS_AT_ONCE)) > 0) {
        if (stall_nanoseconds(job) != stall)
            vm->routed = 0; /* what follows waited for the disk, not for threads */
        compute_ready(job, count);
        if (cb_pass_abandoned(&vm->pass))
            break;
    }
    cb_store_end(vm->store);
    if (cb_pass_abandoned(&vm->pass))
        return;
    report(job, job->s.hidden_failed, "hidden values");
    /* A row that failed has slots, but its outputs are not looked at: clear what an earlier round left. */
    memset(job->s.out_failed, 0, job->slot_count);
    cb_for_rows(vm, job->rows, (uint64_t)job->set->width * job->chosen, combine_row, job);
    report(job, job->s.out_failed, "output");
}

void cb_run_experts(cb_vm *vm, const cb_op *op) {
    const cb_expert_set *set = &vm->model->sets[op->experts.set];
    bool quantise = false;
    for (uint32_t e = 0; e < set->count; e++)
        quantise |= cb_is_quantised(set->experts[e].format[0]) || cb_is_quantised(set->experts[e].format[1]);
    cb_prepare_rows(vm, op, op->experts.x, quantise, "experts", "");
    const cb_register *x = &vm->registers[op->experts.x];
    experts_job job = {.vm = vm,
                       .op = op,
                       .set = set,
                       .routing = &vm->registers[op->experts.routing],
                       .y = &vm->registers[op->experts.y],
                       .x = {.values = x->values,
                             .stride = x->stride,
                             .codes = vm->shadow.codes,
                             .scales = vm->shadow.scales,
                             .sums = vm->shadow.sums},
                       .chosen = vm->model->program.values[op->experts.routing].width};
    uint32_t most = most_tokens(vm, set, job.chosen);
    uint32_t rounds = (vm->pass.rows + most - 1) / most;
    uint32_t tokens = (vm->pass.rows + rounds - 1) / rounds; /* rounds of like size */
    cb_arena arena = {.base = vm->expert_scratch};
    job.s = take_slots(vm, &arena, set, job.chosen, tokens);
    for (uint32_t row = 0; row < vm->pass.rows && !cb_pass_abandoned(&vm->pass); row += tokens) {
        job.first_row = row;
        job.rows = vm->pass.rows - row < tokens ? vm->pass.rows - row : tokens;
        run_round(&job);
    }
}
