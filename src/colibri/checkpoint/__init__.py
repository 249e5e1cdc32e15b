"""Opens a source checkpoint and offers its tensors by name, read lazily and upcast exactly to float32."""

from colibri.checkpoint.checkpoint import Checkpoint, TensorInfo
from colibri.checkpoint.folder import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
