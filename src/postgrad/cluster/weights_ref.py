"""Weights that stay in Ray's object store."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from postgrad.cluster.wire import decode


class WeightsRef(Mapping[str, Tensor]):
    """A reference to encoded weights. Engines get the reference; reading an item fetches them."""

    def __init__(self, ray: Any, reference: Any) -> None:
        self.ray = ray
        self.reference = reference
        self._weights: dict[str, Tensor] | None = None

    def _fetch(self) -> dict[str, Tensor]:
        if self._weights is None:
            self._weights = decode(self.ray.get(self.reference))
        assert self._weights is not None
        return self._weights

    def __getitem__(self, name: str) -> Tensor:
        return self._fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch())

    def __len__(self) -> int:
        return len(self._fetch())
