"""Hostile and damaged files: every one must end in ModelFileError that names the file."""

import os
import random
import struct
from pathlib import Path

import google_crc32c
import pytest
from cbi.tiny_file import write_tiny

from colibri.cbi import CbiFile, SectionType, layout
from colibri.cbi.checksums import RunningDigest
from colibri.errors import ModelFileError


class Editor:
    """Changes fields of a file and repairs the checksums, so that the checks behind them are reached."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_tiny(path, "q8_g32", ("q8_g32",) * 3)
        self.data = bytearray(path.read_bytes())
        self.table, self.count = struct.unpack_from("<QI", self.data, 40)

    def entry(self, type: SectionType) -> int:
        return next(
            at
            for at in range(self.table, self.table + 64 * self.count, 64)
            if int.from_bytes(self.data[at : at + 4], "little") == type
        )

    def section(self, type: SectionType) -> int:
        return struct.unpack_from("<Q", self.data, self.entry(type) + 8)[0]

    def put(self, at: int, format: str, *values) -> None:
        struct.pack_into("<" + format, self.data, at, *values)

    def save(self) -> Path:
        for at in range(self.table, min(self.table + 64 * self.count, len(self.data) - 63), 64):
            flags, offset, size = struct.unpack_from("<HQQ", self.data, at + 6)
            if flags & layout.DATA or offset + size > len(self.data):
                continue
            digest = RunningDigest()
            digest.update(bytes(self.data[offset : offset + size]))
            self.put(at + 24, "I", digest.crc32c)
            self.data[at + 32 : at + 64] = digest.sha256
        self.repair_header()
        return self.path

    def repair_header(self) -> None:
        table = RunningDigest()
        table.update(bytes(self.data[self.table : self.table + 64 * self.count]))
        self.put(60, "I", table.crc32c)
        self.data[64:96] = table.sha256
        self.seal()

    def seal(self) -> None:
        """Make the header's own CRC32C right and write the file."""
        self.put(124, "I", google_crc32c.value(bytes(self.data[:124])))
        self.path.write_bytes(self.data)


@pytest.fixture
def editor(tmp_path):
    return Editor(tmp_path / "model.cbi")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        CbiFile.open(path).close()
    assert str(path) in str(caught.value)


def test_the_editor_itself_does_no_harm(editor):
    CbiFile.open(editor.save()).verify_digests()


def test_files_that_are_none(tmp_path):
    refused(tmp_path / "missing.cbi", "does not exist")
    refused(tmp_path, "this is a folder")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    refused(empty, "not a .cbi file")
    text = tmp_path / "text"
    text.write_bytes(b"GGUF" + bytes(200))
    refused(text, "not a .cbi file")
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR)
    refused(tmp_path / "pipe", "not a regular file")
    os.close(descriptor)


def test_every_truncation_is_refused(editor):
    whole = bytes(editor.data)
    for size in [*range(1, 200), *range(200, len(whole), 997), len(whole) - 1]:
        editor.path.write_bytes(whole[:size])
        refused(editor.path, "truncated|not a .cbi file")
    editor.path.write_bytes(whole + b"\0")
    refused(editor.path, "its header says")


@pytest.mark.parametrize(
    ("at", "format", "value", "message"),
    [
        (8, "I", 2, "format version 2, this build reads 1"),
        (12, "I", 256, "header size 256"),
        (16, "I", 100, "alignment 100"),
        (16, "I", 32, "alignment 32"),
        (16, "I", 131072, "alignment 131072"),
        (20, "I", 2, "numeric contract version 2"),
        (24, "Q", 1 << 40, "required features 0x10000000000"),
        (32, "Q", 1 << 63, "its header says"),
        (40, "Q", 4, "section table offset 4"),
        (40, "Q", (1 << 64) - 8, "section table offset"),
        (48, "I", 0, "section count 0"),
        (48, "I", 65, "section count 65"),
        (52, "I", 1, "volume 1"),
        (56, "I", 2, "volume 0 of 2"),
        (60, "I", 1, "section table is damaged"),
        (64, "B", 0, "section table is damaged"),
        (100, "B", 1, "reserved bytes of the header"),
    ],
)
def test_header_fields(editor, at, format, value, message):
    editor.put(at, format, value)
    editor.seal()
    refused(editor.path, message)


def test_a_damaged_header_is_noticed(editor):
    editor.data[20] ^= 1
    editor.path.write_bytes(editor.data)
    refused(editor.path, "header is damaged")


@pytest.mark.parametrize(
    ("field", "format", "value", "message"),
    [
        (0, "I", 99, "unknown critical type 99"),
        (0, "I", SectionType.TENSORS, "second section of type 2|flags"),
        (4, "H", 2, "has version 2"),
        (6, "H", 0, "has flags 0"),
        (6, "H", 4 | 1, "flags 5"),
        (8, "Q", 0, "overlap"),
        (8, "Q", 1, "not aligned"),
        (8, "Q", (1 << 64) - 64, "not inside"),
        (16, "Q", 1 << 62, "not inside"),
        (28, "I", 1, "reserved"),
    ],
)
def test_section_fields(editor, field, format, value, message):
    editor.put(editor.entry(SectionType.PROGRAM) + field, format, value)
    editor.repair_header()
    refused(editor.path, message)


def test_an_unknown_section_that_is_not_critical_is_skipped(editor):
    at = editor.entry(SectionType.METADATA)
    editor.put(at, "I", 4242)
    editor.repair_header()
    with CbiFile.open(editor.path) as file:
        assert file.metadata == {}


def test_a_data_section_has_no_checksum_of_its_own(editor):
    editor.put(editor.entry(SectionType.TENSOR_DATA) + 24, "I", 7)
    editor.repair_header()
    refused(editor.path, "checksum of its own")


@pytest.mark.parametrize("type", [SectionType.PROGRAM, SectionType.TENSORS, SectionType.TOKENIZER])
def test_a_damaged_section_is_named(editor, type):
    editor.data[editor.section(type)] ^= 1
    editor.path.write_bytes(editor.data)
    refused(editor.path, f"section {type.name.lower()} is damaged")


@pytest.mark.parametrize("type", [SectionType.PROGRAM, SectionType.TENSORS, SectionType.EXPERTS])
def test_a_missing_critical_section(editor, type):
    editor.put(editor.entry(type), "IHH", 4242, 1, 0)
    editor.repair_header()
    refused(editor.path, "is missing|expert set 0 of 0")


@pytest.mark.parametrize(
    ("at", "format", "value", "message"),
    [
        (0, "I", 1_000_001, "tensor count 1000001"),
        (0, "I", 3, "its counts give"),
        (4, "I", 0xFFFFFFFF, "its counts give"),
        (8 + 0, "I", 0xFFFFFFFF, "name of tensor 0"),
        (8 + 4, "I", 0, "name of tensor 0"),
        (8 + 4, "I", 256, "name of tensor 0"),
        (8 + 8, "H", 77, "tensor embedding has unknown format 77"),
        (8 + 10, "H", 77, "tensor embedding has unknown format"),
        (8 + 10, "H", 2, "does not come in layout tiled16"),
        (8 + 12, "I", 1, "reserved bytes of tensor embedding"),
        (8 + 16, "Q", 0, r"shape \[0, 15\]"),
        (8 + 16, "Q", (1 << 31) + 1, "shape"),
        (8 + 16, "Q", 1 << 31, "size"),
        (8 + 32, "Q", 4096 + 32, "not aligned"),
        (8 + 32, "Q", 64, "inside the tensor data"),
        (8 + 32, "Q", (1 << 64) - 64, "inside the tensor data"),
        (8 + 40, "Q", 64, "has size 64"),
        (8 + 52, "I", 1, "reserved bytes"),
        (8 + 88, "B", 1, "reserved bytes"),
        (8 + 96, "II", (0, 9), "occurs twice"),
    ],
)
def test_tensor_directory_fields(editor, at, format, value, message):
    editor.put(editor.section(SectionType.TENSORS) + at, format, *(value if isinstance(value, tuple) else (value,)))
    refused(editor.save(), message)


@pytest.mark.parametrize(
    ("at", "format", "value", "message"),
    [
        (0, "I", 65537, "expert set count"),
        (0, "I", 3, "ends inside expert set 2"),
        (0, "I", 1, "bytes follow"),
        (4, "I", 1, "expert set count"),
        (8, "I", 0, "0 experts"),
        (8, "I", 65536, "ends inside expert set 0"),
        (12, "I", 0, "width 0"),
        (12, "I", 0xFFFFFFFF, "width 4294967295"),
        (24, "B", 1, "reserved"),
        (40 + 0, "Q", 64, "not aligned"),
        (40 + 0, "Q", 4096, "inside the expert data"),
        (40 + 8, "QQ", (0, 0), "inside the expert data"),
        (40 + 8, "QQ", (1 << 63, 1 << 63), "inside the expert data"),
        (40 + 16, "Q", 5, "plain"),
        (40 + 24, "I", 1, "codec 1"),
        (40 + 32, "H", 77, "gate of expert 0 of set 0 has unknown format 77"),
        (40 + 38, "H", 1, "reserved"),
        (40 + 40, "Q", 32, "not aligned"),
        (40 + 40, "Q", 1 << 63, "beyond the record"),
        (40 + 48, "Q", 0, "overlap"),
        (40 + 64, "B", 1, "reserved"),
        (40 + 76, "B", 1, "reserved"),
        (40 + 92, "I", 1, "reserved"),
        (40 + 130, "B", 1, "reserved"),
    ],
)
def test_expert_directory_fields(editor, at, format, value, message):
    editor.put(editor.section(SectionType.EXPERTS) + at, format, *(value if isinstance(value, tuple) else (value,)))
    refused(editor.save(), message)


def test_two_records_in_one_place(editor):
    directory = editor.section(SectionType.EXPERTS)
    offset = struct.unpack_from("<Q", editor.data, directory + 40)[0]
    editor.put(directory + 40 + 160, "Q", offset)
    refused(editor.save(), "records overlap")


@pytest.mark.parametrize(
    ("type", "message"),
    [
        (SectionType.SETTINGS, "settings section is not JSON"),
        (SectionType.METADATA, "metadata section is not JSON"),
        (SectionType.CHAT_TEMPLATE, "chat template section is not UTF-8"),
    ],
)
def test_text_sections(editor, type, message):
    editor.data[editor.section(type)] = 0xFF if type == SectionType.CHAT_TEMPLATE else ord("[")
    refused(editor.save(), message)


def test_damaged_weights_are_found_when_read_and_by_validation(editor):
    with CbiFile.open(editor.path) as file:
        tensor, expert = file.tensors[3], file.expert_sets[1].experts[2]
    for offset, what in ((tensor.offset, f"tensor {tensor.name}"), (expert.offset, "expert 2 of set 1")):
        data = bytearray(editor.data)
        data[offset] ^= 4
        editor.path.write_bytes(data)
        with CbiFile.open(editor.path) as file:
            with pytest.raises(ModelFileError, match=f"{what} is damaged"):
                file.verify_digests()
            with pytest.raises(ModelFileError, match=f"{what} is damaged"):
                file.read_tensor(tensor.name)
                file.read_expert(1, 2)


def test_a_wrong_sha256_beside_a_right_crc_is_found(editor):
    editor.data[editor.section(SectionType.TENSORS) + 8 + 56] ^= 1
    with CbiFile.open(editor.save()) as file, pytest.raises(ModelFileError, match=r"tensor embedding.*SHA-256"):
        file.verify_digests()


def test_every_byte_of_the_file_is_verified(editor):
    """What no checksum covers must be zero: so no single byte can change unnoticed."""
    good = bytes(editor.data)
    chance = random.Random(7)
    zeros = [at for at, byte in enumerate(good) if byte == 0]
    for at in [*chance.sample(range(len(good)), 150), *chance.sample(zeros, 150), len(good) - 1]:
        changed = bytearray(good)
        changed[at] ^= 1 << chance.randrange(8)
        editor.path.write_bytes(changed)
        with pytest.raises(ModelFileError), CbiFile.open(editor.path) as file:
            file.verify_digests()


def test_random_changes_with_repaired_checksums(editor):
    """Only ModelFileError may come out, whatever the directories say."""
    good, chance = bytes(editor.data), random.Random(5)
    starts = [editor.section(t) for t in (SectionType.PROGRAM, SectionType.TENSORS, SectionType.EXPERTS)]
    sizes = [struct.unpack_from("<Q", good, editor.entry(t) + 16)[0] for t in (1, 2, 3)]
    refused_count = 0
    for _ in range(600):
        editor.data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            where = chance.choice((0, 1, 2, 3))
            start, size = (editor.table, 64 * editor.count) if where == 3 else (starts[where], sizes[where])
            at = start + chance.randrange(0, size - 8, 4)
            editor.put(at, "I", chance.choice((0, 1, 64, 4096, 0x7FFFFFFF, 0xFFFFFFFF, chance.getrandbits(32))))
        editor.save()
        try:
            with CbiFile.open(editor.path) as file:
                for tensor in file.tensors:
                    file.read_tensor(tensor.name)
        except ModelFileError:
            refused_count += 1
    assert refused_count > 400
