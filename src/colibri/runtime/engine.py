"""Engine: a loaded model."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from colibri.errors import ColibriError, TemplateError, UsageError, UsageFileWarning
from colibri.runtime.arguments import EngineArguments, whole_number
from colibri.runtime.backend import Backend, ForwardItem, Statistics
from colibri.runtime.budget import Budget
from colibri.runtime.generation import Generation, GenerationDefaults
from colibri.runtime.interruptible import run_interruptible
from colibri.runtime.model_text import ModelText
from colibri.runtime.opening import open_backend, plan_engine
from colibri.runtime.sampling import Sampler, SamplingOptions
from colibri.runtime.session import Session, token_array
from colibri.runtime.usage_file import UsageFile
from colibri.tokenizer import Tokenizer


def demo_model_path() -> Path:
    """The model shipped in the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.cbi"


class Engine:
    """A model from a `.cbi` file; without a path, the demo model.

    threads: processors to use; None counts affinity, cgroup quota and physical cores.
    kv: format of the attention state, "f32", "f16" or "q8"; None takes the file's default.
    ram: the most memory that this process may have resident at any time, interpreter included: bytes, or text such
        as "1.5GiB". None takes what is free (also in the control groups of this process), less a margin.
    context, sessions: positions of a session, and sessions, that the budget keeps memory for (default: 1 session of the
        model's limit, at most 4096). More sessions open as long as memory is left.
    max_batch_tokens: tokens computed together (more are done in several passes); memory
        grows with it, the results do not change. None lets the budget decide.
    pin: keep each thread on a processor of its own (the calling thread while it computes). Two processes that may
        use the same processors would take the same ones, so give each a mask of its own first (taskset).
        UsageError when there are more threads than processors.
    expert_cache: memory for experts, bytes or text; None takes what the rest leaves of `ram`. What does not fit is
        read from the file when a layer asks for it; what is computed stays the same.
    io_threads: threads that read experts, at most 16; None is 2.
    io: "direct" reads past the page cache of the system, "buffered" through it. "auto", where experts have to be read
        again and again, measures both when the engine opens (docs/memory.md; `statistics` has the figures).
    verify: "crc" checks the checksum of every record on every read, "full" besides its SHA-256 the first time,
        "off" nothing.
    prefetch_depth: predict the experts of so many coming layers and read them ahead, at most 8; None is 1, 0 off.
    mlock: memory for experts is locked. huge_pages: it is of "2M" or "1G" pages; "auto": of 2M where the system
        gives them; "off". MemoryBudgetWarning when the system does not allow what was asked for.
    usage_file: a file, made when there is none, that keeps how often each expert was used: those used most are read
        first when the engine opens; `close` adds this run. UsageFileWarning when it is damaged or cannot be written.
    Environment: COLIBRI_CPU=scalar|avx2|avxvnni|avx512|amx|neon|i8mm forces a kernel set,
    COLIBRI_VM=reference runs the NumPy definition of the ops instead of the core, without a budget,
    COLIBRI_DEBUG=guard makes memory without an expert inaccessible.
    Raises ModelFileError, UsageError, MemoryBudgetError when the model does not fit, OutOfMemoryError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int | None = None,
        kv: str | None = None,
        ram: str | int | None = None,
        context: int | None = None,
        sessions: int = 1,
        max_batch_tokens: int | None = None,
        pin: bool = False,
        expert_cache: str | int | None = None,
        io_threads: int | None = None,
        io: str = "auto",
        verify: str = "crc",
        prefetch_depth: int | None = None,
        mlock: bool = False,
        huge_pages: str = "auto",
        usage_file: str | os.PathLike[str] | None = None,
    ):
        arguments = EngineArguments(
            threads=threads, kv=kv, ram=ram, context=context, sessions=sessions, max_batch_tokens=max_batch_tokens,
            pin=pin, expert_cache=expert_cache, io_threads=io_threads, io=io, verify=verify,
            prefetch_depth=prefetch_depth, mlock=mlock, huge_pages=huge_pages, usage_file=usage_file,
        )  # fmt: skip
        self.path = Path(path) if path is not None else demo_model_path()
        self._text = ModelText.read(self.path)
        self.context = self._text.context_of(context)
        self._state_format = arguments.state_format
        self._sessions: WeakSet[Session] = WeakSet()
        self._lock = threading.Lock()
        self._usage_file: UsageFile | None = None
        if usage_file is not None:
            self._usage_file = UsageFile(Path(usage_file), self._text.digest, self._text.expert_counts)
            if self._usage_file.damage:
                warnings.warn(self._usage_file.damage, UsageFileWarning, stacklevel=2)
        self.backend: Backend
        self.backend, self.budget = open_backend(self._text, arguments, self._usage_file)

    @staticmethod
    def plan(path: str | os.PathLike[str] | None = None, **arguments: Any) -> Budget:
        """What `Engine(path, **arguments)` would take, and give to the experts; reads no weight.

        Raises what Engine does; UsageError with COLIBRI_VM=reference, which keeps no budget.
        """
        return plan_engine(Path(path) if path is not None else demo_model_path(), EngineArguments(**arguments))

    @property
    def metadata(self) -> dict[str, Any]:
        """Family, source, format and converter of the file."""
        return self._text.metadata

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the output layer: the width of the logits."""
        return self._text.vocabulary_size

    @property
    def context_limit(self) -> int:
        """Positions the model was made for."""
        return self._text.context_limit

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; TokenizerError when the file has none."""
        return self._text.tokenizer

    @cached_property
    def sampler(self) -> Sampler:
        """Draws tokens; ids without a token never win."""
        allowed = None if not self._text.has_tokenizer else self.tokenizer.valid_token_mask(self.vocabulary_size)
        return Sampler(self.vocabulary_size, allowed)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """Stop tokens and sampling defaults stored with the model."""
        return GenerationDefaults.from_settings(self._text.settings)

    def session(self, context: int | None = None) -> Session:
        """Open a timeline of `context` positions (default: the engine's `context`).

        Raises UsageError beyond the model's limit, OutOfMemoryError when the budget has no room for it.
        """
        session = Session(self, self.backend.open_session(self.context_of(context), self._state_format))
        with self._lock:
            self._sessions.add(session)
        return session

    def context_of(self, context: int | None) -> int:
        """Check a wanted context; None gives the engine's own."""
        return self.context if context is None else self._text.context_of(context)

    def forward_batch(
        self, items: Sequence[tuple[Session, Sequence[int] | np.ndarray]], *, last_only: bool = False
    ) -> list[np.ndarray | ColibriError]:
        """Run (session, tokens) pairs together in one native call.

        Returns, for each, logits float32 [n_i, vocabulary] (or [1, vocabulary] with last_only), or the
        exception object of an item that failed: its session keeps its position, the others are
        computed with unchanged bits.
        """
        checked: list[ForwardItem] = []
        wrong: dict[int, UsageError] = {}
        for index, (session, tokens) in enumerate(items):
            try:
                ids = token_array(tokens, self.vocabulary_size)
                if session.engine is not self:
                    raise UsageError("the session belongs to another engine; give it to the one that opened it")
            except UsageError as error:
                wrong[index] = error
                continue
            checked.append(ForwardItem(session, ids, "last" if last_only else "all"))
        ran = iter(self._run(checked))
        return [wrong[index] if index in wrong else next(ran) for index in range(len(items))]

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        context: int | None = None,
        session: Session | None = None,
        **sampling: Any,
    ) -> Generation:
        """Continue a text (or token ids), or answer `messages` through the chat template.

        Iterate over the result for pieces of text; it then has `.text`, `.finish_reason` ("stop" or
        "length") and `.usage`. Sampling arguments are the fields of SamplingOptions; those not given
        come from the model file, else temperature 1. max_tokens=None goes on to the end of the context.
        A `session` keeps its state: tokens it shares with the new prompt are not computed again.

        Raises UsageError, ContextLengthError for a prompt that does not fit, TokenizerError for a model
        without a tokenizer, TemplateError for messages that the template refuses or that there is none for.

        >>> generation = Engine().generate("In the beginning", max_tokens=8, temperature=0)
        >>> pieces = list(generation)
        >>> "".join(pieces) == generation.text, generation.finish_reason, generation.usage
        (True, 'length', Usage(prompt_tokens=4, completion_tokens=8))
        """
        options: SamplingOptions = self.generation_defaults.sampling(sampling)
        if prompt is None and messages is not None:
            tokens = self._chat_prompt(messages)
        elif prompt is None or messages is not None:
            raise UsageError("generate takes either a prompt or messages")
        elif isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = self._prompt_ids(prompt)
        max_tokens = whole_number("max_tokens", max_tokens, 1, 2**31)
        return Generation(self, tokens, options, max_tokens or None, stop, context, session)

    def _chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self.tokenizer.has_chat_template:
            raise TemplateError(f"{self.path} has no chat template; give it a plain prompt instead of messages")
        return self.tokenizer.apply_chat_template(list(messages))

    def _prompt_ids(self, prompt: Sequence[int] | np.ndarray) -> list[int]:
        ids = token_array(prompt, self.vocabulary_size).tolist() if len(prompt) else []
        missing = next((id for id in ids if self.tokenizer.token_text(id) is None), None)
        if missing is not None:
            raise UsageError(f"the prompt has token {missing}, for which the tokenizer has no text; leave it out")
        return ids

    def statistics(self) -> Statistics:
        """What was computed since the engine was opened."""
        return self.backend.statistics()

    def close(self) -> None:
        """Close the sessions and free the model; BusyError, with the model still open, while one of them is running.

        Allowed twice.
        """
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        usage_file, self._usage_file = self._usage_file, None
        try:
            used = self.statistics() if usage_file else None
            self.backend.close()
        except ColibriError:
            self._usage_file = usage_file
            raise
        if usage_file and used and used.tokens:
            try:
                usage_file.add(used.tokens, [one.tokens_per_expert for one in used.expert_sets])
            except ColibriError as error:
                warnings.warn(f"what this run used is not kept: {error}", UsageFileWarning, stacklevel=2)

    def run_one(self, item: ForwardItem) -> np.ndarray:
        """Run one item; raises its error."""
        result = self._run([item])[0]
        if isinstance(result, ColibriError):
            raise result
        return result

    def _run(self, items: list[ForwardItem]) -> list[np.ndarray | ColibriError]:
        inner = [ForwardItem(i.session.backend_session, i.tokens, i.logits, i.scores) for i in items]
        starts: list[int | None] = []
        for item in inner:
            try:
                starts.append(item.session.position)
            except UsageError:  # closed; its place in the results says so
                starts.append(None)

        def cancel() -> None:
            for item, start in zip(inner, starts, strict=True):
                if start is not None:
                    item.session.cancel()

        def undo() -> None:
            # A forward that ended before its cancel came has moved on, and the cancel waits for the next one.
            for item, start in zip(inner, starts, strict=True):
                if start is not None:
                    with suppress(ColibriError):
                        item.session.truncate(start)

        return run_interruptible(lambda: self.backend.forward_batch(inner), cancel, undo)
