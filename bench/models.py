"""Makes the models of a benchmark once: GGUF, Hugging Face folder, and the .cbi files converted from them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER_SHAPES = ("tiny", "b1")
"""Shapes whose Hugging Face folder (float32) is of a bearable size."""


@dataclass(frozen=True)
class Models:
    """The files of one shape in one folder. Everything is made on first use, under a temporary name."""

    shape: str
    folder: Path

    def gguf(self) -> Path:
        """Q4_0 weights, embedding and head too; router and norms float32."""
        self._make()
        return self.folder / f"{self.shape}.gguf"

    def checkpoint(self) -> Path | None:
        """The Hugging Face folder with the values of the GGUF file in float32, or None."""
        if self.shape not in FOLDER_SHAPES:
            return None
        self._make()
        return self.folder / self.shape

    def cbi(self, weights: str) -> Path:
        """`keep`: the blocks of the GGUF file bit for bit; anything else: the folder with these `--weights`."""
        source = self.gguf() if weights == "keep" else self.checkpoint()
        if source is None:
            raise ValueError(f"shape {self.shape} has no Hugging Face folder to convert from")
        path = self.folder / f"{self.shape}-{weights}.cbi"
        if not path.exists():
            command = [sys.executable, "-m", "colibri", "convert", str(source), str(path), "--weights", weights]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return path

    def _make(self) -> None:
        gguf, checkpoint = self.folder / f"{self.shape}.gguf", self.folder / self.shape
        both = self.shape in FOLDER_SHAPES
        if gguf.exists() and (checkpoint.exists() or not both):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial_gguf, partial = self.folder / f"{self.shape}.gguf.partial", self.folder / f"{self.shape}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, str(HERE / "make_model.py"), "--shape", self.shape, "--gguf", str(partial_gguf)]
        if both:
            command += ["--hf", str(partial)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        shutil.rmtree(checkpoint, ignore_errors=True)
        if both:
            partial.rename(checkpoint)
        partial_gguf.rename(gguf)
