#!/usr/bin/env python3
"""Record which experts each layer of a model asks for, pass by pass, for bench/cache_replay.py.

A trace is a number of segments. Each starts a new session, computes `--prompt` tokens in one pass and
then `--decode` tokens one by one; the segments take their tokens from the sources in turn. A source is a
text (`--text`, told by the model's tokenizer) or random ids of one of 16 blocks of the vocabulary
(`--topic`, as in `colibri bench --topic`); without sources the ids are drawn from all of them.

    record_routes.py MODEL.cbi TRACE.npz [--text FILE]... [--topic K]... [--prompt P] [--decode D] [--segments N]

`--defaults` instead of a model and a trace writes the traces that the project keeps, bench/traces/*.npz:
the demo model on its held-out texts, and random models of real shapes (bench/make_model.py) given with
`--shape NAME=MODEL.cbi`.

The trace holds: used, packed bits [passes, layers * experts] of the experts that a pass computed; tokens
[passes]; expert_bytes [layers * experts], the size of each record; layers, experts.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np

import colibri
from colibri.cbi.reader import CbiFile
from colibri.cli.generate import read_text
from colibri.runtime.engine import demo_model_path

HERE = pathlib.Path(__file__).resolve().parent
TRACES = HERE / "traces"
TOPICS = 16  # blocks of ids whose tokens prefer the same experts in models of make_model.py


def random_tokens(engine: colibri.Engine, topic: int | None, seed: int) -> Iterator[int]:
    vocabulary = engine.vocabulary_size
    low, high = (0, vocabulary) if topic is None else (vocabulary * topic // TOPICS, vocabulary * (topic + 1) // TOPICS)
    random = np.random.default_rng(seed)
    while True:
        yield int(random.integers(low, high))


def text_tokens(engine: colibri.Engine, path: pathlib.Path) -> Iterator[int]:
    return cycle(engine.tokenizer.encode(read_text(path, "the text")))


def counts_of(engine: colibri.Engine) -> np.ndarray:
    """Tokens that each expert computed so far, int64 [layers, experts]."""
    sets = engine.statistics().expert_sets
    widths = {one.expert_count for one in sets}
    if len(widths) != 1:
        raise SystemExit(f"{engine.path}: layers have {sorted(widths)} experts; a trace needs the same number in all")
    return np.array([one.tokens_per_expert for one in sets], np.int64)


def record(
    engine: colibri.Engine, sources: Sequence[Iterator[int]], prompt: int, decode: int, segments: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run the segments; returns (used bool [passes, layers * experts], tokens [passes])."""
    used: list[np.ndarray] = []
    tokens: list[int] = []
    before = counts_of(engine)
    with engine.session(prompt + decode) as session:
        for source in islice(cycle(sources), segments):
            session.truncate(0)
            for size in ([prompt] if prompt else []) + [1] * decode:
                session.forward(list(islice(source, size)), last_only=True)
                after = counts_of(engine)
                used.append((after > before).ravel())
                tokens.append(size)
                before = after
    return np.array(used), np.array(tokens, np.uint32)


def save(path: pathlib.Path, model: pathlib.Path, used: np.ndarray, tokens: np.ndarray) -> None:
    with CbiFile.open(model) as file:
        sizes = [[expert.size for expert in one.experts] for one in file.expert_sets]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        used=np.packbits(used, axis=1),
        tokens=tokens,
        expert_bytes=np.array(sizes, np.uint32).ravel(),
        layers=len(sizes),
        experts=len(sizes[0]),
    )
    print(f"{path.name}: {len(tokens)} passes, {tokens.sum()} tokens, {used.sum()} requests")


def record_defaults(shapes: dict[str, pathlib.Path]) -> None:
    texts = sorted((HERE.parent / "demo" / "heldout").glob("*.txt"))
    model = demo_model_path()
    with colibri.Engine(model) as engine:
        plans = {text.stem: ([text], 0, 400, 3) for text in texts}
        plans |= {"switch": (texts, 0, 200, 10), "chat": (texts, 200, 100, 10)}
        for name, (chosen, *size) in plans.items():
            sources = [text_tokens(engine, text) for text in chosen]
            save(TRACES / f"demo-{name}.npz", model, *record(engine, sources, *size))
    topics = (3, 7, 12)
    plans = {"uniform": ((None,), 0, 200, 2), "topic": (topics[:1], 0, 200, 2)}
    plans |= {"switch": (topics, 0, 100, 6), "chat": (topics, 128, 50, 6)}
    for shape, model in shapes.items():
        with colibri.Engine(model) as engine:
            for name, (chosen, *size) in plans.items():
                sources = [random_tokens(engine, topic, topic or 0) for topic in chosen]
                save(TRACES / f"{shape}-{name}.npz", model, *record(engine, sources, *size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=pathlib.Path)
    parser.add_argument("trace", nargs="?", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, action="append", default=[])
    parser.add_argument("--topic", type=int, action="append", choices=range(TOPICS), default=[])
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a segment's prompt, computed in one pass")
    parser.add_argument("--decode", type=int, default=256, help="tokens of a segment computed one by one")
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--defaults", action="store_true", help="write the traces that the project keeps")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=MODEL.cbi")
    arguments = parser.parse_args()
    if arguments.defaults:
        record_defaults({name: pathlib.Path(path) for name, path in (one.split("=", 1) for one in arguments.shape)})
        return
    if not arguments.model or not arguments.trace:
        parser.error("give MODEL.cbi and TRACE.npz, or --defaults")
    with colibri.Engine(arguments.model) as engine:
        sources = [text_tokens(engine, text) for text in arguments.text]
        sources += [random_tokens(engine, topic, topic) for topic in arguments.topic]
        sources = sources or [random_tokens(engine, None, 0)]
        traced = record(engine, sources, arguments.prompt, arguments.decode, arguments.segments)
    save(arguments.trace, arguments.model, *traced)


if __name__ == "__main__":
    main()
