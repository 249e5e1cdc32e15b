"""JSON as untrusted input: one object, UTF-8, no key twice, bounded size, and every failure named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from colibri.checkpoint.reading import open_regular_file, read_exactly
from colibri.errors import CheckpointError

MAXIMUM_JSON_BYTES = 100_000_000


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def quoted(text: object) -> str:
    """Return `text` for a message: on one line, escaped, and short even when a hostile file made it long."""
    if isinstance(text, str) and len(text) > 100:
        return repr(text[:100])[:400] + "..."
    written = repr(text) if isinstance(text, str | int | float | None) else f"a {type(text).__name__}"
    return written if len(written) <= 400 else written[:400] + "..."


def first_names(names: list[str], limit: int = 10) -> str:
    """Return the first `limit` names, quoted and separated by commas, with a mark when more follow."""
    return ", ".join(quoted(name) for name in names[:limit]) + (", ..." if len(names) > limit else "")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def parse_object(raw: bytes, path: Path, what: str) -> dict[str, Any]:
    """Parse one JSON object.

    `path` and `what` ("header", "file") name the source in errors.
    Raises CheckpointError when the text is not UTF-8, not JSON, not an object or repeats a key.
    """
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the {what} is not UTF-8 text at byte {error.start}.") from error
    except _DuplicateKeyError as error:
        raise CheckpointError(f"{path}: the {what} has the key {quoted(error.key)} twice; keep one of them.") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: the {what} is not valid JSON at character {error.pos}: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits and thousands of nested brackets are the two other ways to fail.
        raise CheckpointError(
            f"{path}: the {what} is not usable JSON (a number too long or nesting too deep)."
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: the {what} is not a JSON object.")
    return parsed


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raises CheckpointError naming the file."""
    descriptor, status = open_regular_file(path)
    try:
        if status.st_size > MAXIMUM_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAXIMUM_JSON_BYTES} bytes; it cannot be such a file.")
        raw = read_exactly(descriptor, 0, status.st_size, path)
    finally:
        os.close(descriptor)
    return parse_object(raw.tobytes(), path, "file")
