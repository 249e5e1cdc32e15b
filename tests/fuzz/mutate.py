"""Damages a valid .cbi file in a way that depends on the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from fuzz.image import OPS, Field, Image, find_fields

UNREPAIRED = 0.1  # share of the files whose checksums stay wrong
INTERESTING = [
    0, 1, 2, 3, 4, 7, 16, 63, 64, 65, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536, 65537, 1 << 24, (1 << 24) + 1,
    1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, 1 << 42, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 64,
    (1 << 64) - 1, 0x7FC00000, 0x7F800000, 0xBF800000,
]  # fmt: skip
# For each kind of entry its first field and its size.
ENTRIES = {"section": (".type", 64), "tensor": (".name_offset", 96), "expert": (".offset", 160), "value": (".kind", 32)}
CHECKSUMS = ("crc", "sha", "table_crc", "digest")


@dataclass(frozen=True)
class Mutation:
    data: bytes
    repaired: bool


class Mutator:
    """Mutates one file; the same seed always gives the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.original = data
        self.fields: dict[str, Field] = find_fields(data)
        groups: dict[str, list[str]] = {}
        for name in self.fields:
            if name.rsplit(".", 1)[1] not in CHECKSUMS:
                groups.setdefault(name.split(".", 1)[0], []).append(name)
        self.groups = groups

    def mutate(self, seed: int) -> Mutation:
        generator = random.Random(seed)
        image = Image(self.original, self.fields)
        actions: list[Callable[[Image, random.Random], None]] = generator.choices(
            [
                self.set_field,
                self.count,
                self.flip,
                self.duplicate,
                self.overlap,
                self.operand,
                self.swap_ops,
                self.cut,
            ],
            [8, 2, 2, 2, 3, 5, 2, 1],
            k=generator.choice([1, 1, 1, 1, 2, 3]),
        )
        for action in actions:
            action(image, generator)
        repaired = generator.random() >= UNREPAIRED
        if repaired:
            image.repair()
        return Mutation(bytes(image.data), repaired)

    def pick(self, generator: random.Random, *groups: str) -> str:
        group = generator.choice([g for g in (groups or tuple(self.groups)) if g in self.groups])
        return generator.choice(self.groups[group])

    def set_field(self, image: Image, generator: random.Random) -> None:
        name = self.pick(generator)
        value = image.get(name)
        image.set(
            name,
            generator.choice(
                [
                    generator.choice(INTERESTING),
                    value + generator.choice([-64, -1, 1, 64]),
                    value * 2,
                    value // 2,
                    value ^ 1 << generator.randrange(8 * self.fields[name].size),
                    image.get(self.pick(generator)),
                ]
            ),
        )

    def count(self, image: Image, generator: random.Random) -> None:
        """A count or size far beyond, or just beyond, what is there."""
        endings = ("count", "size", "rows", "cols", "stored", "length", "bytes", "width", "ffn")
        name = generator.choice([n for names in self.groups.values() for n in names if n.endswith(endings)])
        image.set(name, generator.choice([image.get(name) + 1, image.get(name) - 1, 1 << generator.randrange(64), -1]))

    def flip(self, image: Image, generator: random.Random) -> None:
        for _ in range(generator.choice([1, 1, 8]) if image.data else 0):
            image.data[generator.randrange(len(image.data))] ^= 1 << generator.randrange(8)

    def duplicate(self, image: Image, generator: random.Random) -> None:
        """One entry of a table written over another of its kind."""
        kind = generator.choice(list(ENTRIES))
        first, size = ENTRIES[kind]
        entries = [self.fields[n].offset for n in self.groups[kind] if n.endswith(first)]
        a, b = generator.choice(entries), generator.choice(entries)
        image.data[a : a + size] = image.data[b : b + size]

    def overlap(self, image: Image, generator: random.Random) -> None:
        """A range moved onto another, or stretched over it."""
        kind = generator.choice(["section", "tensor", "expert"])
        offsets = [n for n in self.groups[kind] if n.endswith(("offset", ".gate", ".up", ".down"))]
        a, b = generator.choice(offsets), generator.choice(offsets)
        image.set(a, image.get(b) + generator.choice([0, 0, 64, -64, image.get("header.alignment"), 1]))

    def operand(self, image: Image, generator: random.Random) -> None:
        """An operand replaced by another that often exists: the rules must notice."""
        name = generator.choice([n for n in self.groups["op"] if not n.endswith((".number", ".layer"))])
        image.set(
            name, generator.choice([generator.randrange(40), image.get(self.pick(generator, "op")), (1 << 32) - 1])
        )

    def swap_ops(self, image: Image, generator: random.Random) -> None:
        """Two ops change places, the words between them moving along."""
        starts = [self.fields[n].offset for n in self.groups["op"] if n.endswith(".number")]
        i, j = sorted(generator.sample(range(len(starts)), 2))

        def words(index: int) -> int:
            number = int.from_bytes(self.original[starts[index] : starts[index] + 4], "little")
            return 8 + 4 * len(OPS[number]["operands"])

        a, b = slice(starts[i], starts[i] + words(i)), slice(starts[j], starts[j] + words(j))
        between = image.data[a.stop : b.start]
        image.data[a.start : b.stop] = image.data[b] + between + image.data[a]

    def cut(self, image: Image, generator: random.Random) -> None:
        """The file ends early, or goes on; its header may or may not know."""
        size = len(image.data)
        if generator.random() < 0.8:
            del image.data[generator.choice([generator.randrange(size), size - generator.randrange(1, 200)]) :]
        else:
            image.data.extend(bytes(generator.choice([1, 64, 4096])))
        if len(image.data) >= 128 and generator.random() < 0.7:
            image.set("header.file_size", len(image.data))
