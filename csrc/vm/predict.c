/* Guesses which experts the coming layers will choose, and has them read meanwhile.
 *
 * While a layer's experts are fetched and computed, the router of the next layer is applied to the residual stream as
 * it is now: it misses this layer's experts and the next layer's attention, but those change it little. Guesses only
 * start low-priority reads. Of many tokens a sample is looked at.
 *
 * A guess can cost more than it saves: reads of experts that nobody asks for take the disk's time, and memory. So some
 * passes of few tokens go without, and the cheaper way is taken. With many tokens most experts are needed anyway. */
#include <math.h>
#include <string.h>

#include "vm/vm.h"

#define MOST_ROWS 64 /* tokens whose experts are guessed */
#define NEARLY_ALL 4 /* (token, expert) pairs for each expert, from which on nearly all experts are needed */
#define ALONE_BYTES (256 * 1024) /* a router as small is not worth sharing out */
#define FIRST_PASSES 16          /* are with and without in turn */
#define TRIAL_EVERY 16           /* of the passes that follow, one goes the other way */
#define MEMORY 16                /* passes over which their time is averaged */

/* The ops that choose the experts of one layer. */
struct cb_chain {
    const cb_op *norm, *router; /* norm NULL: the ops are of another kind, and nothing is guessed */
    uint32_t set, chosen;
    uint8_t *guessed; /* [experts] of the running pass */
    uint32_t guessed_count;
};

static const cb_op *writer_of(const cb_program *program, const cb_op *before, uint32_t value) {
    for (const cb_op *op = before; op-- > program->ops;)
        if (op->words[0] == value)
            return op;
    return NULL; /* cannot be: the program was checked */
}

static void find_chain(const cb_model *model, const cb_op *experts, cb_chain *chain) {
    const cb_program *program = &model->program;
    chain->set = experts->experts.set;
    chain->chosen = program->values[experts->experts.routing].width;
    const cb_op *route = writer_of(program, experts, experts->experts.routing);
    if (route == NULL || route->opcode != CB_OP_ROUTE)
        return;
    const cb_op *router = writer_of(program, route, route->route.logits);
    if (router == NULL || router->opcode != CB_OP_MATMUL ||
        cb_is_quantised(model->tensors[router->matmul.weight].format))
        return;
    const cb_op *norm = writer_of(program, router, router->matmul.x);
    if (norm == NULL || norm->opcode != CB_OP_RMS_NORM)
        return;
    chain->router = router;
    chain->norm = norm;
}

bool cb_open_prediction(cb_vm *vm, uint32_t depth) {
    const cb_program *program = &vm->model->program;
    cb_prediction *p = &vm->prediction;
    if (vm->resident || depth == 0)
        return true;
    uint32_t count = 0;
    for (uint32_t i = 0; i < program->op_count; i++)
        count += program->ops[i].opcode == CB_OP_EXPERTS;
    p->chains = cb_alloc(cb_multiply(count, sizeof *p->chains));
    if (p->chains == NULL)
        return false;
    p->depth = depth;
    for (uint32_t i = 0; i < program->op_count; i++)
        if (program->ops[i].opcode == CB_OP_EXPERTS)
            find_chain(vm->model, &program->ops[i], &p->chains[p->chain_count++]);
    return true;
}

uint64_t cb_prediction_table_bytes(const cb_vm *vm) { return vm->prediction.chain_count * sizeof(cb_chain); }

void cb_close_prediction(cb_vm *vm) { cb_free(vm->prediction.chains); }

void cb_plan_prediction(cb_vm *vm, cb_arena *arena) {
    cb_prediction *p = &vm->prediction;
    uint64_t width = 0, experts = 0, rows = vm->max_rows < MOST_ROWS ? vm->max_rows : MOST_ROWS;
    for (uint32_t i = 0; i < p->chain_count; i++) {
        cb_chain *chain = &p->chains[i];
        uint32_t count = vm->model->sets[chain->set].count;
        chain->guessed = cb_arena_take(arena, count, 1);
        experts = count > experts ? count : experts;
        if (chain->norm != NULL && vm->model->program.values[chain->norm->rms_norm.y].width > width)
            width = vm->model->program.values[chain->norm->rms_norm.y].width;
    }
    p->normed_stride = cb_round_up(width, CB_LANES);
    p->logits_stride = cb_round_up(experts, CB_LANES);
    p->normed = cb_arena_take(arena, cb_multiply(rows, p->normed_stride), sizeof *p->normed);
    p->logits = cb_arena_take(arena, cb_multiply(rows, p->logits_stride), sizeof *p->logits);
    p->experts = cb_arena_take(arena, experts, sizeof *p->experts);
    p->counts = cb_arena_take(arena, experts, sizeof *p->counts);
}

/* ---- whether it pays ---- */

static bool nearly_all(const cb_vm *vm, const cb_chain *chain) {
    return (uint64_t)vm->pass.rows * chain->chosen >= (uint64_t)NEARLY_ALL * vm->model->sets[chain->set].count;
}

static bool try_guessing(const cb_prediction *p) {
    bool pays = p->cost[1] <= p->cost[0], trial = p->tried % TRIAL_EVERY == 0;
    return p->tried < FIRST_PASSES ? p->tried % 2 == 0 : pays != trial;
}

static void forget(const cb_vm *vm, cb_chain *chain) {
    if (chain->guessed_count > 0)
        memset(chain->guessed, 0, vm->model->sets[chain->set].count);
    chain->guessed_count = 0;
}

void cb_prediction_start(cb_vm *vm) {
    cb_prediction *p = &vm->prediction;
    p->guesses = false;
    p->judged = p->chain_count > 0 && vm->pass.rows <= MOST_ROWS && !nearly_all(vm, &p->chains[0]);
    for (uint32_t i = 0; i < p->chain_count; i++) /* what an abandoned pass left */
        forget(vm, &p->chains[i]);
    if (!p->judged)
        return;
    p->started = cb_now();
    p->guesses = try_guessing(p);
    cb_count(p->guesses ? &p->passes : &p->skipped, 1);
}

void cb_prediction_end(cb_vm *vm) {
    cb_prediction *p = &vm->prediction;
    if (!p->judged)
        return;
    double cost = (double)(cb_now() - p->started) / vm->pass.rows, *mean = &p->cost[p->guesses];
    uint32_t *count = &p->measured[p->guesses];
    *count += *count < MEMORY;
    *mean += (cost - *mean) / *count;
    p->tried++;
}

/* ---- guessing ---- */

typedef struct router_job {
    cb_vm *vm;
    cb_matrix matrix;
    cb_rows x;
    uint32_t rows, task_tiles;
} router_job;

static void router_task(void *context, uint32_t task, uint32_t worker) {
    (void)worker;
    const router_job *job = context;
    const cb_prediction *p = &job->vm->prediction;
    uint32_t tile = task * job->task_tiles, left = cb_tiles(&job->matrix) - tile;
    cb_multiply_tiles(job->vm, &job->matrix, tile, left < job->task_tiles ? left : job->task_tiles, &job->x, NULL,
                      job->rows, p->logits + (uint64_t)tile * CB_LANES, p->logits_stride);
}

/* Router logits of a layer for `rows` rows of the pass, from the residual stream `x`. */
static void apply_router(cb_vm *vm, const cb_chain *chain, const cb_register *x, uint32_t rows) {
    const cb_model *model = vm->model;
    cb_prediction *p = &vm->prediction;
    const cb_op *norm = chain->norm;
    const float *weight = (const float *)(const void *)model->tensors[norm->rms_norm.weight].data;
    uint32_t width = model->program.values[norm->rms_norm.y].width, group = norm->rms_norm.group;
    for (uint32_t i = 0; i < rows; i++) {
        const float *from = x->values + (uint64_t)i * vm->pass.rows / rows * x->stride;
        for (uint32_t k = 0; k < width; k += group)
            vm->kernels->rms_norm(p->normed + i * p->normed_stride + k, from + k, weight, group,
                                  norm->rms_norm.epsilon);
    }
    const cb_tensor *router = &model->tensors[chain->router->matmul.weight];
    router_job job = {.vm = vm,
                      .matrix = cb_matrix_make(router->data, router->format, router->rows, router->cols),
                      .x = {.values = p->normed, .stride = p->normed_stride},
                      .rows = rows};
    uint32_t tiles = cb_tiles(&job.matrix);
    bool alone = tiles * job.matrix.tile_bytes * rows <= ALONE_BYTES;
    job.task_tiles = alone ? tiles : cb_task_tiles(vm, tiles, job.matrix.tile_bytes);
    cb_pool_run(vm->pool, (tiles + job.task_tiles - 1) / job.task_tiles, router_task, &job);
    if (chain->router->matmul.bias == CB_ABSENT)
        return;
    const float *bias = (const float *)(const void *)model->tensors[chain->router->matmul.bias].data;
    for (uint32_t i = 0; i < rows; i++)
        vm->kernels->add(p->logits + i * p->logits_stride, p->logits + i * p->logits_stride, bias,
                         (uint32_t)router->rows);
}

static uint32_t take_best(float *logits, uint32_t count) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best])
            best = i;
    logits[best] = -INFINITY;
    return best;
}

/* Lists the experts that most tokens choose first, and of the others those that rank higher; returns how many. */
static uint32_t guess(cb_vm *vm, const cb_chain *chain, const cb_register *x) {
    cb_prediction *p = &vm->prediction;
    uint32_t rows = vm->pass.rows < MOST_ROWS ? vm->pass.rows : MOST_ROWS, count = 0;
    apply_router(vm, chain, x, rows);
    for (uint32_t rank = 0; rank < chain->chosen; rank++)
        for (uint32_t row = 0; row < rows; row++) {
            uint32_t at = 0, expert = take_best(p->logits + row * p->logits_stride, vm->model->sets[chain->set].count);
            while (at < count && p->experts[at] != expert)
                at++;
            if (at == count)
                p->counts[count++] = 0;
            uint32_t chosen = p->counts[at] + 1;
            for (; at > 0 && p->counts[at - 1] < chosen; at--) {
                p->experts[at] = p->experts[at - 1];
                p->counts[at] = p->counts[at - 1];
            }
            p->experts[at] = expert;
            p->counts[at] = chosen;
        }
    return count;
}

static cb_chain *chain_of(const cb_prediction *p, const cb_op *op) {
    for (uint32_t i = 0; i < p->chain_count; i++)
        if (p->chains[i].set == op->experts.set)
            return &p->chains[i];
    return NULL;
}

void cb_predict_experts(cb_vm *vm, const cb_op *op) {
    cb_prediction *p = &vm->prediction;
    const cb_chain *here = chain_of(p, op);
    if (here == NULL || here->norm == NULL || (p->judged && !p->guesses))
        return;
    uint32_t x = here->norm->rms_norm.x, most = p->judged ? p->depth : 1;
    uint64_t start = cb_now();
    for (uint32_t depth = 1; depth <= most && here + depth < p->chains + p->chain_count; depth++) {
        cb_chain *chain = &p->chains[here - p->chains + depth];
        if (chain->norm == NULL ||
            vm->model->program.values[x].width != vm->model->program.values[chain->norm->rms_norm.y].width)
            continue;
        uint32_t count = guess(vm, chain, &vm->registers[x]);
        for (uint32_t i = 0; i < count && p->judged; i++) {
            chain->guessed_count += !chain->guessed[p->experts[i]];
            chain->guessed[p->experts[i]] = 1;
        }
        cb_store_prefetch(vm->store, chain->set, p->experts, count);
    }
    cb_count(&p->nanoseconds, cb_now() - start);
}

void cb_judge_prediction(cb_vm *vm, const cb_op *op, const uint32_t *experts, uint32_t count) {
    cb_chain *chain = chain_of(&vm->prediction, op);
    if (chain == NULL || chain->guessed_count == 0)
        return;
    cb_set_counters *counters = &vm->sets[chain->set];
    uint32_t right = 0;
    for (uint32_t i = 0; i < count; i++)
        right += chain->guessed[experts[i]];
    cb_count(&counters->predictable, count);
    cb_count(&counters->predicted, chain->guessed_count);
    cb_count(&counters->recalled, right);
    forget(vm, chain);
}
