"""The commands and their options.

Each gives back what is to be done as a function, which imports its module when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from colibri.cli.engine_options import Command, EngineOptions, Threads, with_engine_options
from colibri.cli.engine_options import option as _option

app = typer.Typer(
    name="colibri",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Model = Annotated[Path, typer.Argument(metavar="MODEL.cbi", help="a model file made by `colibri convert`")]
Context = Annotated[
    int | None, _option("N", "positions for prompt and reply [default: the model's limit, at most 4096]", min=1)
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Temperature = Annotated[
    float | None, _option("X", "0 takes the most likely token [default: the model's, else 1]", min=0)
]
TopK = Annotated[
    int | None, _option("N", "choose among the N most likely tokens; 0 is off [default: the model's, else 0]", min=0)
]
TopP = Annotated[
    float | None,
    _option("X", "choose among the likeliest tokens that add up to X [default: the model's, else 1]", min=0, max=1),
]
MinP = Annotated[
    float | None,
    _option("X", "leave out tokens below X times the likeliest [default: the model's, else 0]", min=0, max=1),
]
Seed = Annotated[int, _option("N", "the same seed gives the same text, on every machine", min=0)]


def _version(wanted: bool) -> None:
    if wanted:
        import colibri

        typer.echo(f"colibri {colibri.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models on small machines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="a Hugging Face folder or a GGUF file")],
    output: Annotated[Path, typer.Argument(metavar="OUT.cbi", help="the file to write")],
    weights: Annotated[
        str | None,
        _option("FORMAT", "q8, q4, bf16, f16, f32, or keep: as stored [default: keep for GGUF, q8 for a folder]"),
    ] = None,
    threads: Threads = None,
) -> Command:
    """Convert a checkpoint into one .cbi file."""

    def call() -> None:
        from colibri.cli.files import convert_command

        convert_command(source, output, weights, threads)

    return call


@app.command()
@with_engine_options
def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL.cbi] PROMPT",
            help="the text to continue, - to read it from standard input; without MODEL.cbi the demo model runs",
        ),
    ] = None,
    prompt_file: Annotated[Path | None, _option("FILE", "read the prompt from a file")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask the prompt as a user message")] = False,
    max_tokens: Annotated[int, _option("N", "tokens to generate at most", min=1)] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, _option("TEXT", "end before this text; may be repeated")] = None,
    context: Context = None,
    json: Json = False,
    statistics: Annotated[bool, typer.Option("--statistics", help="print what was computed, on stderr")] = False,
    *,
    engine: EngineOptions,
) -> Command:
    """Continue a text, or answer a question with --chat."""
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}

    def call() -> None:
        from colibri.cli.generate import run_command

        run_command(
            arguments or [],
            prompt_file=prompt_file,
            chat=chat,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop or [],
            context=context,
            options=engine,
            as_json=json,
            statistics=statistics,
        )

    return call


@app.command()
@with_engine_options
def chat(
    model: Annotated[
        Path | None, typer.Argument(metavar="[MODEL.cbi]", help="a model file [default: the demo model]")
    ] = None,
    max_tokens: Annotated[int, _option("N", "tokens of one answer at most", min=1)] = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    context: Context = None,
    *,
    engine: EngineOptions,
) -> Command:
    """Talk to a model. Ctrl-C stops the answer, Ctrl-D ends the program."""
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}

    def call() -> None:
        from colibri.cli.chat import chat_command

        chat_command(model, max_tokens, sampling, context, engine)

    return call


@app.command()
def inspect(
    model: Model,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor and expert set")] = False,
    program: Annotated[bool, typer.Option("--program", help="list the program")] = False,
) -> Command:
    """Show what is in a model file."""

    def call() -> None:
        from colibri.cli.files import inspect_command

        inspect_command(model, json, tensors, program)

    return call


@app.command()
def validate(model: Model) -> Command:
    """Check a model file: every checksum, the program and all references."""

    def call() -> None:
        from colibri.cli.files import validate_command

        validate_command(model)

    return call


@app.command()
@with_engine_options
def plan(
    model: Model,
    context: Context = None,
    batch: Annotated[int, _option("N", "sessions of that context to keep memory for", min=1)] = 1,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure this machine again")] = False,
    json: Json = False,
    *,
    engine: EngineOptions,
) -> Command:
    """Show where a model's memory would go, and how fast it would be, without loading it."""

    def call() -> None:
        from colibri.cli.plan import plan_command

        plan_command(model, context, batch, engine, refresh, json)

    return call


@app.command()
@with_engine_options
def perplexity(
    model: Model,
    text: Annotated[Path, _option("FILE", "a UTF-8 text file")],
    context: Annotated[int | None, _option("N", "tokens of a window [default: 256]", min=2)] = None,
    json: Json = False,
    *,
    engine: EngineOptions,
) -> Command:
    """Measure how well a model predicts a text."""

    def call() -> None:
        from colibri.cli.measure import perplexity_command

        perplexity_command(model, text, context, engine, json)

    return call


@app.command()
@with_engine_options
def bench(
    model: Model,
    prompt: Annotated[int, _option("N", "prompt tokens of each sequence", min=1)] = 256,
    generate: Annotated[int, _option("N", "decode steps", min=1)] = 48,
    batch: Annotated[int, _option("N", "sequences decoded together", min=1)] = 1,
    repeat: Annotated[int, _option("N", "repetitions; medians are printed", min=1)] = 3,
    topic: Annotated[int | None, _option("K", "draw the tokens from block K of 16 of the ids", min=0, max=15)] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="print the time by layer and op, for prompts and for decoding")
    ] = False,
    json: Json = False,
    *,
    engine: EngineOptions,
) -> Command:
    """Measure prompt and decode speed on random tokens."""

    def call() -> None:
        from colibri.cli.measure import bench_command

        bench_command(
            model,
            prompt=prompt,
            generate=generate,
            batch=batch,
            repeat=repeat,
            topic=topic,
            profile=profile,
            options=engine,
            as_json=json,
        )

    return call
