import hashlib
import struct

import numpy as np
import pytest
from cbi.tiny_file import METADATA, SETTINGS, TEMPLATE, TOKENIZER, expert_values, tensor_values, write_tiny
from program.hand_built import hand_built

from colibri.cbi import CbiFile, CbiWriter, SectionType
from colibri.errors import ModelFileError, ProgramError, UsageError
from colibri.quantize import dequantise, quantise

FORMATS = [("f32", ("f32",) * 3), ("q8_g32", ("q4_g32", "q4_g32", "q8_g32")), ("bf16", ("f16", "bf16", "f16"))]


@pytest.mark.parametrize(("matrices", "experts"), FORMATS)
def test_what_is_written_is_read(tmp_path, matrices, experts):
    path = tmp_path / "model.cbi"
    digest = write_tiny(path, matrices, experts)
    built = hand_built()
    with CbiFile.open(path) as file:
        assert file.program == built.program
        assert (file.tokenizer_json, file.chat_template) == (TOKENIZER, TEMPLATE)
        assert (file.settings, file.metadata) == (SETTINGS, METADATA)
        assert file.digest == digest
        assert [t.name for t in file.tensors] == [name for name, _, _ in built.weights]
        formats = {name: format for name, format, _, _, _ in built.tensors(matrices)}
        for name, source in tensor_values(built).items():
            np.testing.assert_array_equal(file.read_tensor(name), dequantise(quantise(source, formats[name])))
        for index, (count, _, _) in enumerate(built.expert_sets):
            for expert in range(count):
                for read, source, format in zip(
                    file.read_expert(index, expert), expert_values(built, index, expert), experts, strict=True
                ):
                    np.testing.assert_array_equal(read, dequantise(quantise(source, format)))
        seen = []
        file.verify_digests(lambda done, total: seen.append((done, total)))
        assert seen[-1][0] == seen[-1][1] > 0


def test_the_layout_is_that_of_the_specification(tmp_path):
    path = tmp_path / "model.cbi"
    write_tiny(path, "q8_g32", ("q4_g32",) * 3)
    data = path.read_bytes()
    magic, version, header_size, alignment, contract = struct.unpack_from("<8s4I", data)
    assert (magic, version, header_size, alignment, contract) == (b"COLIBRI\0", 1, 128, 4096, 1)
    features, size, table, count, volume, volumes = struct.unpack_from("<3Q3I", data, 24)
    assert (features, size, volume, volumes) == (0, len(data), 0, 1)
    assert data[64:96] == hashlib.sha256(data[table : table + 64 * count]).digest()
    assert table + 64 * count == len(data)
    with CbiFile.open(path) as file:
        by_type = {section.type: section for section in file.sections}
        order = [section.type for section in sorted(file.sections, key=lambda s: s.offset)]
        assert order[:2] == [SectionType.TENSOR_DATA, SectionType.EXPERT_DATA]
        tensors, experts = by_type[SectionType.TENSOR_DATA], by_type[SectionType.EXPERT_DATA]
        assert tensors.offset == 4096
        assert experts.offset % 4096 == 0
        assert (tensors.crc32c, tensors.sha256) == (0, bytes(32))
        for tensor in file.tensors:
            assert tensor.offset % 64 == 0
            assert hashlib.sha256(data[tensor.offset : tensor.offset + tensor.size]).digest() == tensor.sha256
        for expert in (e for expert_set in file.expert_sets for e in expert_set.experts):
            assert expert.offset % 4096 == 0
            assert [part % 64 for part in expert.parts] == [0, 0, 0]
            assert hashlib.sha256(data[expert.offset : expert.offset + expert.size]).digest() == expert.sha256


def test_the_same_input_gives_the_same_bytes(tmp_path):
    assert write_tiny(tmp_path / "a") == write_tiny(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("alignment", [64, 65536])
def test_other_alignments(tmp_path, alignment):
    write_tiny(tmp_path / "model.cbi", alignment=alignment)
    with CbiFile.open(tmp_path / "model.cbi") as file:
        assert file.header.alignment == alignment
        assert all(e.offset % alignment == 0 for s in file.expert_sets for e in s.experts)
        file.verify_digests()


def test_a_writer_that_is_not_finished_leaves_nothing(tmp_path):
    with CbiWriter(tmp_path / "model.cbi") as writer:
        writer.add_tensor("t", "f32", "rows", 1, 4, [bytes(16)])
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_breaks_a_rule_is_not_written(tmp_path):
    with pytest.raises(ProgramError, match="tensor 0 of 0"), CbiWriter(tmp_path / "model.cbi") as writer:
        writer.finish(hand_built().program)
    assert list(tmp_path.iterdir()) == []


def test_too_few_bytes_are_noticed(tmp_path):
    with pytest.raises(UsageError, match="t takes 16 bytes, but 12 were given"), CbiWriter(tmp_path / "m") as writer:
        writer.add_tensor("t", "f32", "rows", 1, 4, [bytes(12)])


def test_an_unknown_tensor(tmp_path):
    write_tiny(tmp_path / "model.cbi")
    with CbiFile.open(tmp_path / "model.cbi") as file, pytest.raises(ModelFileError, match="no tensor nothing"):
        file.read_tensor("nothing")
