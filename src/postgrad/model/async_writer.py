"""Writes checkpoints in a thread while training continues.

The tensors are copied to host memory first, so later steps do not change what is written.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import RunError
from postgrad.files import fsync_path
from postgrad.model.checkpoint_parts import ModelFiles
from postgrad.model.load import save_weights
from postgrad.model.loaded import Loaded
from postgrad.model.lora import save_adapter


@dataclass
class WeightsFile:
    """A stock Hugging Face folder of these weights."""

    loaded: Loaded
    weights: dict[str, Tensor]
    path: Path

    def write(self) -> None:
        save_weights(self.loaded, self.weights, self.path)


@dataclass
class TensorsFile:
    """One safetensors file."""

    tensors: dict[str, Tensor]
    path: Path
    metadata: dict[str, str] | None = None

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, self.path, self.metadata)


@dataclass
class AdapterFile:
    """An adapter folder in peft's format."""

    loaded: Loaded
    weights: dict[str, Tensor]
    path: Path

    def write(self) -> None:
        save_adapter(self.loaded.model, self.path, self.weights)


File = WeightsFile | TensorsFile | AdapterFile | ModelFiles


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory that no later step changes."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


@torch.no_grad()
def write_files(files: list[File]) -> None:
    """Write the files, remove them from the list, and wait until the disk has them."""
    while files:
        path = files[0].path
        files.pop(0).write()  # its memory is freed as soon as it is on disk
        for written in sorted(path.rglob("*")) if path.is_dir() else [path]:
            fsync_path(written)


class AsyncWriter:
    """Writes the files of one checkpoint at a time."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, files: Sequence[File]) -> None:
        """Start writing; waits for an earlier call's files first."""
        self.done(wait=True)
        self.thread = threading.Thread(target=self._write, args=(list(files),), daemon=True)
        self.thread.start()

    def done(self, wait: bool) -> bool:
        """Return whether everything is written. Raises RunError if the writing failed."""
        if self.thread is not None:
            self.thread.join(None if wait else 0.0)
            if self.thread.is_alive():
                return False
            self.thread = None
        if self.error is not None:
            error = self.error
            self.error = None
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror
            raise RunError(f"writing failed: {reason}") from error
        return True

    def _write(self, files: list[File]) -> None:
        try:
            write_files(files)
        except Exception as error:  # done() raises it in the caller's thread
            self.error = error
