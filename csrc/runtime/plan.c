/* What an engine will take, computed as the engine computes it. */
#include "runtime/runtime.h"

#define RECORD_UNIT 4096 /* slots are whole pages */

static uint64_t table_bytes(const cb_model *model) {
    const cb_program *program = &model->program;
    uint64_t bytes = model->tensor_count * sizeof *model->tensors + model->set_count * sizeof *model->sets +
                     program->op_count * sizeof *program->ops + program->value_count * sizeof *program->values +
                     program->state_count * sizeof *program->states;
    for (uint32_t s = 0; s < model->set_count; s++)
        bytes += model->sets[s].count * sizeof *model->sets[s].experts;
    return bytes;
}

uint64_t cb_all_expert_bytes(const cb_model *model) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < model->set_count; s++)
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            bytes += model->sets[s].experts[i].size;
    return bytes;
}

uint64_t cb_token_expert_bytes(const cb_model *model) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->program.op_count; i++) {
        const cb_op *op = &model->program.ops[i];
        if (op->opcode != CB_OP_EXPERTS)
            continue;
        const cb_expert_set *set = &model->sets[op->experts.set];
        uint64_t largest = 0;
        for (uint32_t e = 0; e < set->count; e++)
            largest = set->experts[e].size > largest ? set->experts[e].size : largest;
        bytes += largest * model->program.values[op->experts.routing].width;
    }
    return bytes;
}

static void plan_experts(const cb_model *model, colibri_memory_plan *plan) {
    for (uint32_t s = 0; s < model->set_count; s++) {
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < model->sets[s].count; i++)
            bytes += cb_round_up(model->sets[s].experts[i].size, RECORD_UNIT);
        plan->expert_count += model->sets[s].count;
        plan->largest_layer_bytes = bytes > plan->largest_layer_bytes ? bytes : plan->largest_layer_bytes;
    }
    plan->token_expert_bytes = cb_token_expert_bytes(model);
}

static colibri_status plan_session(const cb_model *model, const colibri_session_options *options,
                                   colibri_memory_plan *plan, cb_error *error) {
    uint32_t format =
        options->state_format != COLIBRI_STATE_DEFAULT ? options->state_format : model->program.default_state_format;
    cb_block_layout layout;
    if (cb_block_layout_make(&model->program, format, &layout, error) != COLIBRI_OK)
        return error->status;
    plan->session_bytes = cb_session_bytes(&layout, options->context);
    cb_block_layout_free(&layout);
    return COLIBRI_OK;
}

static colibri_status plan_model(const colibri_runtime *runtime, const cb_model *model,
                                 const colibri_engine_options *options, const colibri_session_options *session,
                                 colibri_memory_plan *plan, cb_error *error) {
    cb_store_options store_options;
    cb_store_plan store;
    cb_vm_options vm;
    uint64_t arena, tables, tensors = 0;
    cb_engine_parts(model, options, &store_options, &vm);
    cb_expert_store_plan(model, &store_options, &store);
    if (cb_vm_plan(model, runtime->kernels, cb_pool_threads(runtime->pool), &vm, &arena, &tables, error) != COLIBRI_OK)
        return error->status;
    for (uint32_t i = 0; i < model->tensor_count; i++)
        tensors += cb_round_up(model->tensors[i].size, CB_CACHE_LINE);
    plan->tensor_bytes = cb_alloc_bytes(tensors);
    plan->scratch_bytes = cb_alloc_bytes(arena);
    plan->other_bytes =
        cb_alloc_bytes(table_bytes(model) + tables + sizeof(colibri_engine)) + cb_alloc_bytes(store.other_bytes);
    plan->all_expert_bytes = store.all_bytes;
    plan->least_expert_bytes = store.least_bytes;
    plan->wasted_expert_bytes = store.wasted_bytes;
    plan->expert_set_count = model->set_count;
    plan->vocabulary_size = model->program.vocabulary_size;
    plan->context_limit = model->program.context_limit;
    plan_experts(model, plan);
    return plan_session(model, session, plan, error);
}

colibri_status colibri_plan_memory(colibri_runtime *runtime, const char *path, const colibri_engine_options *given,
                                   const colibri_session_options *session, colibri_memory_plan *plan, char *message,
                                   size_t message_size) {
    cb_error error = {0};
    colibri_engine_options options;
    cb_model *model = NULL;
    if (plan != NULL)
        *plan = (colibri_memory_plan){0};
    if (runtime == NULL || path == NULL || session == NULL || plan == NULL)
        cb_fail(&error, COLIBRI_INVALID, "runtime, path, session_options and plan must not be NULL");
    else if (cb_forked(runtime))
        cb_fail_forked(&error);
    else if (cb_check_engine_options(given, &options, &error) == COLIBRI_OK &&
             cb_check_session_options(session, &error) == COLIBRI_OK &&
             cb_model_open(path, &model, &error) == COLIBRI_OK)
        plan_model(runtime, model, &options, session, plan, &error);
    cb_model_close(model);
    cb_copy_message(&error, message, message_size);
    return error.status;
}
