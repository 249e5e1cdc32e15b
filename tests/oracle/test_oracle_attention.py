"""Attention alone, C against NumPy: masks, windows, blocks of 64 positions, splits of 1024 keys, state formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.one_op import OneOp, random_rows, run_both

import colibri
from colibri.errors import NonFiniteError
from colibri.reference import ReferenceEngine


def attention(
    path: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 24,
    value_dim: int = 20,
    window: int = 0,
    scale: float = 0.3,
    sharpness: float = 1.0,
) -> Path:
    """A program whose logits are the attention output; the vocabulary is heads * value_dim tokens."""
    width = heads * value_dim
    program = OneOp(width)
    program.input("q", random_rows(1, width, heads * key_dim, sharpness))
    program.input("k", random_rows(2, width, kv_heads * key_dim, sharpness))
    program.input("v", random_rows(3, width, kv_heads * value_dim))
    program.builder.tokens("y", width)
    program.builder.attention_state("cache", kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, layer=0)
    program.op("attention", y="y", q="q", k="k", v="v", cache="cache", heads=heads, window=window, scale=scale)
    return program.write(path / "model.cbi", "y")


def text(count: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(count).integers(0, vocabulary, count).tolist()


@pytest.mark.parametrize("window", [0, 1, 5, 64, 65, 150])
@pytest.mark.parametrize("chunk", [200, 63, 7])
def test_windows_and_chunks(window: int, chunk: int, tmp_path: Path) -> None:
    run_both(attention(tmp_path, window=window), text(200, 80), chunk=chunk).agree(5e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"), [(1, 1, 1, 1), (3, 3, 17, 5), (6, 2, 33, 48), (8, 1, 16, 3)]
)
def test_shapes_of_heads(heads: int, kv_heads: int, key_dim: int, value_dim: int, tmp_path: Path) -> None:
    path = attention(tmp_path, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    run_both(path, text(130, heads * value_dim), chunk=50).agree(5e-6)


@pytest.mark.parametrize("window", [0, 1100])
@pytest.mark.parametrize("chunk", [2200, 501])
def test_more_keys_than_one_split(window: int, chunk: int, tmp_path: Path) -> None:
    run_both(attention(tmp_path, window=window), text(2200, 80), chunk=chunk).agree(1e-5)


def test_sharp_scores(tmp_path: Path) -> None:
    """Scores of some thousands: one key takes all, and what it beats must vanish without overflow.

    The last bit of such a score is worth a thousandth of its weight.
    """
    run_both(attention(tmp_path, sharpness=30.0), text(100, 80), chunk=33).agree(2e-3)


@pytest.mark.parametrize("state_format", ["f16", "q8"])
@pytest.mark.parametrize("key_dim", [24, 33])
def test_state_formats(state_format: str, key_dim: int, tmp_path: Path) -> None:
    path = attention(tmp_path, key_dim=key_dim, value_dim=21)
    tokens = text(140, 84)
    results = run_both(path, tokens, state_format=state_format, chunk=45)
    results.agree(5e-6)
    exact = run_both(path, tokens, chunk=45)
    assert np.abs(results.native - exact.native).max() > 1e-5


def test_keys_too_large_for_f16_are_an_error_naming_the_layer(tmp_path: Path) -> None:
    path = attention(tmp_path, sharpness=1e5)
    with pytest.raises(NonFiniteError, match="layer 0"):
        ReferenceEngine(path).session(state_format="f16").forward(text(8, 80))
    with (
        colibri.Engine(path, kv="f16") as engine,
        engine.session(context=8) as session,
        pytest.raises(NonFiniteError, match="layer 0"),
    ):
        session.forward(text(8, 80))
