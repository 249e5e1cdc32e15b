import numpy as np
import pytest
from families.tiny_folder import CONFIGS, EXPERTS, FFN, HIDDEN, config_of, tensors_of, write_folder

from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError
from colibri.families import ModelPlan, Role, plan_model

ALL = sorted(CONFIGS)


def plan_of(folder, family, tensors, **changes) -> ModelPlan:
    write_folder(folder, config_of(family, **changes), tensors)
    return plan_model(open_checkpoint(folder))


@pytest.mark.parametrize("family", ALL)
def test_missing_tensors_are_listed_together(tmp_path, family):
    tensors = tensors_of(family)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    del tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .*layers.1.self_attn.k_proj.weight, model.norm.weight"):
        plan_of(tmp_path, family, tensors)


def test_at_most_ten_missing_tensors_are_listed(tmp_path):
    tensors = tensors_of("olmoe", layers=1)
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors") as caught:
        plan_of(tmp_path, "olmoe", tensors)
    assert str(caught.value).count("model.layers.1") == 10
    assert " more." in str(caught.value)


@pytest.mark.parametrize("family", ALL)
def test_a_tensor_that_nothing_uses_is_an_error(tmp_path, family):
    tensors = tensors_of(family) | {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)}
    with pytest.raises(
        CheckpointError, match=r"1 tensor that this family does not use: model.layers.0.self_attn.sinks"
    ):
        plan_of(tmp_path, family, tensors)
    tensors = tensors_of(family) | {"model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    assert plan_of(tmp_path, family, tensors).notes == ()


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_layers_beyond_the_count_are_skipped_and_noted_once(tmp_path, prefix):
    tensors = tensors_of("qwen3_moe")
    plain = plan_of(tmp_path / "plain", "qwen3_moe", tensors)
    extra = {
        f"{prefix}layers.2.eh_proj.weight": np.zeros((3, 5), np.float32),
        f"{prefix}layers.3.x": np.zeros(1, np.float32),
    }
    plan = plan_of(tmp_path / "extra", "qwen3_moe", tensors | extra, num_nextn_predict_layers=2)
    assert plan.notes == ("Skipped 2 tensors of layers from 2 on, which the model does not run.",)
    assert plan.program == plain.program
    assert plan_of(tmp_path / "none", "qwen3_moe", tensors, num_nextn_predict_layers=2).notes == ()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model.embed_tokens.weight", (41, HIDDEN)),
        ("model.layers.0.self_attn.v_proj.weight", (17, HIDDEN)),
        ("model.layers.1.self_attn.o_proj.weight", (HIDDEN, 31)),
        ("model.layers.1.input_layernorm.weight", (HIDDEN, 1)),
        ("lm_head.weight", (39, HIDDEN)),
    ],
)
def test_shapes_are_checked_against_the_configuration(tmp_path, family, name, wrong):
    tensors = tensors_of(family) | {name: np.zeros(wrong, np.float32)}
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[{', '.join(map(str, wrong))}\]") as caught:
        plan_of(tmp_path, family, tensors)
    assert "but config.json gives" in str(caught.value)


@pytest.mark.parametrize("family", ALL)
def test_fused_and_single_experts_are_the_same(tmp_path, family):
    single = plan_of(tmp_path / "single", family, tensors_of(family))
    fused = plan_of(tmp_path / "fused", family, tensors_of(family, fused=True))
    assert fused.program == single.program
    for a, b in zip(single.expert_sets, fused.expert_sets, strict=True):
        assert (a.layer, a.width, a.ffn, len(a.experts)) == (b.layer, b.width, b.ffn, EXPERTS)
        for one, other in zip(a.experts, b.experts, strict=True):
            for part in ("gate", "up", "down"):
                x, y = getattr(one, part), getattr(other, part)
                assert (x.rows, x.cols) == (y.rows, y.cols)
                np.testing.assert_array_equal(x.read(0, x.rows), y.read(0, y.rows))
                np.testing.assert_array_equal(x.read(3, 7), y.read(3, 7))


def test_gate_comes_before_up_in_fused_tensors(tmp_path):
    tensors = tensors_of("qwen3_moe", fused=True)
    expert = plan_of(tmp_path, "qwen3_moe", tensors).expert_sets[1].experts[4]
    stored = tensors["model.layers.1.mlp.experts.gate_up_proj"][4]
    np.testing.assert_array_equal(expert.gate.read(0, FFN), stored[:FFN])
    np.testing.assert_array_equal(expert.up.read(0, FFN), stored[FFN:])


def test_experts_both_fused_and_single_are_refused(tmp_path):
    tensors = tensors_of("mixtral") | tensors_of("mixtral", fused=True)
    with pytest.raises(CheckpointError, match=r"does not use: model.layers.0.block_sparse_moe.experts.0.w1.weight"):
        plan_of(tmp_path, "mixtral", tensors)


def test_a_fused_tensor_of_another_shape_is_refused(tmp_path):
    tensors = tensors_of("olmoe", fused=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj has shape \[6, 24, 40\], but config.json gives \[6, 40, 24\]"
    ):
        plan_of(tmp_path, "olmoe", tensors)


def test_mixtral_blocks_go_by_two_names(tmp_path):
    tensors = {name.replace("block_sparse_moe", "mlp"): t for name, t in tensors_of("mixtral", fused=True).items()}
    assert len(plan_of(tmp_path, "mixtral", tensors).expert_sets) == 2


@pytest.mark.parametrize("family", ALL)
def test_the_four_cases_of_tied_embeddings(tmp_path, family):
    head, no_head = tensors_of(family), tensors_of(family, head=False)
    tied = plan_of(tmp_path / "a", family, no_head, tie_word_embeddings=True)
    assert tied.notes == ()
    noted = plan_of(tmp_path / "b", family, head, tie_word_embeddings=True)
    assert "lm_head.weight is not used" in noted.notes[0]
    untied = plan_of(tmp_path / "c", family, head)
    for plan in (tied, noted):
        by_role = {w.role: w.source.name for w in plan.weights if w.role in (Role.HEAD, Role.EMBEDDING)}
        assert by_role == {Role.HEAD: "model.embed_tokens.weight"}
        assert plan.program.ops[-1].operands["weight"] == plan.program.ops[0].operands["table"]
    by_role = {w.role: w.source.name for w in untied.weights if w.role in (Role.HEAD, Role.EMBEDDING)}
    assert by_role == {Role.EMBEDDING: "model.embed_tokens.weight", Role.HEAD: "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"no lm_head.weight, and tie_word_embeddings is false"):
        plan_of(tmp_path / "d", family, no_head)


def test_roles_protect_router_and_shared_gate(tmp_path):
    plan = plan_of(tmp_path, "qwen2_moe", tensors_of("qwen2_moe"))
    roles = {w.source.name.removeprefix("model.layers.1."): w.role for w in plan.weights}
    assert roles["mlp.gate.weight"] == roles["mlp.shared_expert_gate.weight"] == Role.ROUTER
    assert roles["self_attn.q_proj.bias"] == roles["input_layernorm.weight"] == Role.VECTOR
    assert roles["mlp.shared_expert.up_proj.weight"] == Role.FEED_FORWARD
    assert roles["self_attn.o_proj.weight"] == Role.ATTENTION
