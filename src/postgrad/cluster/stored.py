"""Weights and large tensors in Ray's object store: the driver passes references between workers.

Weights are stored in parts, so that no process needs all of them at once.

A column that workers made, such as the log-probs of a reference, stays in the object store of the
first rank's node. The driver's batch has a StoredTensor in its place, and later calls send the
reference. The driver gets the numbers only if a stage, or the file of rollouts, reads them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from postgrad.cluster.wire import decode, encode
from postgrad.errors import RunError

MIN_BYTES = 1 << 16  # smaller tensors are part of the message
KEPT_CALLS = 8  # a tensor that so many calls did not send is no longer kept
MAX_PART_BYTES = 256 << 20  # a part has at least one tensor, which may be larger
Part = tuple[list[str], Any]  # names of tensors, and the reference of the encoded tensors

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "requires_grad")
_WITHOUT_NUMBERS = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_WITHOUT_NUMBERS |= {Tensor.__len__, Tensor.size, Tensor.dim, Tensor.numel}


class StoredTensor(Tensor):
    """A tensor whose numbers are fetched when something other than its shape or type is read."""

    reference: Any
    fetch: Callable[[], Tensor]

    @staticmethod
    def make(
        shape: list[int], dtype: torch.dtype, reference: Any, fetch: Callable[[], Tensor]
    ) -> "StoredTensor":
        stored: Any = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            StoredTensor, shape, dtype=dtype
        )
        stored.reference = reference
        stored.fetch = fetch
        stored.numbers = None
        return stored

    def read(self) -> Tensor:
        """Return the tensor itself; it is fetched once."""
        if self.numbers is None:
            self.numbers = self.fetch()
            self.reference = None  # the store need not keep it for this tensor
            del self.fetch
        return self.numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITHOUT_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_read(args), **_read(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        return func(*_read(args), **_read(kwargs or {}))


def _read(values: Any) -> Any:
    return tree_map(lambda v: v.read() if isinstance(v, StoredTensor) else v, values)


class TensorStore:
    """The driver's tensors in Ray's object store, by their content: each is sent once.

    Content and not identity decides, so a tensor that a stage changed in place is sent again.
    """

    def __init__(self, ray: Any, wait_s: float) -> None:
        self.ray = ray
        self.wait_s = wait_s
        self.num_calls = 0
        self.references: dict[bytes, tuple[int, Any]] = {}  # the last call, and the reference

    def encode_call(self, *message: Any) -> tuple[bytes, list[Any]]:
        """Return a message as bytes, and the references that its large tensors are replaced by."""
        self.num_calls += 1
        oldest = self.num_calls - KEPT_CALLS
        self.references = {k: kept for k, kept in self.references.items() if kept[0] > oldest}
        parts: list[Any] = []

        def store(value: Any) -> dict[str, Any] | None:
            reference = self._reference_of(value)
            if reference is None:
                return None
            parts.append(reference)
            return {"part": len(parts) - 1}

        return encode(list(message), store), parts

    def decode_result(self, data: bytes, references: list[Any]) -> Any:
        """Return a worker's result; its large tensors stay where they are."""

        def load(stored: dict[str, Any]) -> Tensor:
            reference = references[stored["part"]]
            dtype = getattr(torch, stored["dtype"])
            fetch = partial(self._fetch, reference)
            return StoredTensor.make(stored["shape"], dtype, reference, fetch)

        return decode(data, load)

    def _reference_of(self, value: Any) -> Any:
        """Return the reference of a large tensor; None for other values."""
        if isinstance(value, StoredTensor):
            if value.numbers is None:
                return value.reference
            value = value.numbers
        if not isinstance(value, Tensor) or value.nbytes < MIN_BYTES:
            return None
        key = _digest(value)
        _, reference = self.references.get(key, (0, None))
        if reference is None:
            reference = self.ray.put(encode(value))
        self.references[key] = (self.num_calls, reference)
        return reference

    def _fetch(self, reference: Any) -> Tensor:
        """Return the tensor of a reference, and keep the reference that the workers have."""
        if not self.ray.is_initialized():
            raise RunError("a column that the workers computed was not read before the run ended")
        tensor = fetch(self.ray, reference, "a column was", "computed it", self.wait_s)
        self.references[_digest(tensor)] = (self.num_calls, reference)
        return tensor


def decode_call(data: bytes, parts: Sequence[bytes]) -> Any:
    """Return the message of TensorStore.encode_call, on a worker."""
    return decode(data, lambda stored: decode(parts[stored["part"]]))


def encode_result(value: Any, min_bytes: float) -> tuple[bytes, list[Any]]:
    """Return a worker's result as bytes, and references to its tensors of `min_bytes` or more."""
    references: list[Any] = []

    def store(value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Tensor) or value.nbytes < min_bytes:
            return None
        import ray

        references.append(ray.put(encode(value)))
        dtype = str(value.dtype).removeprefix("torch.")
        return {"part": len(references) - 1, "shape": list(value.shape), "dtype": dtype}

    return encode(value, store), references


def _digest(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's type, shape and numbers."""
    own = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{own.dtype} {list(own.shape)}".encode(), digest_size=16)
    digest.update(own.flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def fetch(ray: Any, reference: Any, what: str, did: str, wait_s: float | None = None) -> Any:
    """Return a value of the object store. Raises RunError if its worker has died."""
    try:
        return decode(ray.get(reference, timeout=wait_s))
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{what} lost with the worker that {did} ({type(error).__name__}); "
            "the same command continues the run"
        ) from error


# ---- weights


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
            self._tensors = fetch(self.ray, self.parts[index][1], "weights were", "sent them")
            self._fetched = index
        return self._tensors[name]

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
