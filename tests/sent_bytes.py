"""Counts the bytes that ranks send to each other."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Names of the same collectives in torch before 2.12.
FORMER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


class SentBytes:
    """Counts what this rank sends while it is entered, by wrapping torch.distributed's functions.

    Bytes follow from the sizes of the tensors: an all-gather or a reduce-scatter of n bytes over k
    ranks sends n (k-1)/k, an all-reduce twice that, an all-to-all what goes to other ranks.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._wrapped: dict[str, Any] = {}

    def __enter__(self) -> "SentBytes":
        self._wrap("all_gather_single", lambda own, size: own.nbytes * (size - 1))
        self._wrap("all_gather", lambda own, size: own.nbytes * (size - 1))
        self._wrap("reduce_scatter_single", lambda own, size: own.nbytes * (size - 1) / size)
        self._wrap("all_reduce", lambda own, size: 2 * own.nbytes * (size - 1) / size)
        self._wrap_exchange()
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._wrapped.items():
            setattr(dist, name, function)

    def _wrap(self, name: str, count: Callable[[Any, int], float]) -> None:
        name = name if hasattr(dist, name) else FORMER_NAMES[name]
        function = self._wrapped[name] = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args, kwargs.get("input_tensor"), kwargs.get("input")]
            own = [tensor for tensor in tensors if isinstance(tensor, Tensor)][-1]
            self.total += count(own, dist.get_world_size(kwargs.get("group")))
            return function(*args, **kwargs)

        setattr(dist, name, counted)

    def _wrap_exchange(self) -> None:
        function = self._wrapped["all_to_all_single"] = dist.all_to_all_single

        def counted(
            result: Tensor, own: Tensor, received: list[int], sent: list[int], group: Any
        ) -> Any:
            kept = sent[dist.get_rank(group)]
            self.total += own.nbytes * (1 - kept / max(1, sum(sent)))
            return function(result, own, received, sent, group=group)

        dist.all_to_all_single = counted
