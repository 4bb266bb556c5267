"""AdamW whose moments and float32 masters live in host memory; the weights stay on the model's device.

On a CUDA device the state travels through the device in slices: while one slice is updated, the next one is on its way up and the
one before on its way down, so that a step costs one crossing of the bus instead of the two of swapping the whole state in and out,
and the device holds three slices of state instead of all of it. The host memory is page-locked. On a CPU the state is where it is
needed already, and a step is torch's own. The arithmetic is torch.optim.AdamW's (its plain, one-tensor-at-a-time form) on every
device, so offloading never changes a bit of the result.
"""

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from postgrad.errors import ConfigError, RunError
from postgrad.model.device import device_module, lock_pages, supports_state_streaming, unlock_pages

SLICE_ELEMENTS = 1 << 22  # elements that travel together: 16 MiB of each moment
NUM_SLOTS = 3  # slices on the device at once: one going up, one being updated, one going down

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW for parameters on the CPU or a CUDA device, in any floating type; state is float32 in host memory.

    `state[p]` holds `step`, `exp_avg`, `exp_avg_sq` and, unless the parameter itself is float32, `master`. Parameters without a
    gradient are left alone: no decay, no state. Gradients may be float32 while the parameter is not (`p.grad_dtype = None`).
    When step() returns the state can be read.

    Raises: ConfigError for parameters that cannot be streamed; RunError when the host cannot lock the memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._shelves: list[_Shelf] = []
        for p in self._params():
            if (
                not (p.device.type == "cpu" or supports_state_streaming(p.device))
                or not p.is_contiguous()
                or not p.is_floating_point()
            ):
                raise ConfigError(
                    f"adamw_offloaded wants contiguous floating-point weights on a CPU or a CUDA device, not {p.dtype} on "
                    f"{p.device.type}; use optimizer.kind=adamw"
                )

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient. Returns what `closure` returns, if there is one."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        groups = {
            p: group for group in self.param_groups for p in group["params"] if p.grad is not None
        }
        for p, group in groups.items():
            if p not in self.state:
                self.state[p] = self._new_state(p, {})
            self.state[p]["step"] += 1
            if p.device.type == "cpu":
                _step_on_host(group, p, self.state[p])
        for shelf in self._shelves:
            shelf.step(groups, self.state)
        return result

    def _new_state(self, p: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Room for the state of one parameter, filled with what was saved; a master starts as the parameter, moments as 0."""
        if p.device.type == "cpu":
            names = MOMENTS if p.dtype == torch.float32 else (MASTER, *MOMENTS)
            tensors = {name: torch.empty_like(p, dtype=torch.float32) for name in names}
        else:
            tensors = self._shelf_of(p).tensors(p)
        for name, tensor in tensors.items():
            if name in saved or name == MASTER:
                tensor.copy_(saved.get(name, p))
            else:
                tensor.zero_()
        return {"step": torch.tensor(float(saved.get("step", 0.0))), **tensors}

    def _shelf_of(self, p: Tensor) -> "_Shelf":
        for shelf in self._shelves:
            if p in shelf.starts:
                return shelf
        shelved = {q for shelf in self._shelves for q in shelf.starts}
        kind = (p.device, p.dtype == torch.float32)
        new = [
            q
            for q in self._params()
            if q not in shelved and (q.device, q.dtype == torch.float32) == kind
        ]
        shelf = _Shelf(new)
        _lock_pages(shelf, shelf.host)
        self._shelves.append(shelf)
        return shelf

    @torch.no_grad()
    def restore(self, p: Tensor, tensors: dict[str, Tensor]) -> None:
        """Take over saved state of one parameter; without a `master` the parameter's own value is taken."""
        self.state[p] = self._new_state(p, tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict(). The base class would cast the state to the type and the device of the parameters."""
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, p in zip(keys, self._params(), strict=True):
            if key in state_dict["state"]:
                self.restore(p, state_dict["state"][key])


def _step_on_host(group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
    master = state.get(MASTER, p)
    if p.grad is not None:
        _update(group, master, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
    if master is not p:
        p.copy_(master)


def _update(
    group: dict[str, Any],
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
) -> None:
    """torch's AdamW in place on a parameter, or on a slice of one. `step` counts this update already."""
    beta1, beta2 = group["betas"]
    adamw(
        [master],
        [grad.float()],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step - 1],  # torch counts up itself, and would once for each slice
        foreach=False,
        fused=False,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


class _Slice(NamedTuple):
    """Columns `start` to `stop` of a shelf; `shares`: (parameter, from, to), which flat elements of which parameters they hold."""

    start: int
    stop: int
    shares: list[tuple[Tensor, int, int]]


class _Slot:
    """Room for one slice on the device, and the events that pass it from the way up to the update and to the way down."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.rows = torch.empty(rows, size, device=device)
        event = device_module(device).Event
        self.filled, self.updated, self.drained = event(), event(), event()


class _Shelf:
    """The state of many parameters of one CUDA device in one block of page-locked host memory.

    Each row of `host` (master where there is one, exp_avg, exp_avg_sq) holds all parameters one after the other.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.names = MOMENTS if params[0].dtype == torch.float32 else (MASTER, *MOMENTS)
        self.starts: dict[Tensor, int] = {}
        self.size = 0
        for p in params:
            self.starts[p] = self.size
            self.size += p.numel()
        self.slices = [
            self._slice(start, min(start + SLICE_ELEMENTS, self.size))
            for start in range(0, self.size, SLICE_ELEMENTS)
        ]
        self.device = params[0].device
        self.host = _whole_pages(len(self.names), self.size)

    def tensors(self, p: Tensor) -> dict[str, Tensor]:
        """The state of one parameter, in the parameter's shape."""
        start = self.starts[p]
        return {
            name: row[start : start + p.numel()].view_as(p)
            for name, row in zip(self.names, self.host, strict=True)
        }

    def _slice(self, start: int, stop: int) -> "_Slice":
        spans = [
            (p, max(start, at) - at, min(stop, at + p.numel()) - at)
            for p, at in self.starts.items()
        ]
        return _Slice(start, stop, [(p, begin, end) for p, begin, end in spans if begin < end])

    def step(
        self, groups: dict[Tensor, dict[str, Any]], states: dict[Tensor, dict[str, Tensor]]
    ) -> None:
        """Update the parameters of this shelf that are in `groups`; ends when the state is back in host memory."""
        slices = [part for part in self.slices if any(p in groups for p, _, _ in part.shares)]
        if not slices:
            return
        streams = device_module(self.device)
        with streams.device(self.device):
            slots = [
                _Slot(len(self.names), min(SLICE_ELEMENTS, self.size), self.device)
                for _ in range(NUM_SLOTS)
            ]
            current, up, down = streams.current_stream(), streams.Stream(), streams.Stream()
            up.wait_stream(current)
            for number, part in enumerate(slices):
                slot, size = slots[number % NUM_SLOTS], part.stop - part.start
                with streams.stream(up):
                    if number >= NUM_SLOTS:
                        up.wait_event(slot.drained)
                    for row, host in zip(slot.rows, self.host, strict=True):
                        row[:size].copy_(host[part.start : part.stop], non_blocking=True)
                    slot.filled.record(up)
                current.wait_event(slot.filled)
                self._update(part, slot.rows, groups, states)
                slot.updated.record(current)
                with streams.stream(down):
                    down.wait_event(slot.updated)
                    for row, host in zip(slot.rows, self.host, strict=True):
                        host[part.start : part.stop].copy_(row[:size], non_blocking=True)
                    slot.drained.record(down)
            down.synchronize()

    def _update(
        self,
        part: _Slice,
        rows: Tensor,
        groups: dict[Tensor, dict[str, Any]],
        states: dict[Tensor, dict[str, Tensor]],
    ) -> None:
        for p, begin, end in part.shares:
            if p not in groups or p.grad is None:
                continue
            at = self.starts[p] + begin - part.start
            room = rows[:, at : at + end - begin]
            weights, grad = p.view(-1)[begin:end], p.grad.reshape(-1)[begin:end]
            master = room[0] if MASTER in self.names else weights
            _update(groups[p], master, grad, room[-2], room[-1], states[p]["step"])
            if master is not weights:
                weights.copy_(master)


def _whole_pages(rows: int, columns: int) -> Tensor:
    """(rows, columns) float32 zeros in memory pages of their own, so that they can be locked."""
    pages = mmap.mmap(-1, max(4 * rows * columns, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(
        pages, dtype=torch.uint8
    ).zero_()  # on all threads: locking large pages that exist is 6 times faster
    return block[: 4 * rows * columns].view(torch.float32).view(rows, columns)


def _lock_pages(owner: object, host: Tensor) -> None:
    """Page-lock `host` for as long as `owner` lives. (torch would round pinned memory up to a power of two.)"""
    if not host.numel():
        return
    code = lock_pages(host.data_ptr(), host.nbytes)
    if code != 0:
        raise RunError(
            f"{host.nbytes / 2**30:.1f} GiB of host memory for the optimizer's state cannot be page-locked (CUDA error {code}); "
            "use optimizer.kind=adamw, or a machine with more memory"
        )
    weakref.finalize(owner, unlock_pages(), host.data_ptr()).atexit = False
