"""Writes `.cbi` files in one pass: header, tensor data, expert data, small sections, section table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from colibri.cbi import layout
from colibri.cbi.checksums import RunningDigest, crc32c
from colibri.cbi.layout import ExpertEntry, ExpertSetEntry, Section, SectionType, TensorEntry, aligned
from colibri.cbi.temporary import TemporaryFile
from colibri.errors import UsageError
from colibri.program import Program, encode, verify
from colibri.quantize import default_layout, format_named, layout_named, packed_size


class CbiWriter:
    """Streams one model into `path`; use it as a context manager, and call `finish` at the end.

    Tensors come first, in the order of the program's weight indexes, then the expert sets. Nothing appears under
    `path` before `finish`, and a file that was there stays until then; leaving the context without `finish` removes
    the temporary file. Raises UsageError for an impossible path and ModelFileError when writing fails.
    """

    def __init__(self, path: Path, alignment: int = layout.DEFAULT_ALIGNMENT) -> None:
        self._file = TemporaryFile(path)
        self._alignment = alignment
        self._position = 0
        self._tensors: list[TensorEntry] = []
        self._expert_sets: list[tuple[int, int, int, list[ExpertEntry]]] = []
        self._sections: list[Section] = []
        self._pad(aligned(layout.HEADER.size, alignment))
        self._data_start = self._position

    def __enter__(self) -> CbiWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._position

    def add_tensor(
        self, name: str, format: str, layout_name: str, rows: int, cols: int, chunks: Iterable[bytes]
    ) -> None:
        """Write a matrix [rows, cols] whose packed bytes come in `chunks`, in order."""
        if self._expert_sets:
            raise UsageError(f"tensor {name} must be written before the experts.")
        self._pad(aligned(self._position, layout.PART_ALIGNMENT))
        offset, digest = self._position, RunningDigest()
        size = packed_size(format, layout_name, rows, cols)
        self._write_part(chunks, size, digest, name)
        ids = format_named(format).id, layout_named(layout_name).id
        self._tensors.append(TensorEntry(name, *ids, rows, cols, offset, size, digest.crc32c, digest.sha256))

    def begin_expert_set(self, *, layer: int, width: int, ffn: int) -> None:
        """Start the experts of the next set; width is the model's, ffn the expert's."""
        if not self._expert_sets:
            self._close_data(SectionType.TENSOR_DATA)
        self._expert_sets.append((width, ffn, layer, []))

    def add_expert(self, formats: Sequence[str], parts: Sequence[Iterable[bytes]]) -> None:
        """Write the next expert of the set: formats and packed bytes of gate, up and down."""
        width, ffn, _, experts = self._expert_sets[-1]
        self._pad(aligned(self._position, self._alignment))
        start, digest, offsets = self._position, RunningDigest(), []
        for format, chunks, (rows, cols) in zip(
            formats, parts, ((ffn, width), (ffn, width), (width, ffn)), strict=True
        ):
            padding = bytes(aligned(digest.size, layout.PART_ALIGNMENT) - digest.size)
            self._write(padding, digest)
            offsets.append(digest.size)
            size = packed_size(format, default_layout(format), rows, cols)
            self._write_part(chunks, size, digest, f"expert {len(experts)}")
        gate, up, down = (format_named(format).id for format in formats)
        experts.append(
            ExpertEntry(
                start, digest.size, digest.crc32c, (gate, up, down), (offsets[0], offsets[1], offsets[2]), digest.sha256
            )
        )

    def finish(
        self,
        program: Program,
        *,
        tokenizer_json: bytes | None = None,
        chat_template: str | None = None,
        settings: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Check the program, write the small sections, the table and the header, and put the file under its name.

        Returns the digest that identifies the file. Raises ProgramError for a program that breaks a rule.
        """
        expert_sets = [
            ExpertSetEntry(width, ffn, layer, tuple(experts)) for width, ffn, layer, experts in self._expert_sets
        ]
        verify(program, [_described(tensor) for tensor in self._tensors], [
            (len(expert_set.experts), expert_set.width, expert_set.ffn) for expert_set in expert_sets
        ])  # fmt: skip
        self._close_data(SectionType.EXPERT_DATA if expert_sets else SectionType.TENSOR_DATA)
        self._add_section(SectionType.PROGRAM, encode(program))
        self._add_section(SectionType.TENSORS, _tensor_directory(self._tensors))
        if expert_sets:
            self._add_section(SectionType.EXPERTS, _expert_directory(expert_sets))
        if tokenizer_json is not None:
            self._add_section(SectionType.TOKENIZER, tokenizer_json)
        if chat_template is not None:
            self._add_section(SectionType.CHAT_TEMPLATE, chat_template.encode())
        if settings is not None:
            self._add_section(SectionType.SETTINGS, _json(settings))
        if metadata is not None:
            self._add_section(SectionType.METADATA, _json(metadata))
        digest = self._write_table()
        self._file.commit()
        return digest

    def abort(self) -> None:
        """Remove the temporary file; harmless after `finish`."""
        self._file.discard()

    def _write_part(self, chunks: Iterable[bytes], size: int, digest: RunningDigest, name: str) -> None:
        before = digest.size
        for chunk in chunks:
            self._write(chunk, digest)
        if digest.size - before != size:
            raise UsageError(f"{name} takes {size} bytes, but {digest.size - before} were given.")

    def _write(self, chunk: bytes, digest: RunningDigest | None = None) -> None:
        if digest is not None:
            digest.update(chunk)
        self._file.write(chunk)
        self._position += len(chunk)

    def _pad(self, offset: int) -> None:
        self._write(bytes(offset - self._position))

    def _close_data(self, type: SectionType) -> None:
        flags, size = layout.SECTION_FLAGS[type], self._position - self._data_start
        self._sections.append(Section(type, flags, self._data_start, size, 0, layout.NO_DIGEST))
        self._pad(aligned(self._position, self._alignment))
        self._data_start = self._position

    def _add_section(self, type: SectionType, data: bytes) -> None:
        self._pad(aligned(self._position, layout.PART_ALIGNMENT))
        digest, offset = RunningDigest(), self._position
        self._write(data, digest)
        flags = layout.SECTION_FLAGS.get(type, 0)
        self._sections.append(Section(type, flags, offset, len(data), digest.crc32c, digest.sha256))

    def _write_table(self) -> bytes:
        self._pad(aligned(self._position, layout.PART_ALIGNMENT))
        offset, digest = self._position, RunningDigest()
        for s in self._sections:
            self._write(layout.SECTION.pack(s.type, 1, s.flags, s.offset, s.size, s.crc32c, 0, s.sha256), digest)
        header = layout.HEADER.pack(
            layout.MAGIC, layout.FORMAT_VERSION, layout.HEADER.size, self._alignment, layout.CONTRACT_VERSION,
            0, self._position, offset, len(self._sections), 0, 1, digest.crc32c, digest.sha256, bytes(28), 0,
        )[:-4]  # fmt: skip
        self._file.write_at_start(header + crc32c(header).to_bytes(4, "little"))
        return digest.sha256


def _described(tensor: TensorEntry) -> tuple[str, str, str, int, int]:
    format, layout_name = layout.FORMAT_BY_ID[tensor.format].name, layout.LAYOUT_BY_ID[tensor.layout].name
    return tensor.name, format, layout_name, tensor.rows, tensor.cols


def _tensor_directory(tensors: Sequence[TensorEntry]) -> bytes:
    entries, names = [], b""
    for tensor in tensors:
        name = tensor.name.encode()
        if not 1 <= len(name) <= layout.MAXIMUM_NAME_BYTES:
            raise UsageError(f"the tensor name {tensor.name!r} must take 1 to {layout.MAXIMUM_NAME_BYTES} bytes.")
        entries.append(
            layout.TENSOR.pack(
                len(names), len(name), tensor.format, tensor.layout, 0, tensor.rows, tensor.cols,
                tensor.offset, tensor.size, tensor.crc32c, 0, tensor.sha256, bytes(8),
            )
        )  # fmt: skip
        names += name
    return layout.TENSOR_HEAD.pack(len(tensors), len(names)) + b"".join(entries) + names


def _expert_directory(expert_sets: Sequence[ExpertSetEntry]) -> bytes:
    parts = [layout.EXPERTS_HEAD.pack(len(expert_sets), 0)]
    for expert_set in expert_sets:
        count = len(expert_set.experts)
        parts.append(layout.EXPERT_SET.pack(count, expert_set.width, expert_set.ffn, expert_set.layer, bytes(16)))
        parts += [
            layout.EXPERT.pack(
                expert.offset, expert.size, expert.size, 0, expert.crc32c, *expert.formats, 0, *expert.parts,
                bytes(12), bytes(16), 0, expert.sha256, bytes(32),
            )
            for expert in expert_set.experts
        ]  # fmt: skip
    return b"".join(parts)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()
