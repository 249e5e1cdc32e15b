/* Colibri: Mixture-of-Experts language models on the CPU.
 *
 * runtime = threads and memory shared by all; engine = one model; session = one
 * timeline of tokens. A runtime and its engines may be used by many threads; a
 * session has one caller at a time, another gets COLIBRI_BUSY. The library never
 * exits, prints, reads the environment or changes process state. After fork() every
 * call in the child returns COLIBRI_FORKED.
 *
 * Functions return a status; on failure a sentence is written to the caller's
 * `message` (always terminated; may be NULL with size 0). */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COLIBRI_API __attribute__((visibility("default")))
#define COLIBRI_ABI_VERSION 3
#define COLIBRI_CONTRACT_VERSION 1 /* numeric contract; another value means other bits */
#define COLIBRI_MESSAGE_SIZE 512
#define COLIBRI_TOP_LOGPROBS 20

typedef enum colibri_status {
    COLIBRI_OK = 0,
    COLIBRI_INVALID = 1,     /* an argument is out of range */
    COLIBRI_IO = 2,          /* a file could not be read */
    COLIBRI_BAD_FILE = 3,    /* a file is damaged */
    COLIBRI_UNSUPPORTED = 4, /* a file or CPU asks for what this build lacks */
    COLIBRI_OUT_OF_MEMORY = 5,
    COLIBRI_BUSY = 6,
    COLIBRI_CANCELLED = 7,
    COLIBRI_NON_FINITE = 8, /* NaN or infinity; the message names the layer */
    COLIBRI_CONTEXT_FULL = 9,
    COLIBRI_FORKED = 10,
    COLIBRI_BAD_STATE = 11 /* a saved state does not fit */
} colibri_status;

typedef struct colibri_runtime colibri_runtime;
typedef struct colibri_engine colibri_engine;
typedef struct colibri_session colibri_session;

typedef enum colibri_state_format {
    COLIBRI_STATE_DEFAULT = 0, /* what the model file says */
    COLIBRI_STATE_F32 = 1,
    COLIBRI_STATE_F16 = 2,
    COLIBRI_STATE_Q8 = 3
} colibri_state_format;

/* ---- runtime ---- */

typedef struct colibri_runtime_options {
    uint32_t threads; /* 0: from affinity, cgroup quota and physical cores */
    /* NULL: the best; "scalar", "avx2", "avxvnni", "avx512", "amx", "neon", "i8mm": exactly that or UNSUPPORTED. "amx"
     * also needs the kernel's permission, asked for here once and for the whole process (the one change made to it). */
    const char *cpu;
    /* NULL: "/"; where to look for /proc and /sys when counting processors (tests) */
    const char *system_root;
    /* 1: each thread on a processor of its own, one of each core first (the calling thread while a forward runs).
     * Two pinned processes of the same affinity mask take the same processors. INVALID with more threads. */
    uint32_t pin;
} colibri_runtime_options;

COLIBRI_API uint32_t colibri_abi_version(void);
COLIBRI_API colibri_status colibri_init(const colibri_runtime_options *options, colibri_runtime **runtime,
                                        char *message, size_t message_size);
/* Engines must be closed before; BUSY otherwise. NULL is allowed. */
COLIBRI_API colibri_status colibri_free(colibri_runtime *runtime);
COLIBRI_API uint32_t colibri_thread_count(const colibri_runtime *runtime);
COLIBRI_API const char *colibri_cpu_name(const colibri_runtime *runtime); /* "scalar", "avx2", ... */

/* ---- engine ---- */

/* AUTO, where not all experts stay in memory: some records are read both ways when the engine opens, and it reads past
 * the page cache unless reading through it was over 1.25 times as fast and memory has room for the rest of the file. */
typedef enum colibri_io { COLIBRI_IO_AUTO = 0, COLIBRI_IO_DIRECT = 1, COLIBRI_IO_BUFFERED = 2 } colibri_io;

/* CRC: every record's CRC32C on every fill. FULL: besides, SHA-256 of every record once, on its first fill. */
typedef enum colibri_verify { COLIBRI_VERIFY_CRC = 0, COLIBRI_VERIFY_FULL = 1, COLIBRI_VERIFY_OFF = 2 } colibri_verify;

/* AUTO: huge pages of 2 MiB where the kernel gives them; 2M and 1G: a warning where it does not. */
typedef enum colibri_pages {
    COLIBRI_PAGES_AUTO = 0,
    COLIBRI_PAGES_2M = 1,
    COLIBRI_PAGES_1G = 2,
    COLIBRI_PAGES_OFF = 3
} colibri_pages;

/* All zero is the default. What does not fit the machine or the model is INVALID and names the field. */
typedef struct colibri_engine_options {
    uint32_t max_batch_tokens; /* tokens computed together, at most 65536; 0: 512. More are done in several passes */
    uint32_t io_threads;       /* read experts; 0: 2; at most 16 */
    uint32_t io;               /* colibri_io: past the page cache or through it */
    uint32_t verify;           /* colibri_verify */
    uint32_t huge_pages;       /* colibri_pages, for expert slots */
    uint32_t prefetch_depth;   /* layers ahead whose experts are predicted and read, at most 8; 0: none */
    uint32_t lock_memory;      /* 1: mlock the expert slots */
    uint32_t guard;            /* 1: expert slots that hold nothing cannot be accessed (debugging) */
    uint64_t expert_bytes;     /* memory for expert slots; 0: room for all, read when the engine opens */
    uint64_t state_bytes;      /* all open sessions together hold at most this; 0: no limit */
    uint64_t page_cache_bytes; /* for COLIBRI_IO_AUTO: left for the page cache beside this engine; 0: not known */
} colibri_engine_options;

typedef struct colibri_engine_info {
    uint32_t vocabulary_size;
    uint32_t context_limit; /* positions the model was made for */
    uint32_t layer_count;
    uint32_t expert_set_count;
    uint32_t default_state_format;
    uint32_t max_batch_tokens;
    uint64_t weight_bytes;       /* memory for weights, expert slots included */
    uint64_t expert_bytes;       /* of these, expert slots */
    uint64_t scratch_bytes;      /* working memory of the engine */
    uint8_t digest[32];          /* of the model file */
    uint64_t all_expert_bytes;   /* of the records of all experts */
    uint64_t token_expert_bytes; /* of the experts that one token uses, at most */
} colibri_engine_info;

/* Reads and checks header, program and tensors, and with room for all experts every record of theirs; otherwise a
 * record is checked whenever it is read. */
COLIBRI_API colibri_status colibri_engine_open(colibri_runtime *runtime, const char *path,
                                               const colibri_engine_options *options, colibri_engine **engine,
                                               char *message, size_t message_size);
/* Sessions must be closed before; BUSY otherwise. NULL is allowed. */
COLIBRI_API colibri_status colibri_engine_close(colibri_engine *engine);
COLIBRI_API void colibri_engine_get_info(const colibri_engine *engine, colibri_engine_info *info);

/* Debugging, for an engine opened with guard = 1: an access to an expert's memory that no call holds is named on stderr
 * before it ends the process. Takes the process's handler of SIGSEGV; the fault then goes on to the handler before. */
COLIBRI_API colibri_status colibri_engine_guard(colibri_engine *engine, char *message, size_t message_size);

/* Low-priority reads of these experts of a set, first to last, as far as there is free memory for experts; the call
 * does not wait for them. */
COLIBRI_API colibri_status colibri_engine_warm(colibri_engine *engine, uint32_t set, const uint32_t *experts,
                                               uint32_t count, char *message, size_t message_size);

/* Checks a file as colibri_engine_open does with room for all, keeping nothing (bounded memory). */
COLIBRI_API colibri_status colibri_validate(const char *path, char *message, size_t message_size);

/* ---- session ---- */

typedef struct colibri_session_options {
    uint32_t context;      /* positions, 1 to 2^24 */
    uint32_t state_format; /* colibri_state_format */
} colibri_session_options;

/* OUT_OF_MEMORY also when the engine's sessions together would hold more than its state_bytes. */
COLIBRI_API colibri_status colibri_session_open(colibri_engine *engine, const colibri_session_options *options,
                                                colibri_session **session, char *message, size_t message_size);
COLIBRI_API colibri_status colibri_session_close(colibri_session *session);
COLIBRI_API uint32_t colibri_position(const colibri_session *session);
COLIBRI_API uint32_t colibri_context(const colibri_session *session);
/* Token ids of positions [0, position); valid until the session changes. */
COLIBRI_API const uint32_t *colibri_tokens(const colibri_session *session);
/* Forget positions >= position, and a cancel that no forward has met. */
COLIBRI_API colibri_status colibri_truncate(colibri_session *session, uint32_t position, char *message,
                                            size_t message_size);
/* One atomic store: the running or next forward of this session ends with CANCELLED. */
COLIBRI_API void colibri_cancel(colibri_session *session);
COLIBRI_API uint64_t colibri_state_size(const colibri_session *session);
COLIBRI_API colibri_status colibri_state_save(colibri_session *session, void *buffer, uint64_t size, char *message,
                                              size_t message_size);
/* Same model digest and state format, position <= context; the session is unchanged on failure. */
COLIBRI_API colibri_status colibri_state_restore(colibri_session *session, const void *buffer, uint64_t size,
                                                 char *message, size_t message_size);

/* ---- what an engine will take ---- */

/* In bytes; what the system gives in pages is rounded up to them. */
typedef struct colibri_memory_plan {
    uint64_t tensor_bytes;  /* weights other than experts */
    uint64_t scratch_bytes; /* working memory of max_batch_tokens */
    uint64_t other_bytes;   /* tables, queues, staging and stacks of I/O threads */
    uint64_t session_bytes; /* of one session */
    /* Slots: for all experts; with which everything still runs, one expert after another; of all: padding. */
    uint64_t all_expert_bytes, least_expert_bytes, wasted_expert_bytes;
    uint64_t largest_layer_bytes; /* of all_expert_bytes, the layer that takes most */
    uint64_t token_expert_bytes;  /* experts that one token uses, at most */
    uint32_t expert_count, expert_set_count, vocabulary_size, context_limit;
} colibri_memory_plan;

/* From the file's header and directories alone: no weight is read. options and session_options as for opening. */
COLIBRI_API colibri_status colibri_plan_memory(colibri_runtime *runtime, const char *path,
                                               const colibri_engine_options *options,
                                               const colibri_session_options *session_options,
                                               colibri_memory_plan *plan, char *message, size_t message_size);

/* ---- forward ---- */

typedef enum colibri_logits { COLIBRI_LOGITS_NONE = 0, COLIBRI_LOGITS_LAST = 1, COLIBRI_LOGITS_ALL = 2 } colibri_logits;

typedef struct colibri_item {
    colibri_session *session;
    const uint32_t *tokens;
    uint32_t token_count;               /* >= 1 */
    uint32_t logits_mode;               /* colibri_logits */
    float *logits;                      /* out: [1 or token_count][vocabulary_size]; NULL with LOGITS_NONE or score */
    float *scores;                      /* out, or NULL: [token_count]; scores[i] = log p(tokens[i+1] | up to i) for
                                           i < token_count - 1, computed without keeping logits; the last is NaN */
    colibri_status status;              /* out */
    char message[COLIBRI_MESSAGE_SIZE]; /* out */
} colibri_item;

/* Runs all items together. An item that fails keeps its session at its old position; the
 * others go on with unchanged bits. Returns OK when the call ran (look at each status). */
COLIBRI_API colibri_status colibri_forward_batch(colibri_engine *engine, colibri_item *items, uint32_t item_count,
                                                 char *message, size_t message_size);

/* ---- sampling ---- */

typedef struct colibri_sampling {
    float temperature;        /* 0: greedy */
    uint32_t top_k;           /* 0: off */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; over all of history */
    float frequency_penalty;  /* 0: off; over history from prompt_count on */
    float presence_penalty;   /* 0: off; likewise */
    uint32_t top_logprobs;    /* 0 to COLIBRI_TOP_LOGPROBS */
    uint64_t seed;
} colibri_sampling;

typedef struct colibri_sample_result {
    uint32_t token;
    float logprob; /* of the token, before penalties and temperature, over the allowed ids */
    uint32_t top_tokens[COLIBRI_TOP_LOGPROBS];
    float top_logprobs[COLIBRI_TOP_LOGPROBS]; /* falling; ties to the lowest id */
} colibri_sample_result;

COLIBRI_API uint64_t colibri_sample_scratch_size(uint32_t vocabulary_size);
/* Draws the token for `position` from logits [vocabulary_size]. `allowed`: one bit for each
 * id (bit id%8 of byte id/8), or NULL for all. history: the tokens so far, of which
 * the first prompt_count are the prompt. The draw depends on the arguments alone. */
COLIBRI_API colibri_status colibri_sample(const colibri_sampling *sampling, const float *logits,
                                          uint32_t vocabulary_size, const uint8_t *allowed, const uint32_t *history,
                                          uint32_t history_count, uint32_t prompt_count, uint64_t position,
                                          void *scratch, colibri_sample_result *result, char *message,
                                          size_t message_size);

/* ---- statistics ---- */

#define COLIBRI_OP_KINDS 32

/* A pass with one token of each item is decoding, any other is a prompt. */
typedef enum colibri_phase { COLIBRI_PHASE_PROMPT = 0, COLIBRI_PHASE_DECODE = 1 } colibri_phase;

typedef struct colibri_latency { /* nanoseconds; percentiles are at most a sixteenth above the true ones */
    uint64_t count, sum, p50, p99, largest;
} colibri_latency;

typedef struct colibri_phase_stats {
    uint64_t tokens;
    uint64_t passes;
    uint64_t nanoseconds;
    uint64_t parallel_regions; /* times that work was shared out to the threads and waited for */
    /* From the router's output to the start of the last thread's first task on the experts it chose: */
    colibri_latency dispatch;          /* when no thread had a context switch in between */
    colibri_latency dispatch_switched; /* when one had */
    uint64_t dispatch_missed;          /* the work was done before every thread had taken a task */
} colibri_phase_stats;

typedef struct colibri_stats {
    uint64_t tokens;                           /* computed since the engine was opened */
    uint64_t passes;                           /* walks over the program */
    uint64_t nanoseconds;                      /* in colibri_forward_batch */
    uint64_t op_nanoseconds[COLIBRI_OP_KINDS]; /* by op number */
    char cpu[16];                              /* variant chosen, as in runtime options */
    char matmul[16][32];                       /* kernel that ran, by format id; empty: none yet */
    colibri_phase_stats phases[2];             /* by colibri_phase */
    uint32_t resident;                         /* 1: every expert stays in memory */
    uint32_t is_direct;                        /* 1: experts are read past the page cache */
    uint64_t direct_bytes_per_second;          /* of reads past the page cache, as COLIBRI_IO_AUTO measured them; */
    uint64_t buffered_bytes_per_second;        /* of reads through it; 0: not measured */
    uint64_t predicted_passes;                 /* passes that predicted experts, */
    uint64_t unpredicted_passes;               /* and those that could but did not, as it did not pay */
    uint64_t prediction_nanoseconds;           /* spent on it */
    char warning[COLIBRI_MESSAGE_SIZE];        /* what the kernel refused when the engine opened, or empty */
} colibri_stats;

typedef struct colibri_expert_set_stats {
    uint32_t layer;
    uint32_t expert_count;
    uint64_t experts_computed; /* (pass, expert) pairs */
    uint64_t expert_tokens;    /* (token, expert) pairs */
    uint64_t bytes_touched;    /* bytes of the experts computed */
    uint64_t hits, misses;     /* experts asked for that were, or were not, in memory */
    uint64_t bytes_read;
    uint64_t stall_nanoseconds; /* waited for experts */
    uint64_t prefetched;        /* experts read ahead, */
    uint64_t prefetched_used;   /* and of these, asked for before they were evicted */
    uint64_t evictions;
    uint64_t load_nanoseconds;    /* sum over reads */
    uint64_t predictable;         /* experts chosen in passes that had predicted this layer, */
    uint64_t predicted, recalled; /* experts predicted, and of these, chosen */
} colibri_expert_set_stats;

COLIBRI_API void colibri_get_stats(const colibri_engine *engine, colibri_stats *stats);
/* nanoseconds: [layer_count + 1][COLIBRI_OP_KINDS] by layer and op number; the last row is outside any layer. */
COLIBRI_API colibri_status colibri_get_profile(const colibri_engine *engine, colibri_phase phase,
                                               uint64_t *nanoseconds);
/* set < expert_set_count; counts: [expert_count] tokens routed to each expert, or NULL. */
COLIBRI_API colibri_status colibri_get_expert_stats(const colibri_engine *engine, uint32_t set,
                                                    colibri_expert_set_stats *stats, uint64_t *counts);
/* Reads of each expert and the time they took, each [expert_count] or NULL. */
COLIBRI_API colibri_status colibri_get_expert_loads(const colibri_engine *engine, uint32_t set, uint64_t *loads,
                                                    uint64_t *load_nanoseconds);

#ifdef __cplusplus
}
#endif
#endif
