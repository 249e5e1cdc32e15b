"""Opens a source checkpoint and offers its tensors by name, read lazily and upcast exactly to float32."""

from colibri.checkpoint.checkpoint import Checkpoint, TensorInfo
from colibri.checkpoint.folder import open_checkpoint
from colibri.checkpoint.gguf import GgufCheckpoint

__all__ = ["Checkpoint", "GgufCheckpoint", "TensorInfo", "open_checkpoint"]
