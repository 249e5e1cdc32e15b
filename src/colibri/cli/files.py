"""`colibri convert`, `inspect` and `validate`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colibri.cbi import CbiFile
from colibri.cbi.layout import FORMAT_BY_ID, LAYOUT_BY_ID, ExpertSetEntry, SectionType
from colibri.cli.output import write, write_json
from colibri.program import program_text
from colibri.runtime.native_backend import validate_file

MIB = 2**20


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where it does not mix with results; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def convert_command(source: Path, output: Path, weights: str | None, threads: int | None) -> None:
    from colibri.convert import convert

    with progress_bar("converting") as progress:
        report = convert(source, output, weights=weights, threads=threads, progress=progress)
    write(f"{report.path}: {report.family}, {report.parameters:,} parameters, {report.file_bytes / MIB:.1f} MiB")
    for error in report.errors:
        worst = f", worst {error.largest:.4f} ({error.largest_tensor})" if error.largest else ""
        write(f"  {error.role:10} {error.format:7} RMS error {error.rms_error:.4f} of RMS weight{worst}")
    for note in report.notes:
        write(f"note: {note}")


def validate_command(model: Path) -> None:
    # The two readers share no code: Python checks digests and text, the core what it relies on.
    with progress_bar("checking") as progress, CbiFile.open(model) as file:
        file.verify_digests(progress)
        if file.tokenizer_json is not None:
            from colibri.tokenizer import Tokenizer

            tokenizer = Tokenizer.from_parts(
                file.tokenizer_json, file.settings.get("tokenizer", {}), chat_template=file.chat_template
            )
            tokenizer.valid_token_mask(file.program.vocabulary_size)
        digest = file.digest.hex()
    validate_file(model)
    write(f"{model}: valid, SHA-256 tree {digest}")


def inspect_command(model: Path, as_json: bool, tensors: bool, program: bool) -> None:
    with CbiFile.open(model) as file:
        if as_json:
            write_json(description(file, tensors, program))
            return
        for name, value in description(file, False, False).items():
            write(f"{name:18} {_readable(value)}")
        if tensors:
            write("")
            for row in tensor_rows(file):
                write(f"{row['name']:48} {row['format']:7} {row['layout']:9} {row['rows']:>8} x {row['columns']:<8} "
                      f"{row['bytes'] / MIB:10.3f} MiB")  # fmt: skip
            for row in expert_rows(file):
                formats = "/".join(row["formats"])
                write(f"{'experts of layer ' + str(row['layer']):48} {formats:17} {row['experts']:>8} x "
                      f"[{row['ffn']}, {row['width']}] x 3  {row['bytes'] / MIB:10.3f} MiB")  # fmt: skip
        if program:
            write("")
            write(program_text(file.program, [t.name for t in file.tensors]), end="")


def description(file: CbiFile, tensors: bool, program: bool) -> dict[str, Any]:
    """What `inspect` shows, as JSON types."""
    by_format: Counter[str] = Counter()
    for tensor in file.tensors:
        by_format[FORMAT_BY_ID[tensor.format].name] += tensor.size
    for row in expert_rows(file):
        by_format["/".join(row["formats"])] += row["bytes"]
    metadata = file.metadata
    result: dict[str, Any] = {
        "file": str(file.path),
        "bytes": file.header.file_size,
        "digest": file.digest.hex(),
        "family": metadata.get("family"),
        "source": metadata.get("source"),
        "weights": metadata.get("weights"),
        "converter": metadata.get("converter"),
        "parameters": metadata.get("parameters"),
        "layers": max((op.layer + 1 for op in file.program.ops if op.layer is not None), default=0),
        "vocabulary": file.program.vocabulary_size,
        "context": file.program.context_limit,
        "experts": [
            {"layer": s.layer, "experts": len(s.experts), "width": s.width, "ffn": s.ffn} for s in file.expert_sets
        ],
        "bytes_by_format": dict(by_format),
        "state_bytes_per_position_f16": sum(2 * s.kv_heads * (s.key_dim + s.value_dim) for s in file.program.states),
        "tokenizer": file.tokenizer_json is not None,
        "chat_template": file.chat_template is not None,
        "settings": file.settings,
        "quantisation": metadata.get("quantisation"),
        "sections": {SectionType(s.type).name.lower(): s.size for s in file.sections if s.type in set(SectionType)},
    }
    if tensors:
        result["tensors"] = tensor_rows(file)
        result["expert_sets"] = expert_rows(file)
    if program:
        result["program"] = program_text(file.program, [t.name for t in file.tensors])
    return result


def tensor_rows(file: CbiFile) -> list[dict[str, Any]]:
    """One row for each tensor of the directory."""
    return [
        {
            "name": t.name,
            "format": FORMAT_BY_ID[t.format].name,
            "layout": LAYOUT_BY_ID[t.layout].name,
            "rows": t.rows,
            "columns": t.cols,
            "bytes": t.size,
        }
        for t in file.tensors
    ]


def expert_rows(file: CbiFile) -> list[dict[str, Any]]:
    """One row for each expert set."""
    return [
        {
            "layer": s.layer,
            "experts": len(s.experts),
            "width": s.width,
            "ffn": s.ffn,
            "formats": _formats(s),
            "bytes": sum(e.size for e in s.experts),
        }
        for s in file.expert_sets
    ]


def _formats(expert_set: ExpertSetEntry) -> list[str]:
    """The formats that occur for gate, up and down, each once."""
    return sorted({FORMAT_BY_ID[number].name for e in expert_set.experts for number in e.formats})


def _readable(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "unknown"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        kinds = Counter(json.dumps({k: v for k, v in item.items() if k != "layer"}) for item in value)
        return "; ".join(f"{count} layers with {kind}" for kind, count in kinds.items()) or "none"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
