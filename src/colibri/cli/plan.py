"""`colibri plan`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from colibri.cbi import CbiFile
from colibri.cli.engine_options import EngineOptions
from colibri.cli.output import write, write_json
from colibri.runtime.budget import Budget
from colibri.runtime.engine import Engine
from colibri.runtime.model_text import ModelText
from colibri.runtime.prediction import Prediction, Speeds, predict
from colibri.runtime.probe_model import token_bytes
from colibri.runtime.sizes import format_size
from colibri.runtime.usage_file import UsageFile

_PROMPT_TOKENS = 1024
_BAR = 40
_DEFAULT_IO_THREADS = 2
_BOUNDS = {"memory": "the memory's speed", "disk": "the disk", "arithmetic": "arithmetic"}


def plan_command(
    model: Path, context: int | None, batch: int, options: EngineOptions, refresh: bool, as_json: bool
) -> None:
    budget = Engine.plan(model, context=context, sessions=batch, **options)
    # Only now, so that this process is as large as one that runs the model.
    from colibri.runtime import machine

    with CbiFile.open(model) as file:
        weights = token_bytes(file)
    kept, threads = machine.MeasurementCache(refresh), options.get("threads")
    readers = options.get("io_threads", _DEFAULT_IO_THREADS)
    direct = options.get("io") != "buffered"
    compute = kept.get(
        machine.compute_key(model, threads), machine.COMPUTE_RATES, lambda: machine.measure_compute(model, threads)
    )
    disk = kept.get(
        machine.disk_key(model, readers, direct),
        machine.DISK_RATES,
        lambda: machine.measure_disk(model, readers, direct),
    )
    prompt = min(_PROMPT_TOKENS, budget.wishes.context)
    prompt_speed = machine.prompt_speed(compute, min(prompt, budget.max_batch_tokens))
    speeds = Speeds(compute["decode"], prompt_speed, disk["bytes_per_second"])
    shares = {"uniform": _resident_share(budget)}
    if options.get("usage_file") is not None:
        text = ModelText.read(model)
        counts = UsageFile(Path(options["usage_file"]), text.digest, text.expert_counts).counts
        if any(count.any() for count in counts):
            shares["recorded"] = recorded_share(counts, shares["uniform"])
    predictions = {name: predict(budget, weights, speeds, share, prompt) for name, share in shares.items()}
    if as_json:
        write_json(_object(budget, speeds, predictions, bool(disk.get("is_direct"))))
    else:
        _print(budget, speeds, predictions, bool(disk.get("is_direct")), prompt)


def recorded_share(counts: list[np.ndarray], resident_share: float) -> float:
    """Of the experts that tokens ask for, those in memory when it holds that share of all, the most used ones."""
    layers = [count / count.sum() for count in counts if count.any()]
    uses = np.sort(np.concatenate(layers))[::-1]
    return float(uses[: round(len(uses) * resident_share)].sum() / len(layers))


def _resident_share(budget: Budget) -> float:
    """Of the experts; with uniform routing also of those that a token asks for."""
    return min(1.0, budget.expert_bytes / budget.model.all_expert_bytes) if budget.model.all_expert_bytes else 1.0


def _object(budget: Budget, speeds: Speeds, predictions: dict[str, Prediction], is_direct: bool) -> dict[str, Any]:
    model = budget.model
    return {
        "model": budget.wishes.name,
        "ram": budget.ram,
        "needed": budget.needed,
        "parts": {**budget.parts, "experts": budget.expert_bytes},
        "expert_bytes": budget.expert_bytes,
        "all_expert_bytes": model.all_expert_bytes,
        "expert_share": round(_resident_share(budget), 4),
        "wasted_expert_bytes": model.wasted_expert_bytes,
        "token_expert_bytes": model.token_expert_bytes,
        "max_batch_tokens": budget.max_batch_tokens,
        "context": budget.wishes.context,
        "sessions": budget.wishes.sessions,
        "machine": {
            **{f"{name}_bytes_per_second": round(value) for name, value in asdict(speeds).items()},
            "disk_is_direct": is_direct,
        },
        **{name: asdict(prediction) for name, prediction in predictions.items()},
    }


def _print(budget: Budget, speeds: Speeds, predictions: dict[str, Prediction], is_direct: bool, prompt: int) -> None:
    model = budget.model
    write(f"{budget.wishes.name} in {format_size(budget.ram or budget.needed)}")
    write("")
    rows = {**budget.parts, "experts in memory": budget.expert_bytes}
    for name, size in rows.items():
        write(f"  {format_size(size):>10}  {'█' * round(_BAR * size / budget.needed) or '▏':{_BAR}}  {name}")
    write(f"  {format_size(budget.needed):>10}  {'':{_BAR}}  together" + _left(budget))
    write("")
    share = _resident_share(budget)
    if model.all_expert_bytes:
        filled = int(_BAR * share)
        write(f"  experts     {'█' * filled}{'░' * (_BAR - filled)}  {100 * share:.0f}% of "
              f"{format_size(model.all_expert_bytes)} fit ({model.expert_count} experts in {model.expert_set_count} "
              f"layers; a token uses {format_size(model.token_expert_bytes)})")  # fmt: skip
    write(f"  prompts     {budget.max_batch_tokens} tokens at a time")
    write("")
    write(f"  this machine reads weights at {speeds.decode / 1e9:.1f} GB/s while decoding, "
          f"{'past' if is_direct else 'through'} the page cache experts at {speeds.disk / 1e9:.2f} GB/s")  # fmt: skip
    for name, prediction in predictions.items():
        title = {"uniform": "if routing is uniform", "recorded": "with the usage recorded"}[name]
        read = f"; {format_size(int(prediction.decode_bytes_read))} read for each token"
        bound = _BOUNDS[prediction.decode_bound] + (read if prediction.decode_bytes_read >= 1 else "")
        write("")
        write(f"  {title}:")
        write(f"  decode      {prediction.decode:.1f} tokens/s after {prompt} tokens, bound by {bound}")
        write(f"  prompt      {prediction.prompt:.0f} tokens/s, bound by {_BOUNDS[prediction.prompt_bound]}")


def _left(budget: Budget) -> str:
    return f"; {format_size(budget.left)} left for more sessions and results" if budget.left else ""
