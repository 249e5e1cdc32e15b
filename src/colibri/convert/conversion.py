"""From a Hugging Face folder or a GGUF file to one `.cbi` file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from colibri.cbi import CbiWriter
from colibri.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint
from colibri.convert.packing import Matrix, PackedSlice, pack_in_order
from colibri.convert.recipes import KEEP, Recipe, recipe_named
from colibri.convert.report import ConvertReport, ErrorSums, as_metadata
from colibri.errors import CheckpointError, UsageError
from colibri.families import ExpertSetPlan, ModelPlan, Role, Source, plan_model
from colibri.program.program import STATE_F16, STATE_F32
from colibri.tokenizer import TokenizerParts, read_tokenizer_folder, read_tokenizer_metadata

Progress = Callable[[int, int], None]

MAXIMUM_THREADS = 1024
_GENERATION_KEYS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty",
)  # fmt: skip


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    weights: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert the Hugging Face folder or GGUF file `source` into the file `output`.

    weights: "q8" (8 bits), "q4" (4 bits in experts and feed-forward blocks, 8 in the rest), "bf16", "f16", "f32", or
    "keep" (each tensor in the format that holds it exactly; Q4_0 and Q8_0 blocks are copied). None means "keep" for a
    GGUF file and "q8" for a folder. Router, norms and biases are always exact float32. threads: None takes the
    processors this process may use; the file is the same for any number. progress is called with (bytes written,
    bytes in all) of the weights.

    `output` appears, or is replaced, in one step at the end; an error or interruption leaves it as it was. Peak memory
    stays below 512 MiB plus twice one expert's float32 size. Raises UsageError for arguments, CheckpointError,
    UnsupportedModelError and TokenizerError for the source, NonFiniteError for NaN or infinity in a tensor, and
    ModelFileError when writing fails.
    """
    recipe = None if weights is None else recipe_named(weights)
    threads = _thread_count(threads)
    output = Path(output)
    with open_checkpoint(Path(source)) as checkpoint:
        recipe = recipe or recipe_named(KEEP if isinstance(checkpoint, GgufCheckpoint) else "q8")
        plan = plan_model(checkpoint)
        parts = _tokenizer_parts(checkpoint)
        settings = _settings(checkpoint, parts)
        state_format = STATE_F32 if _is_float32(plan, recipe) else STATE_F16
        program = replace(plan.program, default_state_format=state_format)
        errors = ErrorSums()
        with CbiWriter(output) as writer:
            _write_weights(writer, plan, recipe, threads, errors, progress)
            report = errors.report()
            metadata = {
                "family": plan.family,
                "source": checkpoint.path.name,
                "weights": recipe.weights,
                "converter": f"colibri {_version()}",
                "parameters": _parameters(plan),
                "quantisation": as_metadata(report),
            }
            digest = writer.finish(
                program,
                tokenizer_json=None if parts is None else parts.tokenizer_json,
                chat_template=None if parts is None else parts.chat_template,
                settings=settings,
                metadata=metadata,
            )
            file_bytes = writer.size
    return ConvertReport(
        output, plan.family, recipe.weights, file_bytes, metadata["parameters"], report, plan.notes, digest
    )


def _write_weights(
    writer: CbiWriter, plan: ModelPlan, recipe: Recipe, threads: int, errors: ErrorSums, progress: Progress | None
) -> None:
    tensors = [_matrix(weight.name, weight.role, weight.source, recipe) for weight in plan.weights]
    experts = [[_expert_matrices(expert_set, recipe, e) for e in range(len(expert_set.experts))]
               for expert_set in plan.expert_sets]  # fmt: skip
    matrices = tensors + [matrix for one_set in experts for three in one_set for matrix in three]
    total, done = sum(matrix.packed_size for matrix in matrices), 0

    def chunks(matrix: Matrix) -> Iterator[bytes]:
        nonlocal done
        pieces = []
        for _ in matrix.slices():
            piece = next(packed)
            yield piece.data
            done += len(piece.data)
            if progress is not None:
                progress(done, total)
            pieces.append(PackedSlice(b"", piece.squares, piece.squared_errors))
        errors.add(matrix, pieces)

    with closing(pack_in_order(matrices, threads)) as packed:
        for matrix in tensors:
            source = matrix.source
            writer.add_tensor(matrix.name, matrix.format, matrix.layout, source.rows, source.cols, chunks(matrix))
        for expert_set, one_set in zip(plan.expert_sets, experts, strict=True):
            writer.begin_expert_set(layer=expert_set.layer, width=expert_set.width, ffn=expert_set.ffn)
            for three in one_set:
                writer.add_expert([matrix.format for matrix in three], [chunks(matrix) for matrix in three])


def _expert_matrices(expert_set: ExpertSetPlan, recipe: Recipe, expert: int) -> list[Matrix]:
    sources = expert_set.experts[expert]
    return [_matrix(source.name, Role.EXPERT, source, recipe) for source in (sources.gate, sources.up, sources.down)]


def _matrix(name: str, role: Role, source: Source, recipe: Recipe) -> Matrix:
    format = recipe.format(role, source)
    return Matrix(name, role, source, format, recipe.layout(role, format))


def _is_float32(plan: ModelPlan, recipe: Recipe) -> bool:
    sources = [(weight.role, weight.source) for weight in plan.weights]
    for expert_set in plan.expert_sets:
        sources += [(Role.EXPERT, source) for e in expert_set.experts for source in (e.gate, e.up, e.down)]
    return all(recipe.format(role, source) == "f32" for role, source in sources)


def _tokenizer_parts(checkpoint: Checkpoint) -> TokenizerParts | None:
    if isinstance(checkpoint, GgufCheckpoint):
        return read_tokenizer_metadata(checkpoint.tokenizer_metadata(), str(checkpoint.path))
    return read_tokenizer_folder(checkpoint.path)


def _settings(checkpoint: Checkpoint, parts: TokenizerParts | None) -> dict[str, Any]:
    generation = checkpoint.generation_config or {}
    kept = {}
    for key in _GENERATION_KEYS:
        value = generation.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float):
            raise CheckpointError(f"generation_config.json of {checkpoint.path}: {key} = {value!r} is not a number.")
        kept[key] = value
    return {"generation": kept} | ({} if parts is None else {"tokenizer": parts.settings})


def _parameters(plan: ModelPlan) -> int:
    # The inverse frequencies are no parameters of the model: nobody trained them.
    weights = sum(w.source.rows * w.source.cols for w in plan.weights if w.name != "rope.inverse_frequencies")
    return weights + sum(3 * len(s.experts) * s.width * s.ffn for s in plan.expert_sets)


def _thread_count(threads: int | None) -> int:
    if threads is None:
        return len(os.sched_getaffinity(0))
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAXIMUM_THREADS:
        raise UsageError(f"threads must be an integer from 1 to {MAXIMUM_THREADS}, not {threads!r}.")
    return threads


def _version() -> str:
    try:
        return version("colibri-moe")
    except PackageNotFoundError:
        return "of a source tree"
