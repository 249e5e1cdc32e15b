"""GGUF files to .cbi: the same bytes as from the folder of the same model, and blocks that are copied bit for bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint.gguf_files import FLOAT32, Q4_0, STRING, UINT32, Raw, image, key, q4_0, q8_0, tensor
from checkpoint.gguf_models import gguf_tensors, in_pairs, metadata_of, write_model
from families.tiny_folder import CONFIGS, config_of, tensors_of, write_folder
from parity.backends import opened

from colibri.cbi import CbiFile
from colibri.cbi.layout import FORMAT_BY_ID, LAYOUT_BY_ID
from colibri.checkpoint import open_checkpoint
from colibri.checkpoint.gguf_header import read_gguf_header
from colibri.convert import convert, packing
from colibri.errors import NonFiniteError, UnsupportedModelError, UsageError
from colibri.quantize import QuantisedRows, dequantise, format_named

ROOT = Path(__file__).parents[2]
ALL = sorted(CONFIGS)


def formats_of(file: CbiFile) -> dict[str, tuple[str, str]]:
    return {t.name: (FORMAT_BY_ID[t.format].name, LAYOUT_BY_ID[t.layout].name) for t in file.tensors}


def without_metadata(path: Path) -> bytes:
    """The file without its header and the metadata, which name the source."""
    with CbiFile.open(path) as file:
        return path.read_bytes()[128 : min(s.offset for s in file.sections if s.type == 9)]


def folder_config(family: str) -> dict:
    config = config_of(family)
    if family in ("qwen3_moe", "qwen2_moe"):
        config["norm_topk_prob"] = family == "qwen3_moe"
    return config


@pytest.mark.parametrize("weights", ["f32", "q8", "keep"])
@pytest.mark.parametrize("family", ALL)
def test_the_same_file_as_from_the_folder(tmp_path, family, weights):
    """Program, weights and settings are equal byte by byte; only the metadata names the source."""
    tensors = tensors_of(family)
    folder = write_folder(tmp_path / "in", folder_config(family), tensors)
    gguf = write_model(tmp_path / "m.gguf", family, tensors)
    convert(folder, tmp_path / "folder.cbi", weights=weights)
    report = convert(gguf, tmp_path / "gguf.cbi", weights=weights)
    assert without_metadata(tmp_path / "gguf.cbi") == without_metadata(tmp_path / "folder.cbi")
    with CbiFile.open(tmp_path / "gguf.cbi") as file, CbiFile.open(tmp_path / "folder.cbi") as expected:
        assert file.program == expected.program
        assert file.metadata["parameters"] == expected.metadata["parameters"] == report.parameters
        assert (file.metadata["source"], file.metadata["weights"]) == ("m.gguf", weights)
        assert file.tokenizer_json is None


@pytest.fixture(scope="module", params=["q4_0", "q8_0"])
def made(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """The same model as blocks in a GGUF file and as their values in a folder."""
    place = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, str(ROOT / "bench" / "make_model.py"), "--shape", "tiny", "--layers", "2"]
    command += ["--hf", str(place / "in"), "--gguf", str(place / "m.gguf"), "--type", request.param]
    subprocess.run(command, check=True)
    return {"q4_0": "q4_g32", "q8_0": "q8_g32"}[request.param], place / "in", place / "m.gguf"


def test_blocks_hold_the_values_of_the_folder(tmp_path, made):
    format, folder, gguf = made
    report = convert(gguf, tmp_path / "keep.cbi")
    convert(folder, tmp_path / "f32.cbi", weights="f32")
    assert report.weights == "keep"
    assert all(error.rms_error == error.largest == 0 for error in report.errors)
    assert {e.role: e.format for e in report.errors if e.format != "f32"} == dict.fromkeys(
        ("embedding", "attention", "head", "expert"), format
    )
    with CbiFile.open(tmp_path / "keep.cbi") as kept, CbiFile.open(tmp_path / "f32.cbi") as exact:
        kept.verify_digests()
        assert kept.program.ops == exact.program.ops
        formats = formats_of(kept)
        assert formats["embedding"] == (format, "rows")
        assert formats["head"] == formats["layers.0.attention.k"] == (format, "tiled16x4")
        assert formats["layers.1.router"] == ("f32", "tiled16")
        assert {FORMAT_BY_ID[f].name for s in kept.expert_sets for e in s.experts for f in e.formats} == {format}
        for tensor in exact.tensors:
            np.testing.assert_array_equal(kept.read_tensor(tensor.name), exact.read_tensor(tensor.name))
        for index in range(len(exact.expert_sets)):
            for expert in range(len(exact.expert_sets[index].experts)):
                for ours, theirs in zip(kept.read_expert(index, expert), exact.read_expert(index, expert), strict=True):
                    np.testing.assert_array_equal(ours, theirs)


def test_other_formats_are_requantised_and_equal_ones_copied(tmp_path, made):
    format, folder, gguf = made
    for weights in ("q4", "q8", "bf16"):
        report = convert(gguf, tmp_path / "gguf.cbi", weights=weights)
        convert(folder, tmp_path / "folder.cbi", weights=weights)
        wanted = {"q4": "q4_g32", "q8": "q8_g32", "bf16": "bf16"}[weights]
        errors = {error.role: error for error in report.errors}
        assert errors["expert"].format == wanted
        assert (errors["expert"].rms_error == 0) == (wanted == format)
        with CbiFile.open(tmp_path / "gguf.cbi") as file:
            embedding = "q8_g32" if weights == "q4" else wanted
            assert formats_of(file)["embedding"] == (embedding, "rows")
        if wanted != format and embedding != format:
            assert without_metadata(tmp_path / "gguf.cbi") == without_metadata(tmp_path / "folder.cbi")


def blocks(seed: int, type: str, *shape: int) -> tuple[Raw, np.ndarray]:
    """Blocks of every code, -128 included, with positive, negative and zero scales; and their values."""
    random = np.random.default_rng(seed)
    groups = (*shape[:-1], shape[-1] // 32)
    scales = (random.standard_normal(groups) / 100).astype(np.float16)
    scales[..., 0].flat[::5] = 0
    if type == "q4_0":
        codes = random.integers(0, 16, (*groups, 32), dtype=np.uint8)
        raw, signed = q4_0(scales, codes), codes.astype(np.float32) - 8
    else:
        codes = random.integers(-128, 128, (*groups, 32), dtype=np.int8)
        codes[..., 7] = -128
        raw, signed = q8_0(scales, codes), codes.astype(np.float32)
    return raw, (signed * scales.astype(np.float32)[..., None]).reshape(shape)


def blocked_model(path: Path, family: str) -> tuple[Path, dict[str, np.ndarray]]:
    """A model with widths that are no multiple of 128, half of it in Q4_0 and half in Q8_0; returns its values."""
    shapes = {name: list(t.shape) for name, t in gguf_tensors(tensors_of(family), family).items()}
    sides = {24: 96, 20: 64, 12: 32, 28: 64, 32: 64, 16: 32, 8: 16}
    stored: dict[str, np.ndarray | Raw] = {}
    values: dict[str, np.ndarray] = {}
    for seed, (name, old) in enumerate(shapes.items()):
        shape = [*old[:-1], sides.get(old[-1], old[-1])]
        if len(shape) > 1:
            shape[-2] = sides.get(old[-2], old[-2])
        if len(shape) == 1 or "gate_inp" in name:
            stored[name] = values[name] = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
            continue
        raw, value = blocks(seed, "q4_0" if seed % 2 else "q8_0", *shape)
        if family == "mixtral" and name.endswith(("attn_q.weight", "attn_k.weight")):
            raw = Raw(in_pairs(raw.data, shape[-2] // 16), raw.type)
        stored[name], values[name] = raw, value
    changes = {
        "embedding_length": 96, "attention__key_length": 16, "attention__value_length": 16,
        "feed_forward_length": 64, "expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 32,
        "rope__dimension_count": 16,
    }  # fmt: skip
    known = metadata_of(family)
    changes = {key: value for key, value in changes.items() if key.replace("__", ".") in known}
    return write_model(path, family, {}, stored, **changes), values


@pytest.mark.parametrize("family", ALL)
def test_codes_and_scales_are_copied_bit_for_bit(tmp_path, family):
    source, values = blocked_model(tmp_path / "m.gguf", family)
    report = convert(source, tmp_path / "m.cbi")
    assert any("+" in error.format for error in report.errors)
    with CbiFile.open(tmp_path / "m.cbi") as file:
        file.verify_digests()
        pairs = [("embedding", "token_embd"), ("head", "output")]
        pairs += [(f"layers.1.attention.{part}", f"blk.1.attn_{part}") for part in "qkv"]
        pairs += [("layers.0.attention.o", "blk.0.attn_output"), ("layers.0.router", "blk.0.ffn_gate_inp")]
        for ours, theirs in pairs:
            # Bits, because a negative scale times 0 is -0.
            expected = values[f"{theirs}.weight"].view(np.uint32)
            np.testing.assert_array_equal(file.read_tensor(ours).view(np.uint32), expected)
        for layer in range(2):
            for expert in range(6):
                read = file.read_expert(layer, expert)
                for matrix, part in zip(read, ("gate", "up", "down"), strict=True):
                    expected = values[f"blk.{layer}.ffn_{part}_exps.weight"][expert]
                    np.testing.assert_array_equal(matrix.view(np.uint32), expected.view(np.uint32))


def test_threads_and_slices_do_not_change_a_byte(tmp_path, monkeypatch):
    source, _ = blocked_model(tmp_path / "m.gguf", "mixtral")
    convert(source, tmp_path / "a.cbi", threads=1)
    monkeypatch.setattr(packing, "SLICE_BYTES", 16 * 96 * 4)
    for threads in (1, 2, 7):
        convert(source, tmp_path / "b.cbi", threads=threads)
        assert (tmp_path / "b.cbi").read_bytes() == (tmp_path / "a.cbi").read_bytes()


def test_a_file_of_blocks_computes_the_same_in_the_core_and_in_the_reference(tmp_path):
    for family in ALL:
        source, _ = blocked_model(tmp_path / "m.gguf", family)
        convert(source, tmp_path / "m.cbi")
        with opened("native", tmp_path / "m.cbi") as native, opened("reference", tmp_path / "m.cbi") as reference:
            tokens = [1, 5, 39, 0, 7]
            ours, theirs = (executor.session().forward(tokens) for executor in (native, reference))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_folders_keep_what_they_store(tmp_path):
    tensors = dict(tensors_of("olmoe"))
    q = "model.layers.0.self_attn.q_proj.weight"
    k = "model.layers.0.self_attn.k_proj.weight"
    tensors[q] = (tensors[q].view(np.uint32) >> 16).astype(np.uint16)
    tensors[k] = tensors[k].astype(np.float16)
    report = convert(write_folder(tmp_path / "in", config_of("olmoe"), tensors), tmp_path / "m.cbi", weights="keep")
    with CbiFile.open(tmp_path / "m.cbi") as file:
        formats = formats_of(file)
        assert [formats[f"layers.0.attention.{part}"][0] for part in "qkv"] == ["bf16", "f16", "f32"]
        assert file.program.default_state_format == 2
        np.testing.assert_array_equal(file.read_tensor("layers.0.attention.k"), tensors[k].astype(np.float32))
    assert {error.role: error.format for error in report.errors}["attention"] == "bf16+f16+f32"


def test_a_scale_that_is_no_number_names_the_tensor_and_leaves_nothing(tmp_path):
    source, _ = blocked_model(tmp_path / "m.gguf", "qwen3_moe")
    header = read_gguf_header(source)
    damaged = next(t for t in header.tensors.values() if t.type == "Q4_0" and "exps" in t.name)
    data = bytearray(source.read_bytes())
    data[damaged.begin : damaged.begin + 2] = np.float16("nan").tobytes()
    source.write_bytes(data)
    with pytest.raises(NonFiniteError, match=re.escape(f"{damaged.name}[0] of")):
        convert(source, tmp_path / "m.cbi")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_the_source_is_not_overwritten_and_other_files_are_refused(tmp_path):
    source = write_model(tmp_path / "m.gguf", "olmoe", tensors_of("olmoe"))
    with pytest.raises(UsageError, match=r"exists and is not a \.cbi file"):
        convert(source, source)
    source.write_bytes(b"GGUF\x01" + bytes(40))
    with pytest.raises(UnsupportedModelError, match="version 1"):
        convert(source, tmp_path / "m.cbi")


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Blocks of zeros in a sparse file: an embedding of 256 MiB as float32 and 192 MiB of experts."""
    hidden, ffn, experts, vocabulary, heads, dim = 1024, 512, 32, 65536, 4, 64
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": hidden, "attention.head_count": heads,
        "expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": ffn,
        "attention.key_length": dim, "attention.value_length": dim,
    }  # fmt: skip
    keys = [key("general.architecture", STRING, "qwen3moe")]
    keys += [key(f"qwen3moe.{name}", UINT32, value) for name, value in numbers.items()]
    keys += [key("qwen3moe.attention.layer_norm_rms_epsilon", FLOAT32, 1e-6)]
    wide = heads * dim
    shapes = {
        "token_embd.weight": (hidden, vocabulary), "output_norm.weight": (hidden,), "blk.0.attn_norm.weight": (hidden,),
        "blk.0.ffn_norm.weight": (hidden,), "blk.0.attn_q.weight": (hidden, wide),
        "blk.0.attn_k.weight": (hidden, wide),
        "blk.0.attn_v.weight": (hidden, wide), "blk.0.attn_output.weight": (wide, hidden),
        "blk.0.attn_q_norm.weight": (dim,), "blk.0.attn_k_norm.weight": (dim,),
        "blk.0.ffn_gate_inp.weight": (hidden, experts), "blk.0.ffn_gate_exps.weight": (hidden, ffn, experts),
        "blk.0.ffn_up_exps.weight": (hidden, ffn, experts), "blk.0.ffn_down_exps.weight": (ffn, hidden, experts),
    }  # fmt: skip
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(tensor(name, shape, Q4_0, offset))
        size = int(np.prod(shape, dtype=np.int64)) // 32 * 18
        offset += -(-size // 32) * 32
    path = tmp_path / "m.gguf"
    path.write_bytes(image(keys, tensors))
    os.truncate(path, path.stat().st_size + offset)
    code = (
        "import sys; from colibri.convert import convert; convert(sys.argv[1], sys.argv[2], threads=2)\n"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "m.cbi")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(run.stdout) < 150 << 10
    with CbiFile.open(tmp_path / "m.cbi") as file:
        assert formats_of(file)["embedding"] == ("q4_g32", "tiled16x4")


def test_decoded_values_are_those_of_the_stored_codes(tmp_path):
    """dequantise, the definition of a weight's value, gives what the GGUF block means."""
    source, values = blocked_model(tmp_path / "m.gguf", "olmoe")
    with open_checkpoint(source) as checkpoint:
        for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"):
            rows = checkpoint.info(name).shape[0]
            format = format_named(checkpoint.stored_format(name) or "")
            quantised = QuantisedRows(format, *checkpoint.read_codes(name, 0, rows))
            expected = values[checkpoint.label(name)]
            np.testing.assert_array_equal(dequantise(quantised).view(np.uint32), expected.view(np.uint32))
