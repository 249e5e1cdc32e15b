"""Opens `.cbi` files."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from colibri.cbi import layout
from colibri.cbi.checksums import RunningDigest, crc32c
from colibri.cbi.layout import ExpertSetEntry, Section, SectionType, TensorEntry
from colibri.cbi.parsing import Parser
from colibri.errors import ModelFileError, ProgramError
from colibri.program import decode, verify
from colibri.quantize import default_layout, dequantise, unpack

_PIECE_BYTES = 8 << 20


class CbiFile:
    """An open, checked model file; use `CbiFile.open`, and close it or use it as a context manager.

    header, sections, program, tensors (in the order of the program's weight indexes), expert_sets; tokenizer_json,
    chat_template (None when the file has none); settings and metadata (empty then). digest identifies the file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Takes over the descriptor; see `open` for what is raised."""
        self.path = path
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._parser = Parser(str(path), status.st_size)
        if stat.S_ISDIR(status.st_mode):
            self._parser.fail("this is a folder, not a .cbi file")
        if not stat.S_ISREG(status.st_mode):
            self._parser.fail("this is not a regular file")
        self.header = self._parser.header(self._read(0, min(layout.HEADER.size, status.st_size)))
        self.digest = self.header.digest
        self.sections = self._read_table()
        self._by_type = {section.type: section for section in self.sections}
        self._read_directories()
        self.tokenizer_json = self._section_bytes(SectionType.TOKENIZER)
        template = self._section_bytes(SectionType.CHAT_TEMPLATE)
        self.chat_template = None if template is None else self._parser.text(template, "chat template")
        self.settings = self._json_section(SectionType.SETTINGS)
        self.metadata = self._json_section(SectionType.METADATA)

    @classmethod
    def open(cls, path: Path | str) -> CbiFile:
        """Open and check everything but the weights: structure, checksums and program.

        Raises ModelFileError naming the file and the field, or saying that there is no such file.
        """
        path = Path(path)
        try:
            # O_NONBLOCK: opening a FIFO would wait for a writer; it is refused as no regular file instead.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise ModelFileError(f"{path} does not exist; give a .cbi file made by `colibri convert`.") from None
        except OSError as error:
            raise ModelFileError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close the file; harmless a second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> CbiFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read_tensor(self, name: str) -> np.ndarray:
        """Return a tensor as float32 [rows, cols]; ModelFileError for an unknown name or a wrong CRC32C."""
        entry = self._tensors_by_name.get(name)
        if entry is None:
            self._parser.fail(f"there is no tensor {name}")
        data = self._checked(entry.offset, entry.size, entry.crc32c, f"tensor {name}")
        format, layout_ = layout.FORMAT_BY_ID[entry.format], layout.LAYOUT_BY_ID[entry.layout]
        return dequantise(unpack(data, entry.rows, entry.cols, format, layout_))

    def read_expert(self, set_index: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return gate and up, float32 [ffn, width], and down [width, ffn]; ModelFileError for a wrong CRC32C."""
        expert_set = self.expert_sets[set_index]
        entry = expert_set.experts[expert]
        data = self._checked(entry.offset, entry.size, entry.crc32c, f"expert {expert} of set {set_index}")
        matrices = []
        into, out_of = (expert_set.ffn, expert_set.width), (expert_set.width, expert_set.ffn)
        for format_id, part, (rows, cols) in zip(entry.formats, entry.parts, (into, into, out_of), strict=True):
            format = layout.FORMAT_BY_ID[format_id]
            size = self._parser.packed_size("an expert", format_id, default_layout(format).id, rows, cols)
            matrices.append(dequantise(unpack(data[part : part + size], rows, cols, format)))
        return matrices[0], matrices[1], matrices[2]

    def verify_digests(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check CRC32C and SHA-256 of every section, tensor and expert record, and that padding is zero: with what
        `open` has checked that is every byte of the file.

        progress is called with (bytes done, bytes in all). Raises ModelFileError naming the damaged part.
        """
        parts = [
            (f"section {s.type}", s.offset, s.size, s.crc32c, s.sha256)
            for s in self.sections
            if not s.flags & layout.DATA
        ]
        parts += [(f"tensor {t.name}", t.offset, t.size, t.crc32c, t.sha256) for t in self.tensors]
        for index, expert_set in enumerate(self.expert_sets):
            for number, e in enumerate(expert_set.experts):
                parts.append((f"expert {number} of set {index}", e.offset, e.size, e.crc32c, e.sha256))
        total, done = sum(size for _, _, size, _, _ in parts), 0
        for what, offset, size, crc, sha256 in parts:
            digest = RunningDigest()
            for piece in self._pieces(offset, size):
                digest.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
            if digest.crc32c != crc:
                self._damaged(what, "CRC32C")
            if digest.sha256 != sha256:
                self._damaged(what, "SHA-256")
        for start, end in self._gaps():
            if any(any(piece) for piece in self._pieces(start, end - start)):
                self._parser.fail(
                    f"bytes {start} to {end - 1} are padding and not zero; fetch or convert the file again"
                )

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """What lies between the header, the table, the sections, the tensors and the records: [start, end)."""
        parts = [(0, layout.HEADER.size), (self.header.table_offset, len(self.sections) * layout.SECTION.size)]
        parts += [(s.offset, s.size) for s in self.sections if not s.flags & layout.DATA]
        parts += [(t.offset, t.size) for t in self.tensors]
        parts += [(e.offset, e.size) for expert_set in self.expert_sets for e in expert_set.experts]
        at = 0
        for offset, size in sorted(parts):
            if offset > at:
                yield at, offset
            at = max(at, offset + size)
        if self.header.file_size > at:
            yield at, self.header.file_size

    def _read_table(self) -> list[Section]:
        data = self._read(self.header.table_offset, self.header.section_count * layout.SECTION.size)
        digest = RunningDigest()
        digest.update(data)
        if digest.crc32c != self.header.table_crc32c:
            self._damaged("the section table", "CRC32C")
        if digest.sha256 != self.digest:
            self._damaged("the section table", "SHA-256")
        return self._parser.sections(data, self.header)

    def _read_directories(self) -> None:
        by_type = self._by_type
        program, tensors = self._section_bytes(SectionType.PROGRAM), self._section_bytes(SectionType.TENSORS)
        if program is None or tensors is None:
            self._parser.fail("the program or the tensor directory is missing")
        self.tensors: list[TensorEntry] = self._parser.tensors(tensors, by_type.get(SectionType.TENSOR_DATA))
        self._tensors_by_name = {tensor.name: tensor for tensor in self.tensors}
        self.expert_sets: list[ExpertSetEntry] = []
        experts = self._section_bytes(SectionType.EXPERTS)
        if experts is not None:
            data_section = by_type.get(SectionType.EXPERT_DATA)
            self.expert_sets = self._parser.expert_sets(experts, data_section, self.header.alignment)
        try:
            self.program = decode(program)
            verify(
                self.program,
                [
                    (t.name, layout.FORMAT_BY_ID[t.format].name, layout.LAYOUT_BY_ID[t.layout].name, t.rows, t.cols)
                    for t in self.tensors
                ],
                [(len(s.experts), s.width, s.ffn) for s in self.expert_sets],
            )
        except ProgramError as error:
            raise ModelFileError(f"{self.path}: {error}") from error

    def _section_bytes(self, type: SectionType) -> bytes | None:
        section = self._by_type.get(type)
        if section is None:
            return None
        data = self._checked(section.offset, section.size, section.crc32c, f"section {type.name.lower()}")
        digest = RunningDigest()
        digest.update(data)
        if digest.sha256 != section.sha256:
            self._damaged(f"section {type.name.lower()}", "SHA-256")
        return data

    def _json_section(self, type: SectionType) -> dict[str, Any]:
        data = self._section_bytes(type)
        return {} if data is None else self._parser.json_object(data, type.name.lower())

    def _checked(self, offset: int, size: int, crc: int, what: str) -> bytes:
        data = self._read(offset, size)
        if crc32c(data) != crc:
            self._damaged(what, "CRC32C")
        return data

    def _damaged(self, what: str, checksum: str) -> None:
        self._parser.fail(f"{what} is damaged ({checksum} does not match); fetch or convert the file again")

    def _read(self, offset: int, size: int) -> bytes:
        return b"".join(self._pieces(offset, size))

    def _pieces(self, offset: int, size: int) -> Iterator[bytes]:
        end = offset + size
        while offset < end:
            try:
                piece = os.pread(self._descriptor, min(end - offset, _PIECE_BYTES), offset)
            except OSError as error:
                raise ModelFileError(f"{self.path} cannot be read at {offset}: {error.strerror}.") from error
            if not piece:
                self._parser.fail(f"the file ends at {offset}, {end - offset} bytes early")
            yield piece
            offset += len(piece)
