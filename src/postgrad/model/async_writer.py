"""Writing while the run goes on: what is to be written lies in host memory already, and a thread puts it on the disk."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from postgrad.errors import RunError
from postgrad.files import fsync_path
from postgrad.model.load import save_weights
from postgrad.model.loaded import Loaded
from postgrad.model.lora import save_adapter


@dataclass
class WeightsFile:
    """A stock Hugging Face folder of these weights."""

    loaded: Loaded
    weights: dict[str, Tensor]
    place: Path

    def write(self) -> None:
        save_weights(self.loaded, self.weights, self.place)


@dataclass
class TensorsFile:
    """One file of tensors."""

    tensors: dict[str, Tensor]
    place: Path

    def write(self) -> None:
        self.place.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, self.place)


@dataclass
class AdapterFile:
    """An adapter in peft's format."""

    loaded: Loaded
    weights: dict[str, Tensor]
    place: Path

    def write(self) -> None:
        save_adapter(self.loaded.model, self.place, self.weights)


File = WeightsFile | TensorsFile | AdapterFile


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that no later step changes."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


class AsyncWriter:
    """Writes one checkpoint's files at a time."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def start(self, files: Sequence[File]) -> None:
        """Begin; what was begun before must be done."""
        self.done(wait=True)
        self.thread = threading.Thread(target=self._write, args=(list(files),), daemon=True)
        self.thread.start()

    def done(self, wait: bool) -> bool:
        """Whether nothing is being written any more. Raises RunError with what stopped it."""
        if self.thread is not None:
            self.thread.join(None if wait else 0.0)
            if self.thread.is_alive():
                return False
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise RunError(f"writing it failed: {text}") from error
        return True

    def _write(self, files: list[File]) -> None:
        try:
            with torch.no_grad():
                while files:
                    place = files[0].place
                    files.pop(0).write()  # its memory goes as soon as it is on the disk
                    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
                        fsync_path(path)
        except Exception as error:  # raised again by done(), where somebody listens
            self.error = error
