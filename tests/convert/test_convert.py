import json
import os

import numpy as np
import pytest
from families.tiny_folder import CONFIGS, config_of, tensors_of, write_family, write_folder

from colibri.cbi import CbiFile
from colibri.cbi.layout import FORMAT_BY_ID, LAYOUT_BY_ID
from colibri.convert import WEIGHTS, convert, packing
from colibri.errors import (
    CheckpointError,
    ModelFileError,
    NonFiniteError,
    UnsupportedModelError,
    UsageError,
)

ALL = sorted(CONFIGS)


def formats_of(file: CbiFile) -> dict[str, tuple[str, str]]:
    return {t.name: (FORMAT_BY_ID[t.format].name, LAYOUT_BY_ID[t.layout].name) for t in file.tensors}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("family", ALL)
def test_the_file_holds_the_checkpoint(tmp_path, family, weights):
    tensors = tensors_of(family)
    report = convert(write_family(tmp_path / "in", family), tmp_path / "out.cbi", weights=weights, threads=2)
    exact = weights in ("f32", "keep")
    tolerance = {"f32": 0, "keep": 0, "f16": 1e-3, "bf16": 4e-3, "q8": 0.01, "q4": 0.16}[weights]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")

    def near(read, name):
        source = tensors[name].reshape(read.shape)
        if exact:
            np.testing.assert_array_equal(read, source)
        else:
            assert np.abs(read - source).max() <= tolerance * np.abs(source).max()

    with CbiFile.open(report.path) as file:
        near(file.read_tensor("layers.1.attention.k"), "model.layers.1.self_attn.k_proj.weight")
        near(file.read_tensor("embedding"), "model.embed_tokens.weight")
        near(file.read_tensor("head"), "lm_head.weight")
        for name in ("norm", "layers.0.router", "layers.1.mlp.norm"):
            assert file.read_tensor(name).dtype == np.float32
        np.testing.assert_array_equal(
            file.read_tensor("layers.1.router"), tensors[f"model.layers.1.{block}.gate.weight"]
        )
        for expert in (0, 5):
            read = file.read_expert(1, expert)
            for matrix, part in zip(read, (gate, up, down), strict=True):
                near(matrix, f"model.layers.1.{block}.experts.{expert}.{part}.weight")
        assert file.digest == report.digest
        assert file.program.default_state_format == (1 if exact else 2)
        assert report.file_bytes == (tmp_path / "out.cbi").stat().st_size
        file.verify_digests()


def test_formats_of_every_role(tmp_path):
    source = write_family(tmp_path / "in", "qwen2_moe")
    convert(source, tmp_path / "q4.cbi", weights="q4")
    with CbiFile.open(tmp_path / "q4.cbi") as file:
        formats = formats_of(file)
        assert formats["embedding"] == ("q8_g32", "rows")
        assert formats["head"] == formats["layers.0.attention.q"] == ("q8_g32", "tiled16x4")
        assert formats["layers.0.shared.up"] == ("q4_g32", "tiled16x4")
        assert formats["layers.0.router"] == formats["layers.0.shared.scale"] == ("f32", "tiled16")
        assert formats["layers.0.attention.q_bias"] == formats["norm"] == ("f32", "rows")
        assert {FORMAT_BY_ID[f].name for s in file.expert_sets for e in s.experts for f in e.formats} == {"q4_g32"}
    convert(source, tmp_path / "bf16.cbi", weights="bf16")
    with CbiFile.open(tmp_path / "bf16.cbi") as file:
        formats = formats_of(file)
        assert (formats["embedding"], formats["head"]) == (("bf16", "rows"), ("bf16", "tiled16"))
        assert formats["layers.0.router"] == ("f32", "tiled16")


def test_a_tied_embedding_is_stored_once_and_in_tiles(tmp_path):
    source = write_folder(
        tmp_path / "in", config_of("qwen3_moe", tie_word_embeddings=True), tensors_of("qwen3_moe", head=False)
    )
    convert(source, tmp_path / "out.cbi", weights="q4")
    with CbiFile.open(tmp_path / "out.cbi") as file:
        assert formats_of(file)["embedding"] == ("q8_g32", "tiled16x4")
        assert "head" not in formats_of(file)


@pytest.mark.parametrize("stored", [np.float16, np.uint16])
def test_16_bit_checkpoints_are_kept_exactly(tmp_path, stored):
    tensors = tensors_of("olmoe")
    if stored is np.float16:
        halves = {name: t.astype(np.float16) for name, t in tensors.items()}
    else:
        halves = {name: (t.view(np.uint32) >> 16).astype(np.uint16) for name, t in tensors.items()}
    write_folder(tmp_path / "in", config_of("olmoe"), halves)
    report = convert(tmp_path / "in", tmp_path / "out.cbi", weights="f16" if stored is np.float16 else "bf16")
    assert all(error.rms_error == error.largest == 0 for error in report.errors)
    half = halves["model.layers.0.self_attn.q_proj.weight"]
    expected = half.astype(np.float32) if stored is np.float16 else (half.astype(np.uint32) << 16).view(np.float32)
    with CbiFile.open(tmp_path / "out.cbi") as file:
        np.testing.assert_array_equal(file.read_tensor("layers.0.attention.q"), expected)


@pytest.mark.parametrize("family", ALL)
def test_threads_slices_and_fused_tensors_do_not_change_a_byte(tmp_path, family, monkeypatch):
    # The folders have one name, because the file records it.
    single = write_folder(tmp_path / "single" / "m", config_of(family), tensors_of(family))
    fused = write_folder(tmp_path / "fused" / "m", config_of(family), tensors_of(family, fused=True))
    convert(single, tmp_path / "a.cbi", weights="q4", threads=1)
    expected = (tmp_path / "a.cbi").read_bytes()
    monkeypatch.setattr(packing, "SLICE_BYTES", 16 * 24 * 4)
    for source, threads in ((single, 1), (single, 2), (single, 7), (fused, 2)):
        convert(source, tmp_path / "b.cbi", weights="q4", threads=threads)
        assert without_fused_names(tmp_path / "b.cbi") == without_fused_names(tmp_path / "a.cbi")
        if source is single:
            assert (tmp_path / "b.cbi").read_bytes() == expected


def without_fused_names(path) -> bytes:
    """Everything but the metadata, which names the worst tensor as the checkpoint does."""
    with CbiFile.open(path) as file:
        at = min(s.offset for s in file.sections if s.type == 9)
        return path.read_bytes()[128:at]


def test_the_report_names_the_worst_tensor(tmp_path):
    tensors = tensors_of("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    # One large value in each row makes the grid too coarse for the others.
    tensors[name][:] = 0.2
    tensors[name][:, 5] = 3.0
    report = convert(write_folder(tmp_path / "in", config_of("mixtral"), tensors), tmp_path / "out.cbi", weights="q4")
    errors = {error.role: error for error in report.errors}
    assert errors["expert"].largest_tensor == name
    assert 0 < errors["expert"].rms_error <= errors["expert"].largest < 0.5
    assert errors["router"].rms_error == 0
    with CbiFile.open(report.path) as file:
        assert file.metadata["quantisation"]["expert"]["largest_tensor"] == name
        assert file.metadata["family"] == "mixtral"
        assert file.metadata["source"] == "in"
        assert file.metadata["weights"] == "q4"
        assert file.metadata["parameters"] == sum(t.size for t in tensors.values())


def test_progress_reaches_the_end(tmp_path):
    seen = []
    convert(
        write_family(tmp_path / "in", "olmoe"),
        tmp_path / "o.cbi",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_generation_defaults_are_stored(tmp_path):
    source = write_family(tmp_path / "in", "olmoe")
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 7], "temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 9})
    )
    convert(source, tmp_path / "out.cbi")
    with CbiFile.open(tmp_path / "out.cbi") as file:
        assert file.settings == {"generation": {"temperature": 0.6, "top_k": 20, "do_sample": True}}
        assert file.tokenizer_json is None
    (source / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(CheckpointError, match="top_p = 'high' is not a number"):
        convert(source, tmp_path / "out.cbi")


def test_tokenizer_template_and_stop_tokens_are_stored(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|end|>": 0, "a": 1, "<|stop|>": 2, "b": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    source = write_family(tmp_path / "in", "qwen3_moe", eos_token_id=3)
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>", "chat_template": "{{ 1 }}"}))
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    convert(source, tmp_path / "out.cbi")
    with CbiFile.open(tmp_path / "out.cbi") as file:
        assert file.settings["tokenizer"]["stop_token_ids"] == [0, 2, 3]
        assert file.chat_template == "{{ 1 }}"
        assert json.loads(file.tokenizer_json or b"")["model"]["vocab"] == vocabulary


def test_too_large_for_f16_names_the_tensor(tmp_path):
    tensors = tensors_of("olmoe")
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"][3, 3] = 1e5
    source = write_folder(tmp_path / "in", config_of("olmoe"), tensors)
    with pytest.raises(UsageError, match=r"layers.1.mlp.experts.2.down_proj.weight.*f16"):
        convert(source, tmp_path / "out.cbi", weights="f16")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    convert(source, tmp_path / "out.cbi", weights="bf16")


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate.weight", "model.norm.weight", "lm_head.weight"])
def test_nan_and_infinity_name_the_tensor(tmp_path, weights, name):
    tensors = tensors_of("olmoe")
    tensors[name].flat[7] = np.nan if weights == "q8" else np.inf
    with pytest.raises(NonFiniteError, match=name):
        convert(write_folder(tmp_path / "in", config_of("olmoe"), tensors), tmp_path / "out.cbi", weights=weights)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_notes_are_handed_on(tmp_path):
    tensors = tensors_of("qwen3_moe") | {"model.layers.2.extra": np.zeros(3, np.float32)}
    source = write_folder(tmp_path / "in", config_of("qwen3_moe", tie_word_embeddings=True), tensors)
    notes = convert(source, tmp_path / "out.cbi").notes
    assert len(notes) == 2


def test_arguments_that_cannot_be_used(tmp_path):
    source = write_family(tmp_path / "in", "olmoe")
    out = tmp_path / "out.cbi"
    for arguments, message in (
        ({"weights": "q5"}, "'q5' is not known; choose one of q8, q4, bf16, f16, f32"),
        ({"threads": 0}, "threads must be"),
        ({"threads": 2.0}, "threads must be"),
        ({"threads": 1025}, "threads must be"),
    ):
        with pytest.raises(UsageError, match=message):
            convert(source, out, **arguments)
    with pytest.raises(CheckpointError, match="nowhere"):
        convert(tmp_path / "nowhere", out)
    with pytest.raises(UsageError, match="is a folder"):
        convert(source, tmp_path)
    with pytest.raises(UsageError, match="none is not a folder"):
        convert(source, tmp_path / "none" / "out.cbi")
    with pytest.raises(UsageError, match=r"exists and is not a \.cbi file"):
        convert(source, source / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="model_type 'gpt2'"):
        convert(write_family(tmp_path / "gpt2", "olmoe", model_type="gpt2"), out)
    assert not out.exists()


def test_a_source_that_may_only_be_read(tmp_path):
    source = write_family(tmp_path / "模型 \U0001f426", "olmoe")
    source.chmod(0o555)
    before = sorted(os.listdir(source))
    convert(source, tmp_path / "out.cbi")
    assert sorted(os.listdir(source)) == before


def test_a_checkpoint_that_ends_early_leaves_nothing(tmp_path):
    source = write_family(tmp_path / "in", "olmoe")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        convert(source, tmp_path / "out.cbi")
    assert not (tmp_path / "out.cbi").exists()


def test_an_old_file_stays_when_a_conversion_fails(tmp_path):
    convert(write_family(tmp_path / "in", "olmoe"), tmp_path / "out.cbi")
    old = (tmp_path / "out.cbi").read_bytes()
    tensors = tensors_of("olmoe")
    tensors["lm_head.weight"][0, 0] = np.nan
    with pytest.raises(NonFiniteError):
        convert(write_folder(tmp_path / "bad", config_of("olmoe"), tensors), tmp_path / "out.cbi")
    assert (tmp_path / "out.cbi").read_bytes() == old
    with pytest.raises(ModelFileError):
        CbiFile.open(tmp_path / "in" / "model.safetensors")
