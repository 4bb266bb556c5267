"""AdamW with its state in host memory, compared with resident and with swapped state.

    python benchmarks/offload.py [--weights 1.5e9] [--steps 5]

On a CUDA device, bfloat16 weights with float32 masters; seconds per step and peak device memory:

    resident          masters and moments on the device, torch.optim.AdamW
    swapped           `.to(device)` before the step and `.to("cpu")` after it
    swapped, pinned   the same with page-locked memory and asynchronous copies
    offloaded         postgrad.model.offload: the state streams through the device in slices

On a CPU there is nothing to swap: only torch's AdamW and the offloaded one are timed.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from postgrad.model.offload import OffloadedAdamW

# The shape of Qwen2.5-1.5B.
WIDTH = 1536
INNER = 8960
VOCABULARY = 151_936
OPTIONS = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_weights(total: float, device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return about `total` weights with gradients, in the shapes of Qwen2.5-1.5B."""
    block = [
        (WIDTH,),
        (WIDTH + 512, WIDTH),
        (WIDTH, WIDTH),
        (WIDTH,),
        (INNER, WIDTH),
        (INNER, WIDTH),
        (WIDTH, INNER),
    ]
    shapes: list[tuple[int, ...]] = [(VOCABULARY, WIDTH)] if total > 3e8 else []
    while sum(torch.Size(shape).numel() for shape in shapes) < total:
        shapes += block
    params = [
        nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02) for shape in shapes
    ]
    for p in params:
        p.grad_dtype = None
        p.grad = torch.randn(p.shape, device=device, dtype=torch.float32) * 1e-3
    return params


class Resident:
    """torch's AdamW over float32 masters on the device."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.masters = [p.detach().float().clone() for p in params]
        self.adam = torch.optim.AdamW(self.masters, **OPTIONS)  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = p.grad
        self.adam.step()
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None
            p.copy_(master)


class Swapped(Resident):
    """The same with masters and moments in host memory between steps."""

    def __init__(self, params: list[nn.Parameter], pinned: bool) -> None:
        super().__init__(params)
        self.pinned = pinned
        super().step()  # creates the moments
        self.buffers = [[self._host_buffer(t) for t in self._tensors(m)] for m in self.masters]
        self._copy_to_host()

    def _tensors(self, master: Tensor) -> list[Tensor]:
        return [master, *(self.adam.state[master][key] for key in MOMENTS)]

    def _host_buffer(self, tensor: Tensor) -> Tensor | None:
        return torch.empty(tensor.shape, pin_memory=True) if self.pinned else None

    def _copy_to_host(self) -> None:
        for master, buffers in zip(self.masters, self.buffers, strict=True):
            for tensor, buffer in zip(self._tensors(master), buffers, strict=True):
                if buffer is None:
                    tensor.data = tensor.data.to("cpu")
                else:
                    tensor.data = buffer.copy_(tensor.data, non_blocking=True)
        torch.cuda.synchronize()

    def _copy_to_device(self) -> None:
        for master in self.masters:
            for tensor in self._tensors(master):
                tensor.data = tensor.data.to("cuda", non_blocking=True)

    def step(self) -> None:
        self._copy_to_device()
        super().step()
        self._copy_to_host()


def median_seconds(work: Callable[[], object], steps: int) -> float:
    """Return the median of `steps` calls after one warm-up call."""
    times: list[float] = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[steps // 2]


def measure_cuda(total: float, steps: int) -> None:
    kinds: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
        "resident": lambda params: Resident(params).step,
        "swapped": lambda params: Swapped(params, pinned=False).step,
        "swapped, pinned": lambda params: Swapped(params, pinned=True).step,
        "offloaded": lambda params: OffloadedAdamW(params, **OPTIONS).step,  # type: ignore[arg-type]
    }
    for name, make in kinds.items():
        torch.manual_seed(0)
        params = make_weights(total, "cuda", torch.bfloat16)
        size = sum(p.numel() for p in params)
        before = torch.cuda.memory_allocated()
        step = make(params)
        step()
        torch.cuda.empty_cache()
        between_steps = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(step, steps)
        peak = torch.cuda.max_memory_allocated() - before
        print(
            f"{name:16s} {seconds:7.3f} s per step  {seconds / size * 1e9:6.3f} ns per weight  "
            f"device memory {peak / 2**30:6.2f} GiB in a step, "
            f"{between_steps / 2**30:6.2f} GiB between steps",
            flush=True,
        )
        del params, step
        torch.cuda.empty_cache()


def measure_cpu(total: float, steps: int) -> None:
    print("no CUDA device, so nothing to swap: float32 weights and state in the same memory")
    for name, kind in (("torch", torch.optim.AdamW), ("offloaded", OffloadedAdamW)):
        torch.manual_seed(0)
        params = make_weights(total, "cpu", torch.float32)
        size = sum(p.numel() for p in params)
        seconds = median_seconds(kind(params, **OPTIONS).step, steps)  # type: ignore[arg-type]
        per_weight = seconds / size * 1e9
        print(f"{name:16s} {seconds:7.3f} s per step  {per_weight:6.3f} ns per weight", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=float, help="about how many; default 1.5e9, on a CPU 1e8")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {device}")
    if cuda:
        measure_cuda(options.weights or 1.5e9, options.steps)
    else:
        measure_cpu(options.weights or 1e8, options.steps)


if __name__ == "__main__":
    main()
