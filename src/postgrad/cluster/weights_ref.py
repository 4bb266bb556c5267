"""Weights that stay in Ray's object store, in parts: no process needs all of them at once."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from postgrad.cluster.wire import decode, encode
from postgrad.errors import RunError

MAX_PART_BYTES = 256 << 20  # a part has at least one tensor, which may be larger

Part = tuple[list[str], Any]  # names of tensors, and the reference of the encoded tensors


class WeightsRef(Mapping[str, Tensor]):
    """References to encoded weights. Engines get the references.

    Reading an item fetches its part, and drops the part that was read before. The parts have the
    order of the model's parameters, so a reader in that order fetches each part once.
    """

    def __init__(self, ray: Any, parts: list[Part]) -> None:
        self.ray = ray
        self.parts = parts
        self._part_of = {name: index for index, (names, _) in enumerate(parts) for name in names}
        self._fetched = -1  # index of the part in `_tensors`
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        index = self._part_of[name]
        if index != self._fetched:
            self._tensors = {}
            self._tensors = decode(self._fetch(self.parts[index][1]))
            self._fetched = index
        return self._tensors[name]

    def _fetch(self, reference: Any) -> bytes:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise RunError(
                f"weights were lost with the worker that sent them ({type(error).__name__}); "
                "the same command continues the run"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)

    def __or__(self, changed: Mapping[str, Tensor]) -> "WeightsRef":
        """Return weights with other values of some tensors; only their parts are fetched."""
        parts: list[Part] = []
        for names, reference in self.parts:
            if any(name in changed for name in names):
                tensors = {name: changed[name] if name in changed else self[name] for name in names}
                reference = self.ray.put(encode(tensors))
            parts.append((names, reference))
        return WeightsRef(self.ray, parts)


def store_weights(ray: Any, weights: Iterable[tuple[str, Tensor]]) -> list[Part]:
    """Put weights into the object store; returns the parts. At most one part is held here."""
    parts: list[Part] = []
    tensors: dict[str, Tensor] = {}
    num_bytes = 0

    def store() -> None:
        if tensors:
            parts.append((list(tensors), ray.put(encode(tensors))))
            tensors.clear()

    for name, tensor in weights:
        if num_bytes + tensor.nbytes > MAX_PART_BYTES:
            store()
            num_bytes = 0
        tensors[name] = tensor
        num_bytes += tensor.nbytes
    store()
    return parts
