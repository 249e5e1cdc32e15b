"""The options that every command takes which opens a model, defined once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

EngineOptions = Mapping[str, Any]
"""Keywords for `Engine`, and only those that were given."""

Command = Callable[[], None]
F = TypeVar("F", bound=Callable[..., Command])


def option(metavar: str, help: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, **limits)


Threads = Annotated[
    int | None, option("N", "processors to use [default: all that this process may use]", min=1, max=1024)
]
Ram = Annotated[
    str | None,
    option("SIZE", "memory of the whole process, such as 1.5GiB, 2GB or bytes [default: what is free, less a margin]"),
]
_OPTIONS: dict[str, Any] = {
    "threads": Threads,
    "pin": Annotated[
        bool,
        typer.Option("--pin", help="keep each thread on a processor of its own; for one process on these processors"),
    ],
    "ram": Ram,
    "expert_cache": Annotated[
        str | None, option("SIZE", "of it for experts [default: what the rest of the model leaves]")
    ],
    "max_batch_tokens": Annotated[
        int | None, option("N", "tokens computed together [default: by the budget]", "--max-batch", min=1, max=65536)
    ],
    "prefetch_depth": Annotated[
        int | None, option("N", "layers whose experts are read ahead; 0 is off [default: 1]", min=0, max=8)
    ],
    "io_threads": Annotated[int | None, option("N", "threads that read experts [default: 2]", min=1, max=16)],
    "io": Annotated[
        str | None,
        option(
            "MODE",
            "direct: past the page cache; buffered: through it; auto: what is faster, measured at the start "
            "[default: auto]",
        ),
    ],
    "verify": Annotated[
        str | None,
        option("MODE", "of experts read: crc: CRC32C each time; full: SHA-256 the first time too; off [default: crc]"),
    ],
    "mlock": Annotated[bool, typer.Option("--mlock", help="keep the experts' memory from being swapped out")],
    "huge_pages": Annotated[
        str | None, option("SIZE", "for experts: 2M, 1G, off or auto (2M if the system allows) [default: auto]")
    ],
    "usage_file": Annotated[
        Path | None,
        option("FILE", "keep counts of used experts in FILE, and read the most used first at the start"),
    ],
}
_DEFAULTS: dict[str, Any] = {"mlock": False, "pin": False}


def with_engine_options(command: F) -> F:
    """Give a command these options; it gets them as one mapping, its parameter `engine`."""

    def with_options(**arguments: Any) -> Command:
        given = {name: arguments.pop(name) for name in _OPTIONS}
        engine = {name: value for name, value in given.items() if value != _DEFAULTS.get(name)}
        return command(**arguments, engine=engine)

    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "engine"
    ]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_DEFAULTS.get(name))
        for name, kind in _OPTIONS.items()
    ]
    with_options.__signature__ = signature.replace(parameters=own + shared)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in own + shared}
    with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
    return with_options  # type: ignore[return-value]
