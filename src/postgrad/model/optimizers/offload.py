"""AdamW whose moments and float32 masters are in host memory; weights stay on the model's device.

On a CUDA device the state streams through the device in slices. While one slice is updated, the
next one is copied to the device and the previous one back. So a step moves the state once each way
at the same time, and the device holds three slices of state. The host memory is page-locked. On a
CPU a step is torch's own. The arithmetic is that of torch.optim.AdamW (its single-tensor form) on
every device, so offloading never changes a bit of the result.
"""

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from postgrad.errors import RunError, Unsupported
from postgrad.model.device import device_module, lock_pages, supports_state_streaming, unlock_pages

SLICE_ELEMENTS = 1 << 22  # elements per slice: 16 MiB of each moment
NUM_SLOTS = 3  # slices on the device at once: one copied in, one updated, one copied out

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW for parameters on the CPU or a CUDA device, of any floating-point type.

    The state is float32 in host memory: `state[p]` holds `step`, `exp_avg`, `exp_avg_sq` and,
    unless the parameter itself is float32, `master`. Parameters without a gradient are left alone:
    no decay, no state. Gradients may be float32 while the parameter is not
    (`p.grad_dtype = None`). The state can be read when step() has returned.

    Raises: ConfigError for parameters that cannot be streamed; RunError if the host cannot lock
    the memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._host_buffers: list[_HostBuffer] = []
        for p in self._params():
            on_supported_device = p.device.type == "cpu" or supports_state_streaming(p.device)
            if not on_supported_device or not p.is_contiguous() or not p.is_floating_point():
                raise Unsupported(
                    "optimizer.kind=adamw_offloaded needs contiguous floating-point weights on a "
                    f"CPU or a CUDA device, but a weight is {p.dtype} on {p.device.type}; use "
                    "optimizer.kind=adamw"
                )

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; return the result of `closure`, if given."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        groups: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    groups[p] = group
        for p, group in groups.items():
            if p not in self.state:
                self.state[p] = self._new_state(p, {})
            self.state[p]["step"] += 1
            if p.device.type == "cpu":
                _step_on_host(group, p, self.state[p])
        for buffer in self._host_buffers:
            buffer.step(groups, self.state)
        return result

    def _new_state(self, p: Tensor, saved: dict[str, Any]) -> dict[str, Tensor]:
        """Allocate one parameter's state and fill it with saved values.

        Without a saved value a master starts as the parameter, a moment as 0.
        """
        if p.device.type == "cpu":
            names = _state_names(p)
            tensors = {name: torch.empty_like(p, dtype=torch.float32) for name in names}
        else:
            tensors = self._buffer_of(p).tensors(p)
        for name, tensor in tensors.items():
            if name in saved or name == MASTER:
                tensor.copy_(saved.get(name, p))
            else:
                tensor.zero_()
        return {"step": torch.tensor(float(saved.get("step", 0.0))), **tensors}

    def _buffer_of(self, p: Tensor) -> "_HostBuffer":
        """Return the parameter's buffer; create one for all parameters of its kind if needed."""
        for buffer in self._host_buffers:
            if p in buffer.offsets:
                return buffer
        in_buffers = {q for buffer in self._host_buffers for q in buffer.offsets}
        new_params: list[Tensor] = []
        for q in self._params():
            same_kind = q.device == p.device and _state_names(q) == _state_names(p)
            if same_kind and q not in in_buffers:
                new_params.append(q)
        buffer = _HostBuffer(new_params)
        lock_pages_of(buffer, buffer.host, "optimizer.kind=adamw_offloaded")
        self._host_buffers.append(buffer)
        return buffer

    @torch.no_grad()
    def restore(self, p: Tensor, tensors: dict[str, Tensor]) -> None:
        """Set one parameter's state from saved tensors; without a `master` it is the parameter."""
        self.state[p] = self._new_state(p, tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from state_dict().

        The base class would cast the state to the type and device of the parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, p in zip(keys, self._params(), strict=True):
            if key in state_dict["state"]:
                self.restore(p, state_dict["state"][key])


def _state_names(p: Tensor) -> tuple[str, ...]:
    return MOMENTS if p.dtype == torch.float32 else (MASTER, *MOMENTS)


def _step_on_host(group: dict[str, Any], p: Tensor, state: dict[str, Tensor]) -> None:
    master = state.get(MASTER, p)
    if p.grad is not None:
        adamw_update(group, master, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
    if master is not p:
        p.copy_(master)


def adamw_update(
    group: dict[str, Any],
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
) -> None:
    """Apply torch's AdamW in place to a parameter or a slice of one; `step` counts this update."""
    beta1, beta2 = group["betas"]
    adamw(
        [master],
        [grad.float()],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step - 1],  # torch adds 1 itself, and would do so once per slice
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


class _Span(NamedTuple):
    """Elements `begin` to `end` of one parameter, flattened."""

    p: Tensor
    begin: int
    end: int


class _Slice(NamedTuple):
    """Columns `start` to `stop` of a buffer, and the elements of parameters they hold."""

    start: int
    stop: int
    spans: list[_Span]


class _Slot:
    """Device memory for one slice, and the events that order copy in, update and copy out."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.rows = torch.empty(rows, size, device=device)
        event = device_module(device).Event
        self.copied_in = event()
        self.updated = event()
        self.copied_out = event()


class _HostBuffer:
    """The state of many parameters of one CUDA device in one block of page-locked host memory.

    Each row of `host` (master if there is one, exp_avg, exp_avg_sq) holds all parameters one after
    the other.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.names = _state_names(params[0])
        self.offsets: dict[Tensor, int] = {}  # each parameter's first column
        self.size = 0
        for p in params:
            self.offsets[p] = self.size
            self.size += p.numel()
        self.slices = [
            self._make_slice(start, min(start + SLICE_ELEMENTS, self.size))
            for start in range(0, self.size, SLICE_ELEMENTS)
        ]
        self.device = params[0].device
        num_bytes = 4 * len(self.names) * self.size
        self.host = allocate_pages(num_bytes).view(torch.float32).view(len(self.names), self.size)

    def tensors(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of one parameter, in the parameter's shape."""
        start = self.offsets[p]
        return {
            name: row[start : start + p.numel()].view_as(p)
            for name, row in zip(self.names, self.host, strict=True)
        }

    def _make_slice(self, start: int, stop: int) -> _Slice:
        spans: list[_Span] = []
        for p, offset in self.offsets.items():
            begin = max(start, offset) - offset
            end = min(stop, offset + p.numel()) - offset
            if begin < end:
                spans.append(_Span(p, begin, end))
        return _Slice(start, stop, spans)

    def step(
        self, groups: dict[Tensor, dict[str, Any]], states: dict[Tensor, dict[str, Tensor]]
    ) -> None:
        """Update this buffer's parameters that are in `groups`.

        Returns when the state is back in host memory.
        """
        slices = [part for part in self.slices if any(span.p in groups for span in part.spans)]
        if not slices:
            return
        streams = device_module(self.device)
        slot_size = min(SLICE_ELEMENTS, self.size)
        with streams.device(self.device):
            slots = [_Slot(len(self.names), slot_size, self.device) for _ in range(NUM_SLOTS)]
            current = streams.current_stream()
            copy_in = streams.Stream()
            copy_out = streams.Stream()
            copy_in.wait_stream(current)
            for number, part in enumerate(slices):
                slot = slots[number % NUM_SLOTS]
                size = part.stop - part.start
                with streams.stream(copy_in):
                    if number >= NUM_SLOTS:
                        copy_in.wait_event(slot.copied_out)
                    for row, host in zip(slot.rows, self.host, strict=True):
                        row[:size].copy_(host[part.start : part.stop], non_blocking=True)
                    slot.copied_in.record(copy_in)
                current.wait_event(slot.copied_in)
                self._update(part, slot.rows, groups, states)
                slot.updated.record(current)
                with streams.stream(copy_out):
                    copy_out.wait_event(slot.updated)
                    for row, host in zip(slot.rows, self.host, strict=True):
                        host[part.start : part.stop].copy_(row[:size], non_blocking=True)
                    slot.copied_out.record(copy_out)
            copy_out.synchronize()

    def _update(
        self,
        part: _Slice,
        rows: Tensor,
        groups: dict[Tensor, dict[str, Any]],
        states: dict[Tensor, dict[str, Tensor]],
    ) -> None:
        for p, begin, end in part.spans:
            if p not in groups or p.grad is None:
                continue
            first = self.offsets[p] + begin - part.start
            state = rows[:, first : first + end - begin]
            weights = p.view(-1)[begin:end]
            grad = p.grad.reshape(-1)[begin:end]
            master = state[0] if MASTER in self.names else weights
            adamw_update(groups[p], master, grad, state[-2], state[-1], states[p]["step"])
            if master is not weights:
                weights.copy_(master)


def allocate_pages(num_bytes: int) -> Tensor:
    """Return (num_bytes,) uint8 zeros in their own memory pages, so they can be locked."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_HUGEPAGE)
    # Writing zeros on all threads first: locking huge pages that exist is 6 times faster.
    block = torch.frombuffer(pages, dtype=torch.uint8).zero_()
    return block[:num_bytes]


def lock_pages_of(owner: object, host: Tensor, setting: str) -> None:
    """Page-lock `host` while `owner` lives. (torch would round the size up to a power of two.)"""
    if not host.numel():
        return
    code = lock_pages(host.data_ptr(), host.nbytes)
    if code != 0:
        raise RunError(
            f"{setting}: {host.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA "
            f"error {code}); remove the setting, or use a machine with more memory"
        )
    unlock: Any = weakref.finalize(owner, unlock_pages(), host.data_ptr())
    unlock.atexit = False
