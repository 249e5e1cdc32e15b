"""What a GGUF file says, and the values of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.gguf_files import Raw, q4_0, q8_0, write_gguf
from checkpoint.gguf_models import ARCHITECTURES, gguf_tensors, in_pairs, metadata_of, write_model
from families.tiny_folder import CONFIGS, HEAD_DIM, HEADS, KV_HEADS, tensors_of

from colibri.checkpoint import gguf as module
from colibri.checkpoint import open_checkpoint
from colibri.errors import CheckpointError, NonFiniteError, UnsupportedModelError, UsageError
from colibri.families import plan_model

FAMILIES = sorted(CONFIGS)
random = np.random.default_rng(4)


def blocks(type: str, rows: int, cols: int) -> tuple[Raw, np.ndarray, np.ndarray]:
    """Blocks with every code and with scales of all kinds, and their codes [rows, cols] and scales."""
    groups = cols // 32
    bits = random.integers(0, 1 << 16, (rows, groups), dtype=np.uint16)
    bits[(bits & 0x7C00) == 0x7C00] = 0x8001  # the denormal of least magnitude, negative
    bits[0, 0] = 0
    scales = bits.view(np.float16)
    if type == "q4_0":
        codes = random.integers(0, 16, (rows, groups, 32), dtype=np.uint8)
        return q4_0(scales, codes), codes.reshape(rows, cols), scales
    codes = random.integers(-128, 128, (rows, groups, 32), dtype=np.int8)
    codes[:, :, 3] = -128
    return q8_0(scales, codes), codes.reshape(rows, cols), scales


def values_of(type: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    signed = codes.astype(np.float32) - np.float32(8 if type == "q4_0" else 0)
    return signed * np.repeat(scales.astype(np.float32), 32, axis=1)


def one_tensor(path: Path, name: str, tensor: np.ndarray | Raw, family: str = "qwen3_moe", **changes: Any):
    write_model(path, family, tensors_of(family), {name: tensor}, **changes)
    return open_checkpoint(path)


@pytest.mark.parametrize("type", ["q4_0", "q8_0"])
@pytest.mark.parametrize("piece_bytes", [1, 200, 4 << 20])
def test_blocks_are_decoded_exactly_and_handed_on_bit_for_bit(tmp_path, monkeypatch, type, piece_bytes):
    monkeypatch.setattr(module, "_BYTES_PER_PIECE", piece_bytes)
    raw, codes, scales = blocks(type, 40, 96)
    with one_tensor(tmp_path / "m.gguf", "token_embd.weight", raw) as checkpoint:
        name = "model.embed_tokens.weight"
        assert checkpoint.info(name).shape == (40, 96)
        assert checkpoint.stored_format(name) == ("q4_g32" if type == "q4_0" else "q8_g32")
        for start, stop in ((0, 40), (7, 19), (39, 40), (5, 5)):
            expected = values_of(type, codes, scales)[start:stop]
            np.testing.assert_array_equal(checkpoint.read(name, start, stop).view(np.uint32), expected.view(np.uint32))
            read_codes, read_scales = checkpoint.read_codes(name, start, stop)
            assert read_codes.dtype == codes.dtype
            np.testing.assert_array_equal(read_codes, codes[start:stop])
            np.testing.assert_array_equal(read_scales.view(np.uint16), scales[start:stop].view(np.uint16))


def test_nibble_order() -> None:
    """Weight j is the low nibble of byte j, weight j + 16 the high one: not the order of neighbours."""
    from colibri.checkpoint.gguf_blocks import codes_and_scales

    raw = np.frombuffer(np.float16(0.5).tobytes() + bytes(range(0x10, 0x20)), np.uint8).reshape(1, 18)
    codes, scales = codes_and_scales(raw, "Q4_0")
    assert codes.tolist() == [[*range(16), *[1] * 16]]
    assert scales.tolist() == [[0.5]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_floats_are_widened_exactly(tmp_path, dtype):
    stored = random.standard_normal((40, 24)).astype(np.float32)
    if dtype is np.float16:
        stored = stored.astype(np.float16)
    expected = stored.astype(np.float32)
    if dtype is np.uint16:
        stored = (stored.view(np.uint32) >> 16).astype(np.uint16)
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    with one_tensor(tmp_path / "m.gguf", "token_embd.weight", stored) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("model.embed_tokens.weight", 3, 30), expected[3:30])
        with pytest.raises(UsageError, match=r"'token_embd.weight' is not stored in codes"):
            checkpoint.read_codes("model.embed_tokens.weight", 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_its_name_and_values(tmp_path, family):
    tensors = tensors_of(family)
    with open_checkpoint(write_model(tmp_path / "m.gguf", family, tensors)) as checkpoint:
        assert checkpoint.names() == sorted(tensors)
        for name, expected in tensors.items():
            assert name in checkpoint
            assert checkpoint.info(name).shape == expected.shape
            np.testing.assert_array_equal(checkpoint.read(name), expected)
            half = expected.shape[0] // 2
            np.testing.assert_array_equal(checkpoint.read(name, half, half + 1), expected[half : half + 1])
        plan_model(checkpoint)


@pytest.mark.parametrize("type", ["q4_0", "q8_0"])
@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_rows_in_pairs_are_put_in_order_with_their_blocks(tmp_path, monkeypatch, type, part, heads):
    raw, codes, scales = blocks(type, heads * HEAD_DIM, 64)
    stored = Raw(in_pairs(raw.data, heads), raw.type)
    for piece_bytes in (1, 300, 4 << 20):
        monkeypatch.setattr(module, "_BYTES_PER_PIECE", piece_bytes)
        with one_tensor(tmp_path / "m.gguf", f"blk.1.attn_{part}.weight", stored, "mixtral") as checkpoint:
            name = f"model.layers.1.self_attn.{part}_proj.weight"
            for start, stop in ((0, len(codes)), (3, 13), (9, 10)):
                read_codes, read_scales = checkpoint.read_codes(name, start, stop)
                np.testing.assert_array_equal(read_codes, codes[start:stop])
                np.testing.assert_array_equal(read_scales, scales[start:stop])
                np.testing.assert_array_equal(
                    checkpoint.read(name, start, stop), values_of(type, codes, scales)[start:stop]
                )


def test_experts_one_by_one_are_read_too(tmp_path):
    """Files of before the experts of a layer were put into one tensor."""
    tensors = gguf_tensors(tensors_of("mixtral"), "mixtral")
    for name in [name for name in tensors if "_exps" in name]:
        stack = tensors.pop(name)
        tensors |= {name.replace("_exps.weight", f".{e}.weight"): array for e, array in enumerate(stack)}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata_of("mixtral"), tensors)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.names() == sorted(tensors_of("mixtral"))
        plan_model(checkpoint)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_no_number_names_the_tensor(tmp_path, bits):
    _, codes, scales = blocks("q8_0", 6 * 20, 64)
    scales = scales.copy()
    scales[3 * 20 + 5, 1] = np.uint16(bits).view(np.float16)
    stacked = q8_0(scales.reshape(6, 20, 2), codes.reshape(6, 20, 2, 32))
    with one_tensor(tmp_path / "m.gguf", "blk.0.ffn_up_exps.weight", stacked) as checkpoint:
        for read in (checkpoint.read, checkpoint.read_codes):
            with pytest.raises(NonFiniteError, match=r"blk\.0\.ffn_up_exps\.weight\[3\] of .*m\.gguf"):
                read("model.layers.0.mlp.experts.3.up_proj.weight", 0, 20)
            read("model.layers.0.mlp.experts.2.up_proj.weight", 0, 20)


def config_of(path: Path, family: str, extra: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    write_model(path, family, tensors_of(family), extra or {}, **changes)
    with open_checkpoint(path) as checkpoint:
        return checkpoint.config


def test_what_the_architecture_decides(tmp_path):
    path = tmp_path / "m.gguf"
    assert config_of(path, "qwen3_moe")["norm_topk_prob"] is True
    assert config_of(path, "qwen3_moe", expert_weights_norm=False)["norm_topk_prob"] is False
    assert config_of(path, "qwen2_moe")["norm_topk_prob"] is False
    assert config_of(path, "olmoe")["norm_topk_prob"] is False
    assert config_of(path, "olmoe", attention__clamp_kqv=8.0)["clip_qkv"] == 8
    assert config_of(path, "mixtral", attention__sliding_window=16)["sliding_window"] == 16
    assert config_of(path, "qwen3_moe")["rms_norm_eps"] == 1e-6
    assert config_of(path, "qwen3_moe", rope__freq_base=...)["rope_theta"] == 10000
    config = config_of(path, "qwen3_moe", attention__key_length=..., attention__value_length=...)
    assert config["head_dim"] == 24 // HEADS
    # A file without the expert's width shares the total out among the chosen experts.
    config = config_of(path, "qwen3_moe", feed_forward_length=40, expert_feed_forward_length=...)
    assert config["moe_intermediate_size"] == 20
    assert config_of(path, "qwen3_moe", attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2


def test_a_model_without_a_head_of_its_own_is_tied(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen3_moe", tensors_of("qwen3_moe", head=False))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is True
        plan_model(checkpoint)


def test_dense_layers_are_seen_by_their_tensors(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen3_moe", tensors_of("qwen3_moe", dense=(1,)))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["mlp_only_layers"] == [1]
        assert [s.layer for s in plan_model(checkpoint).expert_sets] == [0]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2}),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__yarn_beta_fast": 16.0,
                "rope__scaling__finetuned": True,
            },
            {
                "rope_type": "yarn",
                "factor": 4,
                "beta_fast": 16,
                "beta_slow": 1,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path, keys, expected):
    assert config_of(tmp_path / "m.gguf", "qwen3_moe", **keys)["rope_scaling"] == expected


def frequencies(path: Path) -> np.ndarray:
    with open_checkpoint(path) as checkpoint:
        source = next(w.source for w in plan_model(checkpoint).weights if w.name == "rope.inverse_frequencies")
        return source.read(0, 1)[0]


def test_rope_frequencies_with_factors(tmp_path):
    path, tensors = tmp_path / "m.gguf", tensors_of("mixtral")
    plain = frequencies(write_model(path, "mixtral", tensors))
    factors = np.array([1, 1, 2.5, 8], np.float32)
    divided = frequencies(write_model(path, "mixtral", tensors, {"rope_freqs.weight": factors}))
    np.testing.assert_array_equal(divided, plain / factors)
    ones = frequencies(write_model(path, "mixtral", tensors, {"rope_freqs.weight": np.ones(4, np.float32)}))
    np.testing.assert_array_equal(ones, plain)
    for wrong, message in ((np.ones(5), "list of 4 factors"), (np.array([1, 0, 1, 1]), "above 0")):
        write_model(path, "mixtral", tensors, {"rope_freqs.weight": 2 * wrong.astype(np.float32)})
        with pytest.raises(CheckpointError, match=message):
            frequencies(path)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("qwen3_moe", {"logit_scale": 2.0}, r"qwen3moe\.logit_scale = 2\.0"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func = 2"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, r"expert_weights_scale = 2\.5"),
        ("qwen3_moe", {"attention__causal": False}, "attention.causal = False"),
        ("qwen3_moe", {"attention__value_length": 16}, "attention.value_length = 16"),
        ("qwen3_moe", {"rope__dimension_count": 4}, "rope.dimension_count = 4"),
        ("qwen3_moe", {"attention__head_count": [4, 8]}, "attention.head_count differs between layers"),
        ("qwen3_moe", {"rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ("qwen3_moe", {"rope__scaling__attn_factor": 1.5}, r"attn_factor = 1\.5"),
        ("qwen3_moe", {"attention__sliding_window": 16}, "attention.sliding_window = 16"),
        ("mixtral", {"expert_count": 0}, "without experts is not supported"),
        ("mixtral", {"expert_weights_norm": False}, "expert_weights_norm = False"),
        ("qwen3_moe", {"general.type": "adapter"}, "of type 'adapter'"),
    ],
)
def test_what_could_change_the_arithmetic_is_refused_by_name(tmp_path, family, keys, message):
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(tmp_path / "m.gguf", family, **keys)


def test_a_window_no_smaller_than_the_context_is_none(tmp_path):
    config_of(tmp_path / "m.gguf", "qwen3_moe", attention__sliding_window=64)


@pytest.mark.parametrize(
    "missing", ["block_count", "embedding_length", "attention__head_count", "context_length", "expert_count"]
)
def test_missing_keys_are_named(tmp_path, missing):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=f"qwen3moe.{missing.replace('__', '.')}"):
        config_of(tmp_path / "m.gguf", "qwen3_moe", **{missing: ...})


NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
WRONG = [
    (key, value)
    for key in metadata_of("qwen3_moe", feed_forward_length=...)
    for value in ("text", True, 0.5, [0.5, 0.5])
    if value in ("text", True) or key not in NUMBERS
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_values_of_another_type_are_named_errors(tmp_path, key, value):
    path = write_model(tmp_path / "m.gguf", "qwen3_moe", tensors_of("qwen3_moe"), **{key.replace(".", "__"): value})
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"m\.gguf"), open_checkpoint(path) as checkpoint:
        plan_model(checkpoint)


def test_other_architectures_are_refused_with_the_supported_ones(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gemma3", {"block_count": 1}, {"a": np.zeros((2, 2), np.float32)})
    with pytest.raises(UnsupportedModelError, match=f"'gemma3' is not.*{', '.join(sorted(ARCHITECTURES.values()))}"):
        open_checkpoint(path)


def test_errors_call_tensors_what_the_file_calls_them(tmp_path):
    path, tensors = tmp_path / "m.gguf", tensors_of("qwen3_moe")
    write_model(path, "qwen3_moe", tensors, {"blk.1.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 tensor that this family does not use: blk\.1\.attn_sinks\.weight"):
        plan_model(open_checkpoint(path))
    write_model(path, "qwen3_moe", tensors, {"blk.1.ffn_norm.weight": np.zeros(5, np.float32)})
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_norm\.weight has shape \[5\], but metadata gives"):
        plan_model(open_checkpoint(path))
    partial = {name: t for name, t in gguf_tensors(tensors, "qwen3_moe").items() if "blk.0.ffn_up_exps" not in name}
    write_gguf(path, "qwen3moe", metadata_of("qwen3_moe"), partial)
    with pytest.raises(
        CheckpointError, match=r"lacks 6 tensors that metadata asks for: blk\.0\.ffn_up_exps\.weight\[0\]"
    ):
        plan_model(open_checkpoint(path))


def test_one_meaning_under_two_names_is_refused(tmp_path):
    extra = {"model.norm.weight": np.zeros(24, np.float32)}
    with pytest.raises(CheckpointError, match="is there in two forms"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "olmoe", tensors_of("olmoe"), extra))


def test_rows_that_are_no_whole_heads_are_refused(tmp_path):
    extra = {"blk.0.attn_q.weight": np.zeros((HEADS * HEAD_DIM - 1, 24), np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight .* no whole heads of 8"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "mixtral", tensors_of("mixtral"), extra))


def test_sampling_defaults(tmp_path):
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    write_model(tmp_path / "m.gguf", "olmoe", tensors_of("olmoe"), **keys)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.generation_config == {"temperature": 0.6, "top_k": 20}


def test_a_file_that_changes_or_is_closed(tmp_path):
    path = write_model(tmp_path / "m.gguf", "olmoe", tensors_of("olmoe"))
    with open_checkpoint(path) as checkpoint:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(CheckpointError, match="was changed"):
            checkpoint.read("model.norm.weight")
    with pytest.raises(UsageError, match="is closed"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"no tensor 'blk\.7\.attn_q\.weight'"):
        checkpoint.info("model.layers.7.self_attn.q_proj.weight")
