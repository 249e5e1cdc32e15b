"""The commands and their options. What they do is in the module beside, imported when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional  # noqa: UP035 - typer reads the annotations at run time

import typer

app = typer.Typer(
    name="colibri",
    help="Run Mixture-of-Experts language models on small machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[Path, typer.Argument(metavar="MODEL.cbi", help="a model file made by `colibri convert`")]
Threads = Annotated[Optional[int], typer.Option(min=1, help="processors to use [default: what this process may use]")]
Context = Annotated[Optional[int], typer.Option(min=1, help="positions [default: the model's limit, at most 4096]")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Temperature = Annotated[Optional[float], typer.Option(help="0 takes the most likely token [default: the model's]")]
TopK = Annotated[Optional[int], typer.Option(help="keep the K most likely tokens; 0 keeps all [default: the model's]")]
TopP = Annotated[Optional[float], typer.Option(help="keep the most likely tokens up to this sum [default: the model's]")]
MinP = Annotated[Optional[float], typer.Option(help="drop tokens below this part of the largest probability")]
Seed = Annotated[int, typer.Option(min=0, help="the same seed gives the same text, on every machine")]


def _version(wanted: bool) -> None:
    if wanted:
        import colibri

        typer.echo(f"colibri {colibri.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models on small machines."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="a Hugging Face folder")],
    output: Annotated[Path, typer.Argument(metavar="OUT.cbi", help="the file to write")],
    weights: Annotated[str, typer.Option(help="q8, q4, bf16, f16 or f32")] = "q8",
    threads: Threads = None,
) -> None:
    """Convert a checkpoint into one .cbi file."""
    from colibri.cli.files import convert_command

    convert_command(source, output, weights, threads)


@app.command()
def run(
    arguments: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[MODEL.cbi] PROMPT", help="the text to continue; - reads it from standard input"),
    ] = None,
    prompt_file: Annotated[Optional[Path], typer.Option(help="read the prompt from a file")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="ask the prompt as a user message")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens to generate at most")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    stop: Annotated[Optional[list[str]], typer.Option(help="end at this text; may be repeated")] = None,
    threads: Threads = None,
    context: Context = None,
    json: Json = False,
    statistics: Annotated[bool, typer.Option("--statistics", help="print what was computed, on stderr")] = False,
) -> None:
    """Continue a text, or answer a question with --chat. Without MODEL.cbi: the demo model."""
    from colibri.cli.generate import run_command

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    run_command(
        arguments or [],
        prompt_file=prompt_file,
        chat=chat,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop or [],
        threads=threads,
        context=context,
        as_json=json,
        statistics=statistics,
    )


@app.command()
def chat(
    model: Annotated[Optional[Path], typer.Argument(metavar="[MODEL.cbi]", help="[default: the demo model]")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of one answer at most")] = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    threads: Threads = None,
    context: Context = None,
) -> None:
    """Talk to a model. Ctrl-C stops the answer, Ctrl-D ends the program."""
    from colibri.cli.chat import chat_command

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    chat_command(model, max_tokens, sampling, threads, context)


@app.command()
def inspect(
    model: Model,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor and expert set")] = False,
    program: Annotated[bool, typer.Option("--program", help="list the program")] = False,
) -> None:
    """Show what is in a model file."""
    from colibri.cli.files import inspect_command

    inspect_command(model, json, tensors, program)


@app.command()
def validate(model: Model) -> None:
    """Check every checksum and digest, the program and all references of a model file."""
    from colibri.cli.files import validate_command

    validate_command(model)


@app.command()
def perplexity(
    model: Model,
    text: Annotated[Path, typer.Option(help="a UTF-8 text file")],
    context: Annotated[Optional[int], typer.Option(min=2, help="tokens of a window [default: 256]")] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text: exp of the mean negative log-probability."""
    from colibri.cli.measure import perplexity_command

    perplexity_command(model, text, context, threads, json)


@app.command()
def bench(
    model: Model,
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens of each sequence")] = 256,
    generate: Annotated[int, typer.Option(min=1, help="decode steps")] = 48,
    batch: Annotated[int, typer.Option(min=1, help="sequences decoded together")] = 1,
    threads: Threads = None,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions; medians are printed")] = 3,
    topic: Annotated[
        Optional[int], typer.Option(min=0, max=15, help="draw the tokens from one of 16 blocks of ids")
    ] = None,
    json: Json = False,
) -> None:
    """Measure prompt and decode speed on random tokens (a fixed seed)."""
    from colibri.cli.measure import bench_command

    bench_command(model, prompt, generate, batch, threads, repeat, topic, json)
