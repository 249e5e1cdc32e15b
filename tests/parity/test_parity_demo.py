"""The demo model: perplexity and greedy text of transformers. COLIBRI_SLOW=1 uses all 160 windows."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.backends import BACKENDS, opened
from parity.test_parity_quantised import log_softmax
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import colibri

DEMO = Path(__file__).resolve().parents[2] / "demo"
WINDOW = 256
SLOW = os.environ.get("COLIBRI_SLOW") == "1"
PUBLISHED_PERPLEXITY = 22.03  # transformers, float32, 160 windows: demo/README.md
PROMPTS = (
    "In the beginning",
    "import os\n",
    "Return a copy of the string",
    '<|user|>Define "harbor".<|end|><|assistant|>',
)


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    tokens = np.fromfile(DEMO / "heldout.tokens.u16", "<u2")
    count = 160 if SLOW else 20
    return tokens[: count * WINDOW].reshape(count, WINDOW).astype(int).tolist()


@pytest.fixture(scope="module")
def oracle():
    return AutoModelForCausalLM.from_pretrained(DEMO, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def oracle_losses(oracle, windows) -> list[np.ndarray]:
    with torch.no_grad():
        return losses(windows, lambda window: oracle(torch.tensor([window]), use_cache=False).logits[0].numpy())


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("demo")

    def get(weights: str) -> Path:
        path = folder / f"{weights}.cbi"
        if not path.exists():
            colibri.convert(DEMO, path, weights=weights)
        return path

    return get


def losses(windows: list[list[int]], logits_of) -> list[np.ndarray]:
    """The negative log-probabilities of tokens 1 to 255 of each window, each window on its own."""
    found = []
    for window in windows:
        log_probabilities = log_softmax(logits_of(window)[:-1])
        found.append(-log_probabilities[np.arange(len(window) - 1), window[1:]])
    return found


def perplexity(found: list[np.ndarray]) -> float:
    return float(np.exp(np.mean(found)))


def test_the_oracle_is_the_published_model(oracle_losses: list[np.ndarray]) -> None:
    if SLOW:
        assert perplexity(oracle_losses) == pytest.approx(PUBLISHED_PERPLEXITY, rel=1e-3)
    assert 15 < perplexity(oracle_losses) < 35


@pytest.mark.parametrize("backend", BACKENDS)
def test_perplexity_in_f32_equals_transformers(backend: str, demo_file, windows, oracle_losses) -> None:
    count = len(windows) if SLOW or backend == "native" else 4
    with opened(backend, demo_file("f32")) as executor:
        found = losses(windows[:count], lambda window: executor.session().forward(window))
    assert perplexity(found) == pytest.approx(perplexity(oracle_losses[:count]), rel=1e-4)


@pytest.mark.parametrize(("weights", "limit"), [("q8", 0.005), ("q4", 0.03)])
def test_perplexity_of_quantised_files(weights: str, limit: float, demo_file, windows, oracle_losses) -> None:
    with opened("native", demo_file(weights), "f16") as executor:
        found = losses(windows, lambda window: executor.session().forward(window))
    assert perplexity(found) == pytest.approx(perplexity(oracle_losses), rel=limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers(prompt: str, backend: str, demo_file, oracle) -> None:
    path = demo_file("f32")
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(prompt).ids
    expected = greedy(ids, lambda text: oracle(torch.tensor([text]), use_cache=False).logits[0, -1].numpy())
    with opened(backend, path) as executor:
        session = executor.session()
        produced = greedy(ids, lambda text: session.forward(text if text == ids else text[-1:])[-1])
    assert produced == expected
    assert len(set(produced)) > 5


def greedy(prompt: list[int], last_logits) -> list[int]:
    """40 tokens, each the most probable after prompt and tokens so far."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            text.append(int(last_logits(text).argmax()))
    return text[len(prompt) :]
