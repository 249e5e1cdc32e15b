"""What commands write to standard output."""

from __future__ import annotations

import json
from typing import Any

from colibri.errors import ColibriError


def write(text: str, end: str = "\n") -> None:
    """Write to standard output at once; ColibriError when it takes no more."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise ColibriError("standard output was closed by its reader; the rest is not written") from None
    except OSError as error:
        raise ColibriError(f"cannot write to standard output: {error.strerror}; redirect it elsewhere") from None


def write_json(value: Any) -> None:
    """Write one JSON object on one line."""
    write(json.dumps(value, ensure_ascii=False))
