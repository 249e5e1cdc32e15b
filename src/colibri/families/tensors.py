"""Finds the tensors of a model in a checkpoint, and accounts for every one that is there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from colibri.checkpoint import Checkpoint
from colibri.errors import CheckpointError
from colibri.families.plan import ExpertSources, FusedSource, LastExpert, Source, TensorSource

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Buffers that old files hold and every implementation computes itself.
_HARMLESS = re.compile(r"(?:^|\.)rotary_emb\.inv_freq$")
_LISTED = 10


class ModelTensors:
    """Hands out sources by checkpoint name, checks shapes, and remembers what was used and what was missing.

    Shapes that differ from the configuration raise CheckpointError at once; missing and unused tensors are reported
    together by `finish`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config_name
        self._names = set(checkpoint.names())
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._gate_up, self._down = LastExpert(checkpoint), LastExpert(checkpoint)

    def has(self, name: str) -> bool:
        """Say whether the checkpoint has this tensor."""
        return name in self._names

    def ignore(self, name: str) -> None:
        """Count a tensor as used."""
        self._used.add(name)

    def matrix(self, name: str, rows: int, cols: int, meaning: str) -> Source:
        """Return the source of a matrix [rows, cols]; `meaning` says where in config.json the shape comes from."""
        self._check(name, (rows, cols), meaning)
        return TensorSource(self._checkpoint, name, rows, cols)

    def vector(self, name: str, size: int, meaning: str) -> Source:
        """Return the source of a vector [size], as one row."""
        self._check(name, (size,), meaning)
        return TensorSource(self._checkpoint, name, 1, size)

    def experts(
        self, prefix: str, part_names: tuple[str, str, str], count: int, width: int, ffn: int
    ) -> tuple[ExpertSources, ...]:
        """Return the experts under `prefix` ("....experts."), stored one by one or fused.

        part_names are the names of gate, up and down of single experts: {prefix}{expert}.{part}.weight. The fused
        form is {prefix}gate_up_proj [count, 2 ffn, width], gate first, and {prefix}down_proj [count, width, ffn].
        """
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        if self.has(gate_up) or self.has(down):
            self._check(gate_up, (count, 2 * ffn, width), "experts, 2 x expert width, hidden_size")
            self._check(down, (count, width, ffn), "experts, hidden_size, expert width")
            return tuple(
                ExpertSources(
                    FusedSource(self._gate_up, gate_up, expert, 0, ffn, width),
                    FusedSource(self._gate_up, gate_up, expert, ffn, ffn, width),
                    FusedSource(self._down, down, expert, 0, width, ffn),
                )
                for expert in range(count)
            )
        gate, up, down = part_names
        into, out_of = "expert width by hidden_size", "hidden_size by expert width"
        return tuple(
            ExpertSources(
                self.matrix(f"{prefix}{expert}.{gate}.weight", ffn, width, into),
                self.matrix(f"{prefix}{expert}.{up}.weight", ffn, width, into),
                self.matrix(f"{prefix}{expert}.{down}.weight", width, ffn, out_of),
            )
            for expert in range(count)
        )

    def finish(self, layer_count: int) -> list[str]:
        """Return notes on tensors that were skipped: those of layers that config.json does not count.

        Raises CheckpointError listing up to ten tensors that are missing, or that nothing used.
        """
        if self._missing:
            missing = [self._checkpoint.label(name) for name in self._missing]
            raise CheckpointError(
                f"{self._checkpoint.path} lacks {_counted(missing)} that {self._config} asks for: {_listed(missing)}."
            )
        extra, unused = [], []
        for name in sorted(self._names - self._used):
            layer = _LAYER.search(name)
            if layer and int(layer.group(1)) >= layer_count:
                extra.append(name)
            elif not _HARMLESS.search(name):
                unused.append(name)
        if unused:
            unused = [self._checkpoint.label(name) for name in unused]
            raise CheckpointError(
                f"{self._checkpoint.path} has {_counted(unused)} that this family does not use: {_listed(unused)}; "
                f"remove them, or check that {self._config} belongs to these weights."
            )
        if extra:
            return [f"Skipped {_counted(extra)} of layers from {layer_count} on, which the model does not run."]
        return []

    def _check(self, name: str, shape: Sequence[int], meaning: str) -> None:
        if name not in self._names:
            self._missing.append(name)
            return
        self._used.add(name)
        info = self._checkpoint.info(name)
        if tuple(info.shape) != tuple(shape):
            raise CheckpointError(
                f"{info.file}: tensor {self._checkpoint.label(name)} has shape {list(info.shape)}, but {self._config} "
                f"gives {list(shape)} ({meaning})."
            )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} tensor" + ("" if len(names) == 1 else "s")
