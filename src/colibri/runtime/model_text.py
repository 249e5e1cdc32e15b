"""What a model file holds besides weights: tokenizer, chat template, settings."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from colibri.cbi.reader import CbiFile
from colibri.errors import TokenizerError
from colibri.runtime.arguments import whole_number
from colibri.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096


class ModelText:
    """The texts and limits of a `.cbi` file; made by `read`."""

    def __init__(self, file: CbiFile) -> None:
        self.path = file.path
        self.metadata: dict[str, Any] = file.metadata
        self.settings: dict[str, Any] = file.settings
        self.context_limit = file.program.context_limit
        self.vocabulary_size = file.program.vocabulary_size
        self.digest: bytes = file.digest
        self.expert_counts = tuple(len(one.experts) for one in file.expert_sets)
        self.has_tokenizer = file.tokenizer_json is not None
        self._tokenizer_json = file.tokenizer_json
        self._chat_template = file.chat_template

    @classmethod
    def read(cls, path: Path) -> ModelText:
        """Raises ModelFileError naming the file and the field."""
        with CbiFile.open(path) as file:
            return cls(file)

    def context_of(self, context: int | None) -> int:
        """Check a wanted context; None gives the model's limit, at most 4096."""
        return whole_number("context", context, 1, self.context_limit) or min(self.context_limit, DEFAULT_CONTEXT)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made when first used; TokenizerError when there is none, or it is damaged."""
        if not self.has_tokenizer:
            raise TokenizerError(
                f"{self.path} has no tokenizer, so it can neither read nor write text; "
                "convert it from a folder with tokenizer.json, or use Engine.session with token ids"
            )
        return Tokenizer.from_parts(
            self._tokenizer_json or b"", self.settings.get("tokenizer", {}), chat_template=self._chat_template
        )

    def load_tokenizer(self) -> None:
        """Make the tokenizer now, if there is one, and keep its source no longer; an error waits for its first use."""
        if self.has_tokenizer:
            try:
                _ = self.tokenizer
            except TokenizerError:
                return
            self._tokenizer_json = None
