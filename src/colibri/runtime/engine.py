"""Engine: a loaded model."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from colibri.cbi.reader import CbiFile
from colibri.errors import ColibriError, TemplateError, TokenizerError, UsageError
from colibri.runtime.backend import STATE_FORMATS, Backend, ForwardItem, Statistics
from colibri.runtime.generation import Generation, GenerationDefaults
from colibri.runtime.interruptible import run_interruptible
from colibri.runtime.native_backend import NativeBackend
from colibri.runtime.sampling import Sampler, SamplingOptions
from colibri.runtime.session import Session, token_array
from colibri.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096


def demo_model_path() -> Path:
    """The model shipped in the package."""
    return Path(__file__).resolve().parent.parent / "data" / "demo.cbi"


class Engine:
    """A model from a `.cbi` file; without a path, the demo model.

    threads: processors to use; None counts affinity, cgroup quota and physical cores.
    kv: format of the attention state, "f32", "f16" or "q8"; None takes the file's default.
    max_batch_tokens: tokens computed together (more are done in several passes); memory
        grows with it, the results do not change.
    pin: keep each thread on a processor of its own (the calling thread while it computes). Two processes that may
        use the same processors would take the same ones, so give each a mask of its own first (taskset).
        UsageError when there are more threads than processors.
    Environment: COLIBRI_CPU=scalar|avx2|avxvnni|avx512|amx|neon|i8mm forces a kernel set,
    COLIBRI_VM=reference runs the NumPy definition of the ops instead of the core.
    Raises ModelFileError, UsageError, OutOfMemoryError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int | None = None,
        kv: str | None = None,
        max_batch_tokens: int | None = None,
        pin: bool = False,
    ):
        threads = _whole("threads", threads, 1, 1024)
        max_batch_tokens = _whole("max_batch_tokens", max_batch_tokens, 1, 4096)
        if kv is not None and kv not in STATE_FORMATS:
            raise UsageError(f"kv must be one of {', '.join(STATE_FORMATS)}, not {kv!r}")
        self.path = Path(path) if path is not None else demo_model_path()
        with CbiFile.open(self.path) as file:
            self.metadata: dict[str, Any] = file.metadata
            self._settings = file.settings
            self._tokenizer_json = file.tokenizer_json
            self._chat_template = file.chat_template
        self._state_format = STATE_FORMATS[kv] if kv else 0
        self._sessions: WeakSet[Session] = WeakSet()
        self._lock = threading.Lock()
        self.backend: Backend = _open_backend(self.path, threads, max_batch_tokens, pin)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def vocabulary_size(self) -> int:
        """Rows of the output layer: the width of the logits."""
        return self.backend.vocabulary_size

    @property
    def context_limit(self) -> int:
        """Positions the model was made for."""
        return self.backend.context_limit

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; TokenizerError when the file has none."""
        if self._tokenizer_json is None:
            raise TokenizerError(
                f"{self.path} has no tokenizer, so it can neither read nor write text; "
                "convert it from a folder with tokenizer.json, or use Engine.session with token ids"
            )
        return Tokenizer.from_parts(
            self._tokenizer_json, self._settings.get("tokenizer", {}), chat_template=self._chat_template
        )

    @cached_property
    def sampler(self) -> Sampler:
        """Draws tokens; ids without a token never win."""
        allowed = None if self._tokenizer_json is None else self.tokenizer.valid_token_mask(self.vocabulary_size)
        return Sampler(self.vocabulary_size, allowed)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """Stop tokens and sampling defaults stored with the model."""
        return GenerationDefaults.from_settings(self._settings)

    def session(self, context: int | None = None) -> Session:
        """Open a timeline of `context` positions (default: the model's limit, at most 4096).

        Raises UsageError beyond the model's limit, OutOfMemoryError.
        """
        session = Session(self, self.backend.open_session(self.context_of(context), self._state_format))
        with self._lock:
            self._sessions.add(session)
        return session

    def context_of(self, context: int | None) -> int:
        """Check a wanted context; None gives the default that `session` uses."""
        return _whole("context", context, 1, self.context_limit) or min(self.context_limit, DEFAULT_CONTEXT)

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
        max_tokens = _whole("max_tokens", max_tokens, 1, 2**31)
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
        self.backend.close()

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


def _whole(name: str, value: int | None, low: int, high: int) -> int:
    """Check an optional whole number; None becomes 0."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, not {value!r}")
    return value


def _open_backend(path: Path, threads: int, max_batch_tokens: int, pin: bool) -> Backend:
    vm = os.environ.get("COLIBRI_VM", "native") or "native"
    if vm == "native":
        cpu = os.environ.get("COLIBRI_CPU", "")
        try:
            return NativeBackend(path, threads, cpu, max_batch_tokens, pin)
        except UsageError as error:
            raise UsageError(f"COLIBRI_CPU={cpu}: {error}" if f"'{cpu}'" in str(error) else str(error)) from None
    if vm == "reference":
        if pin:
            raise UsageError("COLIBRI_VM=reference runs on one thread and pins none; leave pin out")
        from colibri.runtime.reference_backend import ReferenceBackend

        return ReferenceBackend(path)
    raise UsageError(f"COLIBRI_VM must be native or reference, not {vm!r}")
