"""Text generation: forward, draw, decode, until a stop."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from colibri.errors import ContextLengthError, UsageError
from colibri.runtime.sampling import Sample, SamplingOptions
from colibri.tokenizer import StopStrings, StreamingDetokenizer, Tokenizer

if TYPE_CHECKING:
    from colibri.runtime.engine import Engine
    from colibri.runtime.session import Session


@dataclass(frozen=True)
class Usage:
    """Tokens of the prompt and of the reply (the end-of-text token counts, as in the OpenAI API)."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model file says about sampling."""

    values: Mapping[str, Any]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> GenerationDefaults:
        """Take the fields that SamplingOptions has; do_sample=false means greedy."""
        stored = settings.get("generation") or {}
        names = {field.name for field in fields(SamplingOptions)} - {"seed", "top_logprobs"}
        values = {name: stored[name] for name in names if stored.get(name) is not None}
        if stored.get("do_sample") is False:
            values["temperature"] = 0.0
        return cls(values)

    def sampling(self, given: Mapping[str, Any]) -> SamplingOptions:
        """SamplingOptions from arguments over these defaults; UsageError names an unknown argument."""
        names = {field.name for field in fields(SamplingOptions)}
        unknown = sorted(set(given) - names)
        if unknown:
            raise UsageError(f"unknown argument {unknown[0]!r}; sampling takes {', '.join(sorted(names))}")
        return SamplingOptions(**{**self.values, **{k: v for k, v in given.items() if v is not None}})


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


class Generation:
    """An iterator over pieces of generated text, computed as they are taken; made by `Engine.generate`.

    After the last piece: `text`, `tokens` (ids, the end-of-text token left out), `samples`
    (with log-probabilities), `finish_reason` and `usage`. A session of its own is closed at the end, on
    an error and by `close`; one that was given stays open.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        options: SamplingOptions,
        max_tokens: int | None,
        stop: Sequence[str],
        context: int | None,
        session: Session | None = None,
    ):
        if not len(prompt):
            raise UsageError("the prompt is empty: give at least one token of text")
        if session is not None and session.engine is not engine:
            raise UsageError("the session belongs to another engine; generate with the one that opened it")
        if session is not None and context is not None:
            raise UsageError("generate takes either a session or a context, as a session has its own")
        tokenizer = engine.tokenizer  # raises when there is none
        self.finish_reason: Literal["stop", "length"] | None = None
        self.text = ""
        self.tokens: list[int] = []
        self.samples: list[Sample] = []
        self._prompt = list(prompt)
        self._completion_tokens = 0
        stops = StopStrings(stop)
        context = session.context if session is not None else engine.context_of(context)
        if len(self._prompt) >= context:
            raise ContextLengthError(
                f"the prompt has {len(self._prompt)} tokens and the context holds {context}, "
                "one of which the reply needs: shorten the prompt or raise the context"
            )
        self._pieces = self._run(engine, tokenizer, context, session, options, max_tokens, stops)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating and free the session."""
        self._pieces.close()

    @property
    def usage(self) -> Usage:
        return Usage(len(self._prompt), self._completion_tokens)

    def _run(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        context: int,
        given: Session | None,
        options: SamplingOptions,
        max_tokens: int | None,
        stops: StopStrings,
    ) -> Generator[str, None, None]:
        detokenizer = StreamingDetokenizer(tokenizer)
        ends = tokenizer.stop_token_ids
        history = list(self._prompt)
        with nullcontext(given) if given is not None else engine.session(context) as session:
            # The state of the tokens shared with what the session already holds is kept.
            shared = _common_prefix(session.tokens, self._prompt[:-1])
            if shared < session.position:
                session.truncate(shared)
            pending = self._prompt[shared:]
            while self.finish_reason is None:
                logits = session.forward(pending, last_only=True)[0]
                sample = engine.sampler.sample(logits, options, history, len(self._prompt), session.position)
                self._completion_tokens += 1
                if sample.token in ends:
                    self.finish_reason = "stop"
                    break
                self.samples.append(sample)
                self.tokens.append(sample.token)
                history.append(sample.token)
                pending = [sample.token]
                piece, stopped = stops.push(detokenizer.push(sample.token))
                if stopped:
                    self.finish_reason = "stop"
                elif self._completion_tokens == max_tokens or session.position >= session.context:
                    self.finish_reason = "length"
                if piece:
                    self.text += piece
                    yield piece
                if stopped:
                    return
            # What was held back for an unfinished character or a possible stop string.
            piece, stopped = stops.push(detokenizer.finish())
            rest = piece if stopped else piece + stops.finish()
            if stops.stopped:
                self.finish_reason = "stop"
            if rest:
                self.text += rest
                yield rest
