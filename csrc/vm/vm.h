/* The virtual machine: walks the program over the rows of one pass.
 *
 * A pass is a number of token rows, cut from the items of a batch. Everything it needs is
 * allocated by cb_vm_open. A row never influences another item's row, so a row whose item has
 * failed may hold anything: it is computed along, except where that would cost much. */
#ifndef CB_VM_H
#define CB_VM_H

#include "experts/store.h"
#include "file/model.h"
#include "kernels/kernels.h"
#include "state/state.h"

/* Values of kind outputs hold so many rows: logits of all rows of a pass would take too much memory,
 * so the ops on them run over a few rows at a time. */
#define CB_OUTPUT_ROWS 32
#define CB_ROW_CHUNK 96 /* most rows that one matmul task takes together: their codes stay in the cache */
#define CB_MAX_GROUP 4  /* matmuls that run together */

/* The rows that one item has in a pass. */
typedef struct cb_segment {
    colibri_item *item; /* status OK: alive */
    const atomic_bool *cancel;
    const cb_block_layout *layout;
    cb_block *const *blocks;
    uint32_t first_row, count;
    uint32_t position; /* of the first row */
} cb_segment;

/* A row whose logits are wanted. */
typedef struct cb_output {
    uint32_t row;
    float *logits; /* [vocabulary], or NULL: */
    float *score;  /* log p(next) */
    uint32_t next;
} cb_output;

typedef struct cb_pass {
    uint32_t rows, segment_count, output_count;
    uint32_t *tokens, *positions, *segment_of; /* [rows] */
    cb_segment *segments;
    cb_output *outputs;
    /* The outputs whose rows the values of kind outputs hold now. */
    uint32_t chunk_first, chunk_count;
} cb_pass;

/* A value: [rows][stride]. Routing values have the experts beside their weights. */
typedef struct cb_register {
    float *values;
    uint32_t *experts;
    uint64_t stride;
    uint64_t stamp; /* another with every write */
} cb_register;

/* The quantised form of the register that was quantised last. */
typedef struct cb_shadow {
    uint64_t stamp;
    int8_t *codes;
    float *scales;
    int16_t *sums;
} cb_shadow;

typedef _Atomic uint64_t cb_counter; /* one writer, any readers */

typedef struct cb_set_counters {
    cb_counter experts_computed, expert_tokens, bytes_touched;
    cb_counter predictable, predicted, recalled; /* as in colibri_expert_set_stats */
    cb_counter *tokens;                          /* [experts] */
} cb_set_counters;

/* How long things of one kind took, in buckets of a sixteenth of a power of two. */
#define CB_LATENCY_BUCKETS 608 /* to 2^41 ns */
typedef struct cb_latency {
    cb_counter count, sum, largest, buckets[CB_LATENCY_BUCKETS];
} cb_latency;

typedef struct cb_phase {
    cb_counter tokens, passes, nanoseconds, parallel_regions, dispatch_missed;
    cb_latency dispatch, dispatch_switched;
    cb_counter *op_nanoseconds; /* [layer_count + 1][CB_OP_LIMIT] */
} cb_phase;

/* When a thread began its first task on the experts of the layer that runs. */
typedef struct cb_first_task {
    _Alignas(CB_CACHE_LINE) uint64_t time; /* 0: not yet */
    bool switched;
} cb_first_task;

/* What an op file keeps in the arena; sizes come from its plan function. */
typedef struct cb_query_chunk {
    uint32_t segment, first_row, count;
} cb_query_chunk;

/* Predicts the experts of coming layers (predict.c). */
typedef struct cb_chain cb_chain;
typedef struct cb_prediction {
    uint32_t depth, chain_count;
    cb_chain *chains; /* for each experts op, in the order of the program; NULL: nothing is predicted */
    float *normed, *logits;
    uint64_t normed_stride, logits_stride;
    uint32_t *experts, *counts;
    bool judged, guesses; /* the running pass is measured, and predicts */
    uint64_t started;
    uint32_t tried, measured[2];
    double cost[2]; /* nanoseconds of a token in passes without and with prediction, a moving average */
    cb_counter passes, skipped, nanoseconds;
} cb_prediction;

typedef struct cb_vm_options {
    uint32_t max_rows;
    uint32_t prefetch_depth;
    bool resident; /* every expert stays in memory */
} cb_vm_options;

typedef struct cb_vm {
    const cb_model *model;
    cb_expert_store *store;
    const cb_kernels *kernels;
    cb_pool *pool;
    uint32_t threads, max_rows;
    bool resident;

    cb_op *ops; /* [op_count] of the program, in the order they run */
    cb_pass pass;
    cb_register *registers; /* [value_count] */
    float **gathered;       /* rows of each gather_outputs op, in the order of the program */
    cb_shadow shadow;
    uint64_t last_stamp, finite_stamp;
    uint8_t *row_failed; /* [max_rows], all zero between ops */

    uint8_t *worker_scratch; /* [threads][worker_bytes] */
    uint64_t worker_bytes;
    cb_query_chunk *query_chunks; /* [max_rows] */
    float *partials;              /* attention splits computed side by side */
    uint64_t partial_floats;
    uint8_t *expert_scratch;
    cb_prediction prediction;

    uint8_t *arena;
    uint64_t arena_bytes;

    cb_phase phases[2];         /* by colibri_phase */
    cb_phase *phase;            /* of the pass that runs */
    uint64_t routed;            /* when the router's output was there; 0 once its experts have been handed out */
    cb_first_task *first_tasks; /* [threads] */
    const char *_Atomic matmul_names[CB_FORMAT_LIMIT];
    cb_set_counters *sets;
} cb_vm;

/* UNSUPPORTED when the program uses a weight format that has no kernel. */
colibri_status cb_vm_open(const cb_model *model, cb_expert_store *store, const cb_kernels *kernels, cb_pool *pool,
                          const cb_vm_options *options, cb_vm **vm, cb_error *error);
/* Bytes of the arena and of the tables beside it that cb_vm_open would take. */
colibri_status cb_vm_plan(const cb_model *model, const cb_kernels *kernels, uint32_t threads,
                          const cb_vm_options *options, uint64_t *arena_bytes, uint64_t *table_bytes, cb_error *error);
void cb_vm_close(cb_vm *vm);
/* Runs vm->pass, which the caller has filled. Failures go to the items of its segments. */
void cb_vm_run(cb_vm *vm);

/* ---- inside the VM ---- */

/* Memory is planned by running the same code twice: with no base it only counts. */
typedef struct cb_arena {
    uint8_t *base;
    uint64_t size; /* UINT64_MAX once it has overflowed */
} cb_arena;
void *cb_arena_take(cb_arena *arena, uint64_t count, uint64_t size); /* aligned to 64 */

void cb_item_fail(colibri_item *item, colibri_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* NON_FINITE for the item of a pass row, if it is alive: "layer 3, <text> token position 17<end>". */
void cb_row_fail(cb_vm *vm, const cb_op *op, uint32_t row, const char *end, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* cb_row_fail for the rows of a value that row_failed marks, which are unmarked. */
void cb_report_rows(cb_vm *vm, const cb_op *op, uint32_t value, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The row of the pass that row `row` of a value of this kind belongs to. */
uint32_t cb_pass_row(const cb_pass *pass, uint32_t kind, uint32_t row);
static inline bool cb_row_alive(const cb_pass *pass, uint32_t row) {
    return pass->segments[pass->segment_of[row]].item->status == COLIBRI_OK;
}
/* No item of the pass needs its result any more; polled by tasks. */
bool cb_pass_abandoned(const cb_pass *pass);
/* Rows that a value has now. */
uint32_t cb_value_rows(const cb_vm *vm, uint32_t value);

static inline void cb_count(cb_counter *counter, uint64_t more) {
    uint64_t old = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, old + more, memory_order_relaxed);
}

/* cb_pool_run for the first tasks on the experts that a router has just chosen; counts how long all threads took
 * to get there. */
void cb_run_dispatched(cb_vm *vm, uint32_t count, cb_task task, void *context);
void cb_latency_add(cb_latency *latency, uint64_t nanoseconds);
colibri_latency cb_latency_read(const cb_latency *latency);

/* Calls `work` for each row: on the calling thread for little work, else on all. */
typedef void (*cb_row_work)(cb_vm *vm, const void *context, uint32_t row, uint32_t worker);
void cb_for_rows(cb_vm *vm, uint32_t rows, uint64_t floats_per_row, cb_row_work work, const void *context);

/* A tiled matrix as the kernels take it. */
typedef struct cb_matrix {
    const uint8_t *tiles;
    uint32_t format, rows, k;
    uint64_t tile_bytes;
} cb_matrix;
cb_matrix cb_matrix_make(const uint8_t *tiles, uint32_t format, uint64_t rows, uint64_t k);
static inline uint32_t cb_tiles(const cb_matrix *matrix) {
    return matrix->rows / CB_LANES + (matrix->rows % CB_LANES != 0);
}
static inline bool cb_is_quantised(uint32_t format) { return cb_format_table[format].group != 0; }
/* `x` seen from row `first` on. */
cb_rows cb_rows_from(const cb_rows *x, uint64_t first, uint32_t k);
/* Rows of a matmul in chunks of like size, none empty; all but the last a multiple of CB_LANES. */
typedef struct cb_row_chunks {
    uint32_t count, rows;
} cb_row_chunks;
cb_row_chunks cb_cut_rows(uint32_t rows);
/* Tiles [tile, tile + tiles) times rows of x into out, whose column 0 is the matrix' row 0. */
void cb_multiply_tiles(const cb_vm *vm, const cb_matrix *matrix, uint32_t tile, uint32_t tiles, const cb_rows *x,
                       const uint32_t *index, uint32_t count, float *out, uint64_t out_stride);
void cb_note_matmul(cb_vm *vm, uint32_t format);
/* Tiles for a task: at least 32 KiB of weights, and several tasks for each thread when there are enough. */
uint32_t cb_task_tiles(const cb_vm *vm, uint64_t all_tiles, uint64_t tile_bytes);
/* Checks that the rows of a value are finite and, if `quantise`, fills the shadow; failures go to their items. */
void cb_prepare_rows(cb_vm *vm, const cb_op *op, uint32_t value, bool quantise, const char *what, const char *name);

static inline void *cb_worker(const cb_vm *vm, uint32_t worker) {
    return vm->worker_scratch + worker * vm->worker_bytes;
}

/* A row of logits becomes probabilities. Returns d such that log p(i) = (logits[i] - *largest) + d for the logits
 * before: d = log of the largest probability, which is 1 / sum(exp(logit - largest)). Scores and the sampler
 * share it. The logits must not be NaN or +inf, and one must be finite. */
float cb_log_softmax(const cb_kernels *kernels, float *logits, uint32_t n, float *largest);

void cb_plan_attention(cb_vm *vm, cb_arena *arena, uint64_t *worker_bytes);
void cb_plan_experts(cb_vm *vm, cb_arena *arena, uint64_t *worker_bytes);
void cb_plan_route(const cb_vm *vm, uint64_t *worker_bytes);

/* With prefetch_depth layers; false: out of memory. */
bool cb_open_prediction(cb_vm *vm, uint32_t prefetch_depth);
void cb_close_prediction(cb_vm *vm);
uint64_t cb_prediction_table_bytes(const cb_vm *vm);
void cb_plan_prediction(cb_vm *vm, cb_arena *arena);
void cb_prediction_start(cb_vm *vm); /* of a pass */
void cb_prediction_end(cb_vm *vm);   /* of a pass that was not abandoned */
/* Starts reads for the layers after this experts op, whose own are under way. */
void cb_predict_experts(cb_vm *vm, const cb_op *op);
/* Counts how many of the experts that the op asks for were predicted. */
void cb_judge_prediction(cb_vm *vm, const cb_op *op, const uint32_t *experts, uint32_t count);

void cb_run_embed(cb_vm *vm, const cb_op *op);
void cb_run_rms_norm(cb_vm *vm, const cb_op *op);
void cb_run_rope_table(cb_vm *vm, const cb_op *op);
void cb_run_rope(cb_vm *vm, const cb_op *op);
void cb_run_clamp(cb_vm *vm, const cb_op *op);
void cb_run_gated_activation(cb_vm *vm, const cb_op *op);
void cb_run_add(cb_vm *vm, const cb_op *op);
void cb_run_sigmoid_gate(cb_vm *vm, const cb_op *op);
/* ops[0] and those after it that cb_matmul_group joined to it. */
uint32_t cb_matmul_group(const cb_op *ops, uint32_t left);
/* Brings matmuls of one input together where that changes no result. */
void cb_order_ops(cb_op *ops, uint32_t count);
void cb_run_matmuls(cb_vm *vm, const cb_op *ops, uint32_t count);
void cb_run_attention(cb_vm *vm, const cb_op *op);
void cb_run_route(cb_vm *vm, const cb_op *op);
void cb_run_experts(cb_vm *vm, const cb_op *op);
/* Hands the rows of the logits value to their outputs. */
void cb_deliver_logits(cb_vm *vm);

#endif
