"""One broken .cbi file for each rule of spec/cbi.md, with the message it must give."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzz.image import Image, crc32c
from fuzz.tiny_model import ABSENT, OPS, float_bits, tiny_model

BAD_FILE, UNSUPPORTED = 3, 4


@dataclass(frozen=True)
class BadFile:
    name: str
    message: str  # part of what the core must say
    status: int = BAD_FILE
    fields: dict[str, int] = field(default_factory=dict)
    edit: Callable[[Image], None] | None = None
    repair: bool = True

    def make(self, original: Image) -> bytes:
        image = Image(bytes(original.data), original.fields)
        if self.edit is not None:
            self.edit(image)
        for name, value in self.fields.items():
            image.set(name, value)
        return bytes((image.repair() if self.repair else image).data)


ORIGINAL = Image(tiny_model())


def get(name: str) -> int:
    return ORIGINAL.get(name)


def numbered(kind: str, which: int = 0) -> str:
    """'op.<i>' of the op of that kind, counted from 0."""
    found = [n[: -len(".number")] for n in ORIGINAL.fields if n.startswith("op.") and n.endswith(".number")]
    return [op for op in found if get(op + ".number") == OPS[kind]["number"]][which]


def value(name: str) -> int:
    """The number of the value with that name."""
    for i in range(get("program.value_count")):
        offset = ORIGINAL.fields[f"value.{i}.name"].offset
        if bytes(ORIGINAL.data[offset : offset + 20]).rstrip(b"\0") == name.encode():
            return i
    raise KeyError(name)


def rule(kind: str, operand: str, number: int, message: str, which: int = 0) -> BadFile:
    return BadFile(f"{kind} {operand} {message}", message, fields={f"{numbered(kind, which)}.{operand}": number})


def text_at(name: str, text: bytes) -> Callable[[Image], None]:
    def edit(image: Image) -> None:
        offset = image.fields[name].offset
        image.data[offset : offset + len(text)] = text

    return edit


def flip_at(place: str) -> Callable[[Image], None]:
    """Flips a bit of the bytes that the field's offset points at."""

    def edit(image: Image) -> None:
        image.data[image.get(place) + 5] ^= 4

    return edit


def truncate(size: int) -> Callable[[Image], None]:
    def edit(image: Image) -> None:
        del image.data[size:]

    return edit


def resize(section: str, change: Callable[[bytes], bytes]) -> Callable[[Image], None]:
    def edit(image: Image) -> None:
        offset, size = image.section(section)
        image.resize_section(section, change(bytes(image.data[offset : offset + size])))

    return edit


def wrong_sha(image: Image) -> None:
    """All checksums right but one SHA-256 of the table."""
    image.repair()
    image.data[image.fields["section.8.sha"].offset] ^= 1
    table = bytes(image.data[get("header.table_offset") :][: 64 * get("header.section_count")])
    fix_header(image, table)


def fix_header(image: Image, table: bytes) -> None:
    image.set("header.table_crc", crc32c(table))
    image.data[64:96] = hashlib.sha256(table).digest()
    image.set("header.crc", crc32c(bytes(image.data[:124])))


def wrong_digest(image: Image) -> None:
    image.data[64] ^= 1
    image.set("header.crc", crc32c(bytes(image.data[:124])))


def drop_section(name: str) -> Callable[[Image], None]:
    """Turns it into an unknown section that is skipped."""

    def edit(image: Image) -> None:
        image.set(f"section.{name}.type", 1000)
        image.set(f"section.{name}.flags", image.get(f"section.{name}.flags") & 2)

    return edit


EMBED, NORM, MATMUL, TABLE, ROPE = (numbered(k) for k in ("embed", "rms_norm", "matmul", "rope_table", "rope"))
ATTENTION, ROUTE, MIX, ADD, GATHER = (numbered(k) for k in ("attention", "route", "experts", "add", "gather_outputs"))
SWITCH, ACTIVATION = numbered("sigmoid_gate"), numbered("gated_activation")
NAN, INFINITY = 0x7FC00000, 0x7F800000
BIG = 1 << 63
SECTION_COUNT = get("header.section_count")
TENSORS = get("tensors.count")
OP_COUNT = get("program.op_count")
VALUES = get("program.value_count")

HEADER = [
    BadFile("magic", "is not a .cbi file", fields={"header.magic": 0x4655_4747}),
    BadFile("short magic", "is not a .cbi file", edit=truncate(5), repair=False),
    BadFile("version", "has format version 2, this build reads version 1", UNSUPPORTED, {"header.version": 2}),
    BadFile("version, short", "has format version 9", UNSUPPORTED, {"header.version": 9}, truncate(20), False),
    BadFile("short header", "is cut short: 100 bytes, the header alone has 128", edit=truncate(100), repair=False),
    BadFile("header checksum", "the header is damaged", fields={"header.crc": 1}, repair=False),
    BadFile("header size", "header size is 129, not 128", fields={"header.header_size": 129}),
    BadFile("alignment 0", "alignment is 0, not a power of two", fields={"header.alignment": 0}),
    BadFile("alignment 96", "alignment is 96, not a power of two", fields={"header.alignment": 96}),
    BadFile("alignment 2^30", "alignment is 1073741824, not", fields={"header.alignment": 1 << 30}),
    BadFile("contract", "has numeric contract version 2, this build computes", UNSUPPORTED, {"header.contract": 2}),
    BadFile("features", "needs features 0x10 that", UNSUPPORTED, {"header.features": 16}),
    BadFile("file size", "its header says 5; it was cut short or changed", fields={"header.file_size": 5}),
    BadFile("cut", f"its header says {len(ORIGINAL.data)}; it was cut short", edit=truncate(70000)),
    BadFile("no sections", "section count is 0, not 1 to 64", fields={"header.section_count": 0}),
    BadFile("many sections", "section count is 65, not 1 to 64", fields={"header.section_count": 65}),
    BadFile("odd table", "not a multiple of 8 behind the header", fields={"header.table_offset": 1001}),
    BadFile("table in header", "not a multiple of 8 behind the header", fields={"header.table_offset": 64}),
    BadFile("table outside", "does not end inside the file", fields={"header.table_offset": (1 << 64) - 64}),
    BadFile("volume", "is volume 1 of 1;", UNSUPPORTED, {"header.volume": 1}),
    BadFile("volumes", "is volume 0 of 2;", UNSUPPORTED, {"header.volumes": 2}),
    BadFile("reserved", "the reserved bytes of the header are not zero", fields={"header.reserved": 1}),
    BadFile("table checksum", "section table is damaged", edit=flip_at("header.table_offset"), repair=False),
    BadFile("digest", "the digest differs from the section table's SHA-256", edit=wrong_digest, repair=False),
]

SECTIONS = [
    BadFile("section flags", "section 3 (tensors): flags 0x8001 are unknown", fields={"section.tensors.flags": 0x8001}),
    BadFile("critical", "section 7: critical type 77 is not known", UNSUPPORTED, {"section.77.flags": 1}),
    BadFile("section version", "section 2 (program): has version 2", UNSUPPORTED, {"section.program.version": 2}),
    BadFile("not critical", "section 4 (experts): flags are 0x0, not 0x1", fields={"section.experts.flags": 0}),
    BadFile("data flag", "section 2 (program): flags are 0x3, not 0x1", fields={"section.program.flags": 3}),
    BadFile("section offset", "is not a multiple of 64", fields={"section.8.offset": get("section.8.offset") + 8}),
    BadFile(
        "section alignment", "section 0 (tensor data): offset 128 is not a multiple of 256",
        fields={"header.alignment": 256, "section.tensor_data.offset": 128},
    ),
    BadFile("section outside", "do not end inside the file", fields={"section.9.size": 1 << 20}),
    BadFile("section wraps", "do not end inside the file", fields={"section.9.size": (1 << 64) - 64}),
    BadFile("section reserved", "section 5 (settings): the reserved field is", fields={"section.8.reserved": 1}),
    BadFile("data checksum", "must have checksum and digest 0", fields={"section.tensor_data.crc": 1}),
    BadFile("data digest", "must have checksum and digest 0", fields={"section.expert_data.sha": 1}),
    BadFile("twice", "section 6 (settings): occurs twice", fields={"section.9.type": 8}),
    BadFile("sections overlap", "sections 5 and 7 overlap", fields={"section.77.offset": get("section.8.offset")}),
    BadFile("on the header", "section 7 overlaps the header", fields={"section.77.offset": 64}),
    BadFile(
        "on the table", "section 7 overlaps the section table",
        fields={"section.77.offset": (get("header.table_offset") + 63) // 64 * 64},
    ),
    BadFile("section damaged", "section 6 (metadata): is damaged", edit=flip_at("section.9.offset"), repair=False),
    BadFile("section digest", "section 5 (settings): its SHA-256 differs", edit=wrong_sha, repair=False),
    BadFile("no program", "has no section 'program'", edit=drop_section("program")),
    BadFile("no tensors", "has no section 'tensors'", edit=drop_section("tensors")),
    BadFile("no experts", "the file has no expert directory with sets", edit=drop_section("experts")),
    BadFile("no tensor data", "do not lie in a tensor data section", edit=drop_section("tensor_data")),
    BadFile("no expert data", "do not lie in an expert data section", edit=drop_section("expert_data")),
]  # fmt: skip

DIRECTORIES = [
    BadFile("tensors short", "tensor directory: has 4 bytes", fields={"section.tensors.size": 4}),
    BadFile("tensors huge", "tensor count is 4294967295, at most 1000000", fields={"tensors.count": (1 << 32) - 1}),
    BadFile("tensors many", f"{TENSORS + 1} tensors and", fields={"tensors.count": TENSORS + 1}),
    BadFile("tensors left", "bytes of names need", edit=resize("tensors", lambda b: b + b"more")),
    BadFile("no tensor", "table is tensor 0, there are 0", edit=resize("tensors", lambda b: bytes(8))),
    BadFile("name empty", "tensor 1: name length is 0, not 1 to 255", fields={"tensor.1.name_length": 0}),
    BadFile("name long", "tensor 1: name length is 256, not 1 to 255", fields={"tensor.1.name_length": 256}),
    BadFile("name outside", "tensor 1: its name ends outside", fields={"tensor.1.name_offset": (1 << 32) - 1}),
    BadFile("name twice", "tensor 'embed': two tensors have this name",
            fields={"tensor.1.name_offset": 0, "tensor.1.name_length": 5}),
    BadFile("format", "tensor 'embed': format 99 is not known", UNSUPPORTED, {"tensor.0.format": 99}),
    BadFile("layout", "tensor 'embed': layout 4 is not known", UNSUPPORTED, {"tensor.0.layout": 4}),
    BadFile("tensor reserved", "tensor 'embed': a reserved field", fields={"tensor.0.reserved": 1}),
    BadFile("tensor reserved 2", "tensor 'embed': a reserved field", fields={"tensor.0.reserved2": 1}),
    BadFile("tensor reserved 3", "tensor 'embed': a reserved field", fields={"tensor.0.reserved3": BIG}),
    BadFile("rows 0", "tensor 'embed': rows is 0, not 1 to 2^31", fields={"tensor.0.rows": 0}),
    BadFile("columns", "columns is 2147483649, not 1 to 2^31", fields={"tensor.0.cols": (1 << 31) + 1}),
    BadFile("float tiled16x4", "layout 3 does not go with format f32", fields={"tensor.1.layout": 3}),
    BadFile("quantised tiled16", "layout 2 does not go with format q8_g32", fields={"tensor.0.layout": 2}),
    BadFile("wraps", "rows of 2147483648 columns are too large",
            fields={"tensor.1.rows": 1 << 31, "tensor.1.cols": 1 << 31, "tensor.1.size": 0}),
    BadFile("tensor size", "tensor 'embed': size 100 is not the 3264 that format q8_g32 needs",
            fields={"tensor.0.size": 100}),
    BadFile("tensor offset", "is not a multiple of 64", fields={"tensor.0.offset": get("tensor.0.offset") + 4}),
    BadFile("tensor before", "do not lie in a tensor data section", fields={"tensor.0.offset": 0}),
    BadFile("tensor outside", "do not lie in a tensor data section", fields={"tensor.0.offset": (1 << 64) - 64}),
    BadFile("tensors overlap", "tensors 'embed' and 'rope_inverse_frequencies' overlap",
            fields={"tensor.1.offset": get("tensor.0.offset") + 64}),
    BadFile("tensor damaged", "tensor 'embed' is damaged", edit=flip_at("tensor.0.offset"), repair=False),
    BadFile("experts short", "expert directory: has 7 bytes", fields={"section.experts.size": 7}),
    BadFile("sets huge", "set count is 65537, at most 65536", fields={"experts.count": 65537}),
    BadFile("experts reserved", "expert directory: the reserved field", fields={"experts.reserved": 1}),
    BadFile("sets many", "the heads of 1000 sets alone need 32008", fields={"experts.count": 1000}),
    BadFile("set empty", "expert set 0: expert count is 0, not 1 to 65536", fields={"set.0.count": 0}),
    BadFile("set huge", "expert set 1: expert count is 4294967295", fields={"set.1.count": (1 << 32) - 1}),
    BadFile("set many", "expert set 1: the directory ends before its 4 experts", fields={"set.1.count": 4}),
    BadFile("set width", "expert set 0: width 0 and ffn 16 must be", fields={"set.0.width": 0}),
    BadFile("set ffn", "expert set 0: width 32 and ffn 0 must be", fields={"set.0.ffn": 0}),
    BadFile("set layer", "expert set 0: layer 4294967295 is not below 65536", fields={"set.0.layer": ABSENT}),
    BadFile("set reserved", "expert set 0: a reserved field", fields={"set.0.reserved2": BIG}),
    BadFile("experts left", "3 bytes are left behind its last set", edit=resize("experts", lambda b: b + b"abc")),
    BadFile("codec", "expert 1 of set 0: codec 1 is not known", UNSUPPORTED, {"expert.0.1.codec": 1}),
    BadFile("plain", "expert 1 of set 0: plain bytes 1 are not", fields={"expert.0.1.plain": 1}),
    BadFile("nonce", "expert 1 of set 0: nonce or tag", fields={"expert.0.1.nonce": 1}),
    BadFile("tag", "expert 1 of set 0: nonce or tag", fields={"expert.0.1.tag": BIG}),
    BadFile("expert reserved", "expert 1 of set 0: a reserved field", fields={"expert.0.1.reserved": 1}),
    BadFile("expert reserved 2", "expert 1 of set 0: a reserved field", fields={"expert.0.1.reserved2": 1}),
    BadFile("expert reserved 3", "expert 1 of set 0: a reserved field", fields={"expert.0.1.reserved3": 1}),
    BadFile("expert offset", "is not a multiple of the alignment 64",
            fields={"expert.0.1.offset": get("expert.0.1.offset") + 32}),
    BadFile("expert outside", "expert 1 of set 0: ", fields={"expert.0.1.offset": 1 << 40}),
    BadFile("expert before", "do not lie in an expert data section", fields={"expert.0.1.offset": 128}),
    BadFile("expert format", "format 0 of up is not known", UNSUPPORTED, {"expert.0.1.up_format": 0}),
    BadFile("part offset", "offset 8 of gate is not a multiple of 64", fields={"expert.0.1.gate": 8}),
    BadFile("part outside", "does not end inside the record", fields={"expert.0.1.down": (1 << 64) - 64}),
    BadFile("part format", "gate (2048 bytes of format f32 at 3072) does not end",
            fields={"expert.0.1.gate_format": 1, "expert.0.1.gate": 3072}),
    BadFile("parts overlap", "expert 1 of set 0: gate and up overlap", fields={"expert.0.1.up": 64}),
    BadFile("records overlap", "the records of expert 0 of set 0 and expert 2 of set 0 overlap",
            fields={"expert.0.2.offset": get("expert.0.0.offset")}),
    BadFile("records overlap across sets", "expert 1 of set 1 and expert 2 of set 0 overlap",
            fields={"expert.0.2.offset": get("expert.1.1.offset") + 64}),
    BadFile("expert damaged", "expert 2 of layer 1 is damaged", edit=flip_at("expert.1.2.offset"), repair=False),
]  # fmt: skip


def name_bytes(text: bytes) -> Callable[[Image], None]:
    """Puts the text at the beginning of the tensor names."""

    def edit(image: Image) -> None:
        at = image.section("tensors")[0] + 8 + 96 * TENSORS
        image.data[at : at + len(text)] = text

    return edit


NAMES = [
    BadFile(f"name {text!r}", "tensor 0: its name is not UTF-8 text", edit=name_bytes(text))
    for text in (
        b"em\0ed", b"em\nbe", b"em\x7fbe", b"emb\xff", b"em\x80be", b"emb\xc3", b"em\xc0\xaf", b"\xe0\x80\xafed",
        b"\xed\xa0\x80ed", b"\xf4\x90\x80\x80d", b"\xf5\x80\x80\x80d", b"e\xc3be", b"embe\xe2",
    )
]  # fmt: skip

PROGRAM = [
    BadFile("program empty", "it ends inside its head", fields={"section.program.size": 0}),
    BadFile("program version", "has op table version 2, this build reads version 1", UNSUPPORTED,
            {"program.ops_version": 2}),
    BadFile("vocabulary 0", "vocabulary size is 0, not 1 to 16777216", fields={"program.vocabulary_size": 0}),
    BadFile("context", "context limit is 16777217, not", fields={"program.context_limit": (1 << 24) + 1}),
    BadFile("state format", "default state format is 4, not 1 to 3", fields={"program.state_format": 4}),
    BadFile("values 0", "value count is 0, not 1 to 4096", fields={"program.value_count": 0}),
    BadFile("values many", "it ends inside its values", fields={"program.value_count": 4096}),
    BadFile("states huge", "state count is 4097, not 0 to 4096", fields={"program.state_count": 4097}),
    BadFile("states many", "it ends inside its states", fields={"program.state_count": 4096}),
    BadFile("entries", "entry count is 2, not 1 to 1", fields={"program.entry_count": 2}),
    BadFile("ops 0", "op count is 0, not 1 to 1000000", fields={"program.op_count": 0}),
    BadFile("ops huge", "op count is 4294967295, not", fields={"program.op_count": ABSENT}),
    BadFile("ops many", "is too small for 1000000 ops",
            fields={"program.op_count": 1000000, "entry.op_count": 1000000}),
    BadFile("ops more", "it ends inside its ops",
            fields={"program.op_count": OP_COUNT + 1, "entry.op_count": OP_COUNT + 1}),
    BadFile("ops fewer", "bytes are left behind its last op",
            fields={"program.op_count": OP_COUNT - 1, "entry.op_count": OP_COUNT - 1}),
    BadFile("words", "word count 3 needs 12", fields={"program.word_count": 3}),
    BadFile("program left", "bytes are left for its ops", edit=resize("program", lambda b: b + bytes(4))),
    BadFile("value kind", "value 1 'normed': kind is 4, not 1 to 3", fields={"value.1.kind": 4}),
    BadFile("value width", "value 1 'normed': width is 0, not 1 to 16777216", fields={"value.1.width": 0}),
    BadFile("routing width", "'routing': width is 257, not 1 to 256", fields={f"value.{value('routing')}.width": 257}),
    BadFile("extent", "value 1 'normed': extent is 1, not 0 to 0", fields={"value.1.extent": 1}),
    BadFile("routing extent", "'routing': extent is 0, not 1 to", fields={f"value.{value('routing')}.extent": 0}),
    BadFile("value name", "value 1: its name is not text padded with zeros", edit=text_at("value.1.name", b"\xff")),
    BadFile("value padding", "value 1: its name is not text padded", fields={"value.1.name_end": BIG}),
    BadFile("state kind", "state 0: kind is 2, not 1 to 1", fields={"state.0.kind": 2}),
    BadFile("state heads", "state 1: kv_heads is 0, not 1 to 65536", fields={"state.1.kv_heads": 0}),
    BadFile("state key", "state 1: key_dim is 65537, not", fields={"state.1.key_dim": 65537}),
    BadFile("state value", "state 1: value_dim is 0, not", fields={"state.1.value_dim": 0}),
    BadFile("state layer", "state 1: layer is 65536, not", fields={"state.1.layer": 65536}),
    BadFile("entry name", "its entry is not named 'main'", UNSUPPORTED, edit=text_at("entry.name", b"mainly")),
    BadFile("entry start", f"has {OP_COUNT} ops from op 1, not all", fields={"entry.first_op": 1}),
    BadFile("entry ops", "has 1 ops from op 0, not all", fields={"entry.op_count": 1}),
    BadFile("outputs", "entry 'main' has 2 outputs", UNSUPPORTED, {"entry.output_count": 2}),
    BadFile("output name", "is not named 'logits'", UNSUPPORTED, edit=text_at("entry.output_name", b"hidden")),
    BadFile("cut in entry", "it ends inside its entries",
            fields={"section.program.size": 36 + 32 * VALUES + 2 * 20 + 10}),
    BadFile("cut in output", "it ends inside its outputs",
            fields={"section.program.size": 36 + 32 * VALUES + 2 * 20 + 50}),
    BadFile("output value", "output 'logits' is value 99, there are", fields={"entry.output_value": 99}),
    BadFile("output kind", "is a value of kind tokens, not outputs", fields={"entry.output_value": value("q")}),
    BadFile("output width", "has width 32, the vocabulary size is 24", fields={"entry.output_value": value("last")}),
    BadFile("unknown op", "op 2: number 99 is not known", UNSUPPORTED, {"op.2.number": 99}),
    BadFile("op number 0", "op 2: number 0 is not known", UNSUPPORTED, {"op.2.number": 0}),
    BadFile("op layer", "op 2 (rms_norm): layer 65536 is not below", fields={"op.2.layer": 65536}),
    BadFile("falling", "an op before has layer 1, layers must not fall", fields={f"{numbered('add', 4)}.layer": 0}),
    BadFile("value index", "y is value 99, there are", fields={f"{EMBED}.y": 99}),
    BadFile("value of kind", "y is a value of kind outputs, not tokens", fields={f"{EMBED}.y": value("last")}),
    BadFile("value routing", "x is a value of kind routing, not tokens or outputs",
            fields={f"{NORM}.x": value("routing")}),
    BadFile("mixed kinds", "the operands before it of kind outputs", fields={f"{NORM}.y": value("last")}),
    BadFile("unwritten", "x (value 9 'mixed') is read before it is written", fields={f"{NORM}.x": value("mixed")}),
    BadFile("tensor index", f"table is tensor 99, there are {TENSORS}", fields={f"{EMBED}.table": 99}),
    BadFile("weight absent", "weight is tensor 4294967295, there", fields={f"{MATMUL}.weight": ABSENT}),
    BadFile("bias index", f"bias is tensor {TENSORS}, there", fields={f"{MATMUL}.bias": TENSORS}),
    BadFile("set index", "set is expert set 2, there are 2", fields={f"{MIX}.set": 2}),
    BadFile("state index", "cache is state 2, there are 2", fields={f"{ATTENTION}.cache": 2}),
    BadFile("state twice", "cache is state 0, which an op before uses",
            fields={f"{numbered('attention', 1)}.cache": 0}),
    BadFile("embed rows", "table 'embed' has 24 rows, the vocabulary size is 25",
            fields={"program.vocabulary_size": 25}),
    BadFile("matmul rows layout", "a matrix must be tiled", fields={f"{MATMUL}.weight": get(f"{EMBED}.table")}),
    BadFile("norm no vector", "is not a vector (1 row", fields={f"{NORM}.weight": get(f"{MATMUL}.weight")}),
    BadFile("bias no vector", "bias 'embed' is not a vector", fields={f"{MATMUL}.bias": get(f"{EMBED}.table")}),
    BadFile("frequencies no vector", "is not a vector", fields={f"{TABLE}.inverse_frequencies": get(f"{EMBED}.table")}),
]  # fmt: skip


def add_state(content: bytes) -> bytes:
    at = 36 + 32 * VALUES + 2 * 20
    state = struct.pack("<5I", 1, 1, 1, 1, 0)
    return content[:20] + struct.pack("<I", 3) + content[24:at] + state + content[at:]


def add_value(content: bytes) -> bytes:
    at = 36 + 32 * VALUES
    extra = struct.pack("<3I20s", 2, 24, 0, b"other")
    return content[:16] + struct.pack("<I", VALUES + 1) + content[20:at] + extra + content[at:]


def unwritten_logits(content: bytes) -> bytes:
    content = add_value(content)
    at = 36 + 32 * (VALUES + 1) + 2 * 20 + 76
    return content[:at] + struct.pack("<I", VALUES) + content[at + 4 :]


RULES = [
    BadFile("unused state", "state 2 is used by no op", edit=resize("program", add_state)),
    BadFile("logits unwritten", "output 'logits' is never written", edit=resize("program", unwritten_logits)),
    rule("embed", "y", value("q") + 1, "width(y) == cols(table)"),
    rule("rms_norm", "epsilon", NAN, "epsilon is not finite"),
    rule("rms_norm", "epsilon", float_bits(-1), "epsilon >= 0"),
    rule("rms_norm", "y", value("k"), "width(y) == width(x)"),
    rule("rms_norm", "group", 0, "group >= 1"),
    rule("rms_norm", "group", 7, "width(x) % group == 0"),
    rule("rms_norm", "group", 16, "cols(weight) == group"),
    rule("matmul", "y", value("normed"), "y and x must be different values"),
    rule("matmul", "y", value("k"), "width(y) == rows(weight)"),
    rule("matmul", "x", value("rope"), "width(x) == cols(weight)"),
    rule("matmul", "bias", get(f"{TABLE}.inverse_frequencies"), "cols(bias) == rows(weight)"),
    rule("rope_table", "scale", INFINITY, "scale is not finite"),
    rule("rope_table", "table", value("q"), "width(table) == 2 * cols(inverse_frequencies)"),
    rule("rope", "y", value("rope"), "y and table must be different values"),
    rule("rope", "pairing", 3, "pairing is not a known pairing"),
    rule("rope", "y", value("k"), "width(y) == width(x)"),
    rule("rope", "head_dim", 0, "head_dim >= 1"),
    rule("rope", "head_dim", 5, "width(x) % head_dim == 0"),
    rule("rope", "head_dim", 8, "width(table) <= head_dim"),
    rule("clamp", "low", NAN, "low is not finite"),
    rule("clamp", "high", INFINITY, "high is not finite"),
    rule("clamp", "y", value("q"), "width(y) == width(x)"),
    rule("clamp", "low", float_bits(9), "low <= high"),
    rule("attention", "y", value("q"), "y and q must be different values"),
    rule("attention", "y", value("k"), "y and k must be different values"),
    rule("attention", "y", value("v"), "y and v must be different values"),
    rule("attention", "scale", NAN, "scale is not finite"),
    rule("attention", "scale", 0, "scale > 0"),
    rule("attention", "heads", 0, "heads >= 1"),
    rule("attention", "heads", 3, "width(q) == heads * key_dim(cache)"),
    rule("attention", "k", value("hidden"), "width(k) == kv_heads(cache) * key_dim(cache)"),
    rule("attention", "v", value("hidden"), "width(v) == kv_heads(cache) * value_dim(cache)"),
    rule("attention", "y", value("gate"), "width(y) == heads * value_dim(cache)"),
    BadFile("attention kv heads", "heads % kv_heads(cache) == 0", fields={"state.0.kv_heads": 3}),
    rule("route", "normalise", 2, "normalise is not a known flag"),
    rule("route", "scale", NAN, "scale is not finite"),
    rule("route", "logits", value("hidden"), "extent(routing) == width(logits)"),
    BadFile("route width", "width(routing) <= width(logits)", fields={f"value.{value('routing')}.width": 4}),
    rule("experts", "y", value("normed"), "y and x must be different values"),
    rule("experts", "activation", 2, "activation is not a known activation"),
    rule("experts", "x", value("k"), "width(x) == expert_width(set)"),
    rule("experts", "y", value("k"), "width(y) == expert_width(set)"),
    rule("gated_activation", "activation", 0, "activation is not a known activation"),
    rule("gated_activation", "gate", value("q"), "width(y) == width(gate)"),
    rule("gated_activation", "up", value("q"), "width(y) == width(up)"),
    rule("add", "y", value("k"), "width(y) == width(a)"),
    rule("add", "b", value("k"), "width(y) == width(b)"),
    rule("sigmoid_gate", "gate", value("mixed"), "y and gate must be different values"),
    rule("sigmoid_gate", "x", value("k"), "width(y) == width(x)"),
    rule("sigmoid_gate", "gate", value("k"), "width(gate) == 1"),
    rule("gather_outputs", "x", value("k"), "width(y) == width(x)"),
]

BAD_FILES = [*HEADER, *SECTIONS, *DIRECTORIES, *NAMES, *PROGRAM, *RULES]
