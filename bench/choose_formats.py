"""Perplexity of a Hugging Face folder under each weight format and activation block: the figures of ADR 1.

The arithmetic is that of `colibri.quantize`; the model runs in transformers, float32, with its weights replaced by
their dequantised codes and the input of every quantised matmul replaced by its dequantised int8 blocks. Needs the
test extra (torch, transformers):

    python bench/choose_formats.py demo demo/heldout.tokens.u16 --csv formats.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from colibri.quantize import (
    FORMATS,
    WeightFormat,
    default_layout,
    dequantise,
    dequantise_activations,
    packed_size,
    quantise,
    quantise_activations,
)

# The last part of the module's name; their matrices stay float32 whatever the format.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "wg"})

# Measured beside the formats that Colibri has, and rejected: they have no id.
REJECTED = (
    WeightFormat("q8_g64", 0, 8, 64, "as q8_g32 with groups of 64"),
    WeightFormat("q4_g64", 0, 4, 64, "as q4_g32 with groups of 64"),
)
SYMMETRIC = {format.name: format for format in (*FORMATS, *REJECTED)}
ASYMMETRIC_GROUPS = {"q4z_g32": 32, "q4z_g64": 64}
ASYMMETRIC_BLOCK_BYTES = {"q4z_g32": 1216, "q4z_g64": 1152}
DEFAULT_WEIGHTS = ("f32", "q8_g32", "q8_g64", "q4_g32", "q4_g64", *ASYMMETRIC_GROUPS)


@dataclass(frozen=True)
class Measurement:
    """One line of the result.

    `divergence` is the mean Kullback-Leibler divergence from the float32 model in nats, far less noisy than the
    change of perplexity; `weight_error` is the relative RMS error over all matrices.
    """

    weights: str
    attention: str
    embedding: str
    activation_block: int
    bytes_per_block: int
    perplexity: float
    change_percent: float
    divergence: float
    weight_error: float


class QuantisedMatmuls(TorchFunctionMode):
    """Quantises the input of `linear` where the weight belongs to `storages`, and notes which of them were used."""

    def __init__(self, storages: frozenset[int], block: int) -> None:
        super().__init__()
        self._storages = storages
        self._block = block
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            storage = args[1].untyped_storage().data_ptr()
            if storage in self._storages:
                self.used.add(storage)
                args = (self._fake_quantise(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _fake_quantise(self, values: torch.Tensor) -> torch.Tensor:
        if self._block == 0 or values.numel() == 0:
            return values
        rows = values.reshape(-1, values.shape[-1]).numpy()
        codes, scales = quantise_activations(rows, self._block)
        return torch.from_numpy(dequantise_activations(codes, scales, rows.shape[1])).reshape(values.shape)


def matmul_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The matrices that a format applies to, by name: [out, in], or [experts, out, in] for fused experts."""
    chosen = {}
    for name, parameter in model.named_parameters():
        owner = name.split(".")[-2] if name.endswith(".weight") else ""
        if parameter.dim() >= 2 and owner not in ROUTER_NAMES:
            chosen[name] = parameter
    return chosen


def embedding_storages(model: Any) -> set[int]:
    """Storages of the embedding and the head, which keep 8 bits (one storage where they are tied)."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    return {module.weight.untyped_storage().data_ptr() for module in modules}


def dequantised(rows: np.ndarray, format: str, name: str) -> np.ndarray:
    """Float32 [rows, k] as the format called `format` stores it."""
    if format in ASYMMETRIC_GROUPS:
        return asymmetric(rows, ASYMMETRIC_GROUPS[format])
    return dequantise(quantise(rows, SYMMETRIC[format], name=name))


def asymmetric(rows: np.ndarray, group: int) -> np.ndarray:
    """The rejected asymmetric int4: a float16 scale and an integer zero-point 0..15 for each group, both searched."""
    count, k = rows.shape
    groups = np.zeros((count, -(-k // group) * group), dtype=np.float32)
    groups[:, :k] = rows
    groups = groups.reshape(-1, group)
    low, high = np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)
    extent = np.maximum(high - low, np.float32(2.0**-20))
    centre = np.float32(15) * -low / extent
    best_error, best = np.full(extent.shape, np.inf, dtype=np.float32), np.zeros_like(groups)

    def attempt(scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
        scale = np.maximum(scale, np.float32(2.0**-24)).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(groups / scale[:, None]), -zero[:, None], 15 - zero[:, None])
        result = codes * scale[:, None]
        error = ((result - groups) ** 2).sum(axis=1)
        better = error < best_error
        best_error[better] = error[better]
        best[better] = result[better]
        return codes

    for zero in (np.floor(centre), np.ceil(centre)):
        for span in (14.2, 15.0, 15.8, 16.6, 17.6, 18.8):
            codes = attempt(extent / np.float32(span), zero)
            attempt((codes * groups).sum(axis=1) / np.maximum((codes * codes).sum(axis=1), 1), zero)
    return best.reshape(count, -1)[:, :k]


def replace_weights(
    weights: dict[str, torch.nn.Parameter], source: dict[str, torch.nn.Parameter], choose: Callable[[str], str]
) -> float:
    """Overwrite each weight with the dequantised codes of its source; return the relative RMS error over all."""
    squared_error = squared_sum = 0.0
    for name, parameter in weights.items():
        rows = source[name].reshape(-1, parameter.shape[-1]).numpy()
        result = dequantised(rows, choose(name), name)
        squared_error += float(np.sum((result - rows) ** 2, dtype=np.float64))
        squared_sum += float(np.sum(rows**2, dtype=np.float64))
        parameter.data.copy_(torch.from_numpy(result).reshape(parameter.shape))
    return math.sqrt(squared_error / squared_sum)


def log_probabilities(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Float32 [windows * (length - 1), vocabulary]; each window int64 [length] is read on its own."""
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits.flatten(0, 1), dim=-1)


def compare(
    reference: torch.nn.Module, model: torch.nn.Module, mode: QuantisedMatmuls, tokens: torch.Tensor, batch: int
) -> tuple[float, float, float]:
    """Perplexity of `reference` and of `model` under `mode`, and the mean divergence, over [windows, length]."""
    reference_loss = loss = divergence = 0.0
    for part in tokens.split(batch):
        targets = part[:, 1:].reshape(-1, 1)
        expected = log_probabilities(reference, part)
        with mode:
            found = log_probabilities(model, part)
        reference_loss -= expected.gather(1, targets).double().sum().item()
        loss -= found.gather(1, targets).double().sum().item()
        divergence += (expected.exp() * (expected - found)).double().sum().item()
    predictions = tokens.shape[0] * (tokens.shape[1] - 1)
    return math.exp(reference_loss / predictions), math.exp(loss / predictions), divergence / predictions


def block_bytes(format: str) -> int:
    """Bytes of one tiled block, 16 rows x 128 k (for float formats the same weights, which have no blocks)."""
    if format in ASYMMETRIC_BLOCK_BYTES:
        return ASYMMETRIC_BLOCK_BYTES[format]
    return packed_size(SYMMETRIC[format], default_layout(SYMMETRIC[format]), 16, 128)


def measure(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Yield one Measurement for each combination."""
    raw = np.fromfile(arguments.tokens, dtype="<u2")
    needed = arguments.windows * arguments.length
    if raw.size < needed:
        raise SystemExit(f"{arguments.tokens}: holds {raw.size} tokens, {needed} are needed; lower --windows")
    tokens = torch.from_numpy(raw[:needed].astype(np.int64).reshape(arguments.windows, arguments.length))
    reference, model = load(arguments.model), load(arguments.model)
    source, weights = matmul_weights(reference), matmul_weights(model)
    wide = embedding_storages(model)
    storages = {name: parameter.untyped_storage().data_ptr() for name, parameter in weights.items()}
    for format, attention in combinations(arguments.weights, arguments.attention):
        embedding = arguments.embedding if format.startswith("q4") else format

        def choose(name: str, format: str = format, attention: str = attention, embedding: str = embedding) -> str:
            if storages[name] in wide:
                return embedding
            return attention if "attn" in name else format

        error = replace_weights(weights, source, choose)
        for block in arguments.blocks:
            mode = QuantisedMatmuls(frozenset(storages.values()), block)
            expected, found, divergence = compare(reference, model, mode, tokens, arguments.batch)
            if missed := [name for name, storage in storages.items() if storage not in mode.used | wide]:
                raise SystemExit(f"{arguments.model}: {missed[0]} is not used through linear(); this layout is unknown")
            change = 100 * (found / expected - 1)
            size = block_bytes(format)
            yield Measurement(format, attention, embedding, block, size, found, change, divergence, error)


def load(folder: Path) -> Any:
    """The model in float32, its experts run one by one through `linear`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.eval()


def combinations(formats: Sequence[str], attentions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(weights, attention) pairs: only 4-bit weights are also tried with another format for attention."""
    for format in formats:
        choices = attentions if format.startswith("q4") else ("same",)
        for attention in choices:
            yield format, format if attention == "same" else attention


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("tokens", type=Path, help="token ids, little-endian uint16")
    parser.add_argument("--csv", type=Path, required=True, help="where to write the table")
    parser.add_argument("--windows", type=int, default=160)
    parser.add_argument("--length", type=int, default=256, help="tokens in one window")
    parser.add_argument("--batch", type=int, default=16, help="windows run together")
    parser.add_argument("--weights", nargs="+", default=DEFAULT_WEIGHTS, choices=[*SYMMETRIC, *ASYMMETRIC_GROUPS])
    parser.add_argument(
        "--embedding", default="q8_g32", choices=SYMMETRIC, help="format of embedding and head beside 4-bit weights"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        default=("same", "q8_g32"),
        choices=["same", *SYMMETRIC],
        help="formats of attention beside 4-bit weights",
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=(64, 128, 256), help="activation blocks; 0: not quantised"
    )
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    columns = [field.name for field in fields(Measurement)]
    with torch.inference_mode(), arguments.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for line in measure(arguments):
            row = {key: f"{value:.5f}" if isinstance(value, float) else value for key, value in asdict(line).items()}
            writer.writerow(row)
            file.flush()
            print("  ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
