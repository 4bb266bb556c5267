"""An engine whose rows go on decoding from call to call, while its weights change.

It is the engine's side of rollout.stream; training/stream.py is the driver's. A row that is not
finished when new weights arrive goes on with them. The keys and values of its earlier tokens are
kept, and the recorded log-probs are those it was sampled with, so importance weights are exact.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from postgrad.config.schema import RolloutConfig
from postgrad.errors import Unsupported
from postgrad.rollout.engine import Completion, Engine, Request, Sampling, make_sampling
from postgrad.rollout.streams import StreamingEngine, UpdatableStream

POLL_S = 0.1  # time of one poll; new weights wait at most this long


class ContinuousEngine:
    """Decodes groups of responses in polls and records which weights sampled each token.

    Raises:
        ConfigError: the engine cannot change its weights between two tokens.
    """

    shares_weights = False  # the trainer changes its own at other times

    def __init__(self, engine: Engine, rollout: RolloutConfig, poll_s: float = POLL_S) -> None:
        self.engine = engine
        self.poll_s = poll_s
        sampling = make_sampling(rollout)
        self.sampling = replace(sampling, record_kept=sampling.filters)
        self.stream = _open_stream(engine, self.sampling, rollout)
        self.version = 0
        # The trainer's version of the weights by the stream's; of the newest the next poll tells.
        self.versions = {self.stream.refresh_weights(): 0}
        self.published: list[int] = []
        self.unfinished: dict[str, set[int]] = {}  # the indices of rows, by group

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return completions outside of the stream.

        Its rows wait meanwhile, or decode beside these in the same pages.
        """
        return self.engine.generate(requests, sampling)

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Load new weights; the next poll tells their version.

        `generate` may decode the stream's rows before that poll.
        """
        self.engine.publish(weights)
        self.published.append(self.stream.refresh_weights())

    def poll(
        self, version: int, names: Sequence[str], added: Mapping[str, Request]
    ) -> dict[str, list[Any]]:
        """Decode for a while. Groups that are not in `names` are canceled.

        Args:
            version: of the weights that the engine has.
            names: all groups that are wanted.
            added: the requests of the new ones among them.

        Returns:
            `finished`: rows as [name, index, completion]. `missing`: the names of groups that were
            not added to this engine; an engine that was restarted has none.
        """
        self._set_version(version)
        wanted = set(names)
        self._cancel([name for name in self.unfinished if name not in wanted])
        for name, request in added.items():
            keys = [(name, index) for index in range(len(request.seeds))]
            self.stream.add(request, keys)
            self.unfinished[name] = set(range(len(keys)))
        missing = [name for name in names if name not in self.unfinished]
        return {"finished": self._decode(), "missing": missing}

    def _set_version(self, version: int) -> None:
        if version != self.version and not self.published:  # the weights were changed in place
            self.published.append(self.stream.refresh_weights())
        self.versions |= dict.fromkeys(self.published, version)
        self.published.clear()
        self.version = version

    def _cancel(self, names: Sequence[str]) -> None:
        keys = [(name, index) for name in names for index in self.unfinished.pop(name)]
        if keys:
            self.stream.cancel(keys)

    def _decode(self) -> list[list[Any]]:
        """Return the rows that end within `poll_s` seconds, or until none is left."""
        finished: list[list[Any]] = []
        deadline = time.monotonic() + self.poll_s
        while self.stream.busy:
            for (name, index), completion in self.stream.poll():
                self.stream.forget((name, index))
                if index in self.unfinished.get(name, ()):  # it was not canceled
                    finished.append([name, index, self._finish(name, index, completion)])
            if time.monotonic() >= deadline:
                break
        return finished

    def _finish(self, name: str, index: int, completion: Completion) -> Completion:
        """Return a completion with the trainer's versions of the weights."""
        self.unfinished[name].remove(index)
        if not self.unfinished[name]:
            del self.unfinished[name]
        versions = [self.versions[version] for version in completion.versions or ()]
        return replace(completion, versions=versions)


def _open_stream(engine: Engine, sampling: Sampling, rollout: RolloutConfig) -> UpdatableStream:
    """Return the engine's stream. Raises ConfigError if its weights cannot change."""
    stream: Any = None
    if isinstance(engine, StreamingEngine):
        stream = engine.open_stream(sampling, rollout.max_rows or 256)
    if not isinstance(stream, UpdatableStream):
        raise Unsupported(
            f"rollout.stream=true: rollout.engine={rollout.engine} cannot change its weights "
            "between two tokens of this model with these sampling settings; "
            "use rollout.stream=false"
        )
    return stream.__enter__()  # type: ignore[return-value]
