"""Tiny random models: logits and router choices equal transformers', on both executors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from parity.backends import BACKENDS, in_chunks, opened
from parity.cases import ALL, FLIPS
from parity.tiny_models import TinyCase, build

import colibri
from colibri.errors import CheckpointError

TOLERANCE = 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_logits_and_experts_equal_transformers(case: TinyCase, backend: str, converted) -> None:
    model = converted(case)
    tokens, expected = model.expected.tokens, model.expected.logits
    with opened(backend, model.path) as executor:
        for size in (len(tokens), 7, 1):
            logits = in_chunks(executor.session(), tokens, size)
            assert logits.dtype == np.float32
            np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE, err_msg=f"in chunks of {size}")
        choices = executor.choices(tokens)
    assert choices.keys() == model.expected.experts.keys()
    for layer, experts in model.expected.experts.items():
        np.testing.assert_array_equal(choices[layer], np.sort(experts, axis=1), err_msg=f"layer {layer}")


@pytest.mark.parametrize(("case", "keys"), FLIPS, ids=lambda value: str(value) if isinstance(value, TinyCase) else "")
def test_a_key_that_changes_the_arithmetic_moves_the_logits(case: TinyCase, keys: dict, converted, tmp_path) -> None:
    model = converted(case)
    flipped = tmp_path / "flipped"
    shutil.copytree(model.source, flipped)
    config = json.loads((flipped / "config.json").read_text())
    (flipped / "config.json").write_text(json.dumps({**config, **keys}))
    colibri.convert(flipped, tmp_path / "flipped.cbi", weights="f32")
    tokens = model.expected.tokens
    with opened("reference", model.path) as right, opened("reference", tmp_path / "flipped.cbi") as wrong:
        assert np.abs(right.session().forward(tokens) - model.expected.logits).max() < TOLERANCE
        assert np.abs(wrong.session().forward(tokens) - model.expected.logits).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_untied_without_a_head_is_refused_by_name(family: str, tmp_path: Path) -> None:
    build(TinyCase("no-head", family, head="removed", oracle_reads_folder=False), tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        colibri.convert(tmp_path / "source", tmp_path / "model.cbi", weights="f32")
    assert not (tmp_path / "model.cbi").exists()


def test_a_tied_model_notes_the_head_it_does_not_use(tmp_path: Path) -> None:
    case = TinyCase("noted", "qwen3_moe", {"tie_word_embeddings": True}, head="added", oracle_reads_folder=False)
    build(case, tmp_path / "source")
    report = colibri.convert(tmp_path / "source", tmp_path / "model.cbi", weights="f32")
    assert any("lm_head.weight" in note for note in report.notes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_router_rows_go_to_the_lowest_expert(backend: str, converted, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = converted(TinyCase("tie", "qwen3_moe", {"num_experts_per_tok": 1}))
    folder = tmp_path / "source"
    shutil.copytree(model.source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name][8] = tensors[name][3]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    colibri.convert(folder, tmp_path / "model.cbi", weights="f32")
    with opened(backend, tmp_path / "model.cbi") as executor:
        choices = np.concatenate(list(executor.choices(model.expected.tokens).values()))
    assert 3 in choices
    assert 8 not in choices
