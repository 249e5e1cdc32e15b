"""Statistics by phase, parallel regions, and pinned threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families.tiny_folder import write_folder

import colibri
from colibri.errors import UsageError

LAYERS, WIDTH, HEADS, DIM, EXPERTS, CHOSEN, FFN, VOCABULARY = 2, 512, 4, 128, 32, 4, 256, 512


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers, wide enough for two threads to share out every matrix product."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH), "lm_head.weight": matrix(VOCABULARY, WIDTH)}
    tensors["model.norm.weight"] = np.ones(WIDTH, np.float32)
    for layer in range(LAYERS):
        here = f"model.layers.{layer}."
        for name, size in (("input_layernorm", WIDTH), ("post_attention_layernorm", WIDTH), ("self_attn.q_norm", DIM)):
            tensors[f"{here}{name}.weight"] = np.ones(size, np.float32)
        tensors[f"{here}self_attn.k_norm.weight"] = np.ones(DIM, np.float32)
        for name in "qkvo":
            tensors[f"{here}self_attn.{name}_proj.weight"] = matrix(HEADS * DIM, WIDTH)
        tensors[f"{here}mlp.gate.weight"] = matrix(EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            for name, rows, columns in (("gate", FFN, WIDTH), ("up", FFN, WIDTH), ("down", WIDTH, FFN)):
                tensors[f"{here}mlp.experts.{expert}.{name}_proj.weight"] = matrix(rows, columns)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
        "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": FFN,
        "intermediate_size": FFN, "vocab_size": VOCABULARY, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu",
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("wide")
    write_folder(folder / "source", config, tensors)
    colibri.convert(folder / "source", folder / "wide.cbi", weights="q8")
    return folder / "wide.cbi"


def test_parallel_regions_of_a_decoded_token(wide_file: Path) -> None:
    """docs/data-path.md: six for each layer, and the head."""
    logits = []
    for threads in (1, 2, 3, 8):
        with colibri.Engine(wide_file, threads=threads) as engine, engine.session() as session:
            logits += [session.forward(range(40)), *(session.forward([token]) for token in (1, 2, 3))]
            decode = engine.statistics().phases["decode"]
        assert decode.passes == 3
        assert decode.parallel_regions == (0 if threads == 1 else 3 * (6 * LAYERS + 1))
        dispatches = decode.dispatch.count + decode.dispatch_switched.count + decode.dispatch_missed
        assert dispatches == (0 if threads == 1 else 3 * LAYERS)
        if decode.dispatch.count:
            assert 0 < decode.dispatch.p50 <= decode.dispatch.p99 <= decode.dispatch.largest
    for other in logits[4:]:
        assert any(np.array_equal(other, one) for one in logits[:4])


@pytest.mark.parametrize("vm", ["native", "reference"])
def test_time_by_layer_and_op(tiny_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, vm: str) -> None:
    monkeypatch.setenv("COLIBRI_VM", vm)
    with colibri.Engine(tiny_file("q8")) as engine, engine.session() as session:
        session.forward(range(30))
        session.forward([1])
        session.forward([2])
        statistics = engine.statistics()
    prompt, decode = statistics.phases["prompt"], statistics.phases["decode"]
    assert (prompt.tokens, prompt.passes, decode.tokens, decode.passes) == (30, 1, 2, 2)
    by_op = dict.fromkeys(statistics.seconds_by_op, 0.0)
    for phase in (prompt, decode):
        assert len(phase.seconds_by_layer) == 2
        for times in phase.seconds_by_layer:
            assert {"rms_norm", "matmul", "rope", "attention", "route", "experts", "add"} == set(times)
        assert {"embed", "rope_table", "matmul", "rms_norm"} <= set(phase.seconds_outside)
        assert "experts" not in phase.seconds_outside
        inside = sum(sum(times.values()) for times in (*phase.seconds_by_layer, phase.seconds_outside))
        assert 0 < inside <= phase.seconds
        for times in (*phase.seconds_by_layer, phase.seconds_outside):
            for op, seconds in times.items():
                by_op[op] += seconds
    assert by_op == pytest.approx(statistics.seconds_by_op)
    assert statistics.tokens == 32


def allowed_processors() -> list[str]:
    """Cpus_allowed_list of the core's worker threads, which are named colibri."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "colibri\n":
            lines = (task / "status").read_text().splitlines()
            found += [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
    return sorted(found)


def test_pinned_threads(tiny_file: Callable[[str], Path]) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("there is one processor")
    with colibri.Engine(tiny_file("q8"), threads=2, pin=True) as engine, engine.session() as session:
        pinned = session.forward([1, 2, 3])
        own: list[str] = []
        end = time.monotonic() + 30  # a worker may not even have begun: small models leave it nothing to do
        while not own and time.monotonic() < end:
            own = [place for place in allowed_processors() if place.isdigit()]
        assert len(own) == 1
        assert int(own[0]) in usable
        assert sorted(os.sched_getaffinity(0)) == usable
    with colibri.Engine(tiny_file("q8"), threads=2) as engine, engine.session() as session:
        assert np.array_equal(session.forward([1, 2, 3]), pinned)


def test_more_pinned_threads_than_processors_are_refused(
    tiny_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = len(os.sched_getaffinity(0))
    path = tiny_file("q8")
    for cpu in ("", "scalar"):
        monkeypatch.setenv("COLIBRI_CPU", cpu)
        with pytest.raises(UsageError, match=f"^threads is {usable + 1} and .* {usable} processors") as caught:
            colibri.Engine(path, threads=usable + 1, pin=True)
        assert f"at most {usable} threads" in str(caught.value)
    monkeypatch.setenv("COLIBRI_VM", "reference")
    with pytest.raises(UsageError, match="pin has no meaning with COLIBRI_VM=reference"):
        colibri.Engine(path, pin=True)
