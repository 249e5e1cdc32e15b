import pytest
from families.tiny_folder import CONFIGS, FFN, HEAD_DIM, HIDDEN, config_of, tensors_of, write_folder

from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError, UnsupportedModelError
from colibri.families import FAMILIES, ModelPlan, plan_model
from colibri.program.ops import BY_NUMBER, OPS

ALL = sorted(CONFIGS)


def plan_of(folder, family, tensors=None, **changes) -> ModelPlan:
    write_folder(folder, config_of(family, **changes), tensors_of(family) if tensors is None else tensors)
    with open_checkpoint(folder) as checkpoint:
        return plan_model(checkpoint)


def operands(plan, name, layer):
    return [o.operands for o in plan.program.ops if o.opcode == OPS[name].opcode and o.layer == layer]


def test_the_registry_has_the_families_under_test():
    assert sorted(FAMILIES) == ALL


@pytest.mark.parametrize("family", ALL)
def test_unknown_keys_are_named_with_their_value(tmp_path, family):
    with pytest.raises(
        UnsupportedModelError, match=r"config.json of .*logit_scale = 0.5, quantization_config = \{'bits': 4\}"
    ):
        plan_of(tmp_path, family, logit_scale=0.5, quantization_config={"bits": 4})


@pytest.mark.parametrize("family", ALL)
def test_keys_without_influence_are_accepted(tmp_path, family):
    harmless = {
        "architectures": FAMILIES[family].architectures, "torch_dtype": "bfloat16", "dtype": None, "use_cache": False,
        "transformers_version": "5.0", "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None,
        "initializer_range": 0.1, "attention_dropout": 0.1, "resid_pdrop": 0.1, "router_aux_loss_coef": 0.1,
        "output_router_logits": True, "num_nextn_predict_layers": 1, "is_encoder_decoder": False, "pruned_heads": {},
        "logit_scale": None,
    }  # fmt: skip
    assert plan_of(tmp_path, family, **harmless).family == family


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act = 'gelu'"),
        ({"is_encoder_decoder": True}, UnsupportedModelError, "is_encoder_decoder = True"),
        ({"hidden_size": ...}, CheckpointError, "has no hidden_size"),
        ({"hidden_size": None}, CheckpointError, "has no hidden_size"),
        ({"hidden_size": "64"}, CheckpointError, "hidden_size = '64' should be an integer"),
        ({"hidden_size": True}, CheckpointError, "hidden_size = True"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 3}, CheckpointError, "multiple of num_key_value_heads"),
        ({"num_experts_per_tok": 7}, CheckpointError, "more than the 6 experts"),
        ({"num_experts": 6, "num_local_experts": 5}, CheckpointError, "contradicts itself"),
        ({"rms_norm_eps": float("inf")}, CheckpointError, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings = 1 should be true or false"),
        ({"head_dim": 7}, UnsupportedModelError, "head_dim 7 is odd"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor = 0.5"),
        ({"max_position_embeddings": ...}, CheckpointError, "has no max_position_embeddings"),
    ],
)
def test_values_that_cannot_be_used(tmp_path, family, changes, error, message):
    with pytest.raises(error, match=message):
        plan_of(tmp_path, family, **changes)


def test_another_model_type_lists_the_supported_ones(tmp_path):
    with pytest.raises(UnsupportedModelError, match="'deepseek_v3' is not supported; supported: mixtral, olmoe"):
        plan_of(tmp_path, "olmoe", model_type="deepseek_v3")


@pytest.mark.parametrize("family", ALL)
def test_architectures_stand_in_for_the_model_type(tmp_path, family):
    names = list(FAMILIES[family].architectures)
    assert plan_of(tmp_path, family, model_type=..., architectures=names).family == family
    with pytest.raises(UnsupportedModelError, match="ForSequenceClassification is not supported"):
        plan_of(tmp_path, family, architectures=["ForSequenceClassification"])
    with pytest.raises(UnsupportedModelError, match="no known model_type or architecture"):
        plan_of(tmp_path, family, model_type=...)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("head_dim", [None, ...])
def test_head_dim_falls_back_to_hidden_size_by_heads(tmp_path, family, head_dim):
    plan = plan_of(tmp_path, family, tensors_of(family, head_dim=HIDDEN // 4), head_dim=head_dim)
    assert [state.key_dim for state in plan.program.states] == [HIDDEN // 4] * 2


@pytest.mark.parametrize("family", ALL)
def test_head_dim_may_differ_from_hidden_size_by_heads(tmp_path, family):
    assert HIDDEN // 4 != HEAD_DIM
    plan = plan_of(tmp_path, family)
    assert [state.key_dim for state in plan.program.states] == [HEAD_DIM] * 2
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \[32, 24\], but config.json gives \[64, 24\]"):
        plan_of(tmp_path, family, head_dim=16)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_norm_topk_prob_is_false_when_absent(tmp_path, family):
    assert operands(plan_of(tmp_path, family), "route", 1)[0]["normalise"] == 0
    assert operands(plan_of(tmp_path, family, norm_topk_prob=True), "route", 1)[0]["normalise"] == 1


def test_mixtral_always_normalises(tmp_path):
    assert operands(plan_of(tmp_path, "mixtral"), "route", 1)[0]["normalise"] == 1


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    ("only", "step", "sparse"),
    [([1], 2, [3]), ([], 1, [0, 1, 2, 3]), (None, 1, [0, 1, 2, 3]), ([0, 2], 1, [1, 3]), ([], 4, [3]), ([], 3, [2])],
)
def test_dense_and_sparse_layers(tmp_path, family, only, step, sparse):
    dense = tuple(layer for layer in range(4) if layer not in sparse)
    tensors = tensors_of(family, layers=4, dense=dense)
    plan = plan_of(tmp_path, family, tensors, num_hidden_layers=4, mlp_only_layers=only, decoder_sparse_step=step)
    assert [expert_set.layer for expert_set in plan.expert_sets] == sparse
    assert {expert_set.ffn for expert_set in plan.expert_sets} == {FFN}


def test_a_model_without_experts_is_dense_everywhere(tmp_path):
    tensors = tensors_of("qwen3_moe", dense=(0, 1))
    assert plan_of(tmp_path, "qwen3_moe", tensors, num_experts=0).expert_sets == ()


def windows(plan):
    return [operands(plan, "attention", layer)[0]["window"] for layer in range(2)]


def test_sliding_windows(tmp_path):
    assert windows(plan_of(tmp_path, "mixtral", sliding_window=9)) == [9, 9]
    assert windows(plan_of(tmp_path, "mixtral", sliding_window=None)) == [0, 0]
    assert windows(plan_of(tmp_path, "qwen3_moe", sliding_window=9)) == [0, 0]
    assert windows(plan_of(tmp_path, "qwen3_moe", sliding_window=9, use_sliding_window=True)) == [9, 9]
    sliding = {"sliding_window": 9, "use_sliding_window": True}
    assert windows(plan_of(tmp_path, "qwen2_moe", sliding_window=9)) == [0, 0]
    assert windows(plan_of(tmp_path, "qwen2_moe", **sliding)) == [9, 0]
    assert windows(plan_of(tmp_path, "qwen2_moe", **sliding, max_window_layers=0)) == [0, 0]
    kinds = ["full_attention", "sliding_attention"]
    assert windows(plan_of(tmp_path, "qwen2_moe", **sliding, layer_types=kinds)) == [0, 9]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "need use_sliding_window"),
        ("qwen2_moe", {"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "a list of 2 words"),
        ("mixtral", {"sliding_window": 0}, "sliding_window = 0"),
        ("mixtral", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("olmoe", {"sliding_window": 9}, "sliding_window = 9"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv = 0"),
        ("olmoe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ],
)
def test_keys_a_family_does_not_have(tmp_path, family, changes, message):
    with pytest.raises((UnsupportedModelError, CheckpointError), match=message):
        plan_of(tmp_path, family, **changes)


def names(plan, layer):
    return [BY_NUMBER[op.opcode].name for op in plan.program.ops if op.layer == layer]


def test_olmoe_norms_the_whole_vector_then_clips_then_rotates(tmp_path):
    plan = plan_of(tmp_path, "olmoe", clip_qkv=0.5)
    assert names(plan, 0)[1:5] == ["matmul", "rms_norm", "clamp", "rope"]
    assert [o["group"] for o in operands(plan, "rms_norm", 0)][1:3] == [32, 16]
    assert [(o["low"], o["high"]) for o in operands(plan, "clamp", 0)] == [(-0.5, 0.5)] * 3
    assert operands(plan_of(tmp_path, "olmoe", clip_qkv=None), "clamp", 0) == []


def test_qwen3_norms_each_head(tmp_path):
    assert [o["group"] for o in operands(plan_of(tmp_path, "qwen3_moe"), "rms_norm", 0)] == [HIDDEN, 8, 8, HIDDEN]


def test_qwen2_gates_its_shared_expert(tmp_path):
    assert names(plan_of(tmp_path, "qwen2_moe"), 0)[-9:] == [
        "experts", "matmul", "matmul", "gated_activation", "matmul", "matmul", "sigmoid_gate", "add", "add",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "key", "biases"),
    [("qwen3_moe", "attention_bias", 4), ("olmoe", "attention_bias", 4), ("qwen2_moe", "qkv_bias", 3)],
)
def test_attention_biases(tmp_path, family, key, biases):
    for flag in (True, False):
        plan = plan_of(tmp_path, family, tensors_of(family, bias=flag), **{key: flag})
        present = sum(o["bias"] != 0xFFFFFFFF for o in operands(plan, "matmul", 0))
        assert present == (biases if flag else 0)
    with pytest.raises(CheckpointError, match=r"do(es)? not use: .*q_proj.bias"):
        plan_of(tmp_path, family, tensors_of(family, bias=True), **{key: False})
