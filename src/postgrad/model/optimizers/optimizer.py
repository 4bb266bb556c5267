"""AdamW or Muon with float32 masters, gradient accumulation, clipping and a schedule.

If the model computes in bfloat16, the optimizer holds float32 copies of the weights and writes the
rounded values back after each step. Parameters without a gradient (frozen ones) are left alone: no
decay, no state. `optimizer.kind` says where and how the state is kept. Accumulation, clipping,
schedule and saved files are the same for all kinds.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from postgrad.config.schema import OptimizerConfig
from postgrad.errors import RunError, Unsupported
from postgrad.model.checkpoint_files import File, TensorsFile, read_tensors
from postgrad.model.optimizers.adamw_8bit import CODES, MIN_ELEMENTS, AdamW8bit
from postgrad.model.optimizers.gradient_sums import set_master
from postgrad.model.optimizers.muon import MuonWithAdamW, matrix_names
from postgrad.model.optimizers.offload import OffloadedAdamW


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate at a step counted from 1.

    Linear warm-up over `warmup_steps`, below 1 a share of all steps; then constant, or linear or
    cosine decay to lr · final_lr_ratio.
    """
    is_share = config.warmup_steps < 1
    warmup_steps = int(config.warmup_steps * (total_steps if is_share else 1))
    if step <= warmup_steps:
        return config.lr * step / (warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps - 1) / decay_steps)
    remaining = 1 - progress
    if config.schedule == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


def make_torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer | MuonWithAdamW:
    """Return the optimizer of `optimizer.kind`. Raises ConfigError if it cannot run here."""
    if config.kind == "muon":
        return MuonWithAdamW(groups, config)
    if config.kind == "rmsprop":
        return torch.optim.RMSprop(groups, lr=config.lr, eps=config.eps)
    beta1, beta2 = config.betas
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (beta1, beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind == "adamw_offloaded":
        return OffloadedAdamW(groups, **options)
    if config.kind == "adamw_8bit":
        return AdamW8bit(groups, **options)
    fused = True if config.kind == "adamw_fused" else None
    try:
        return torch.optim.AdamW(groups, **options, fused=fused)
    except RuntimeError as error:
        raise Unsupported(
            f"optimizer.kind={config.kind} does not run here ({error}); use optimizer.kind=adamw"
        ) from error


class Optimizer:
    """One optimizer over the trainable parameters, with a learning-rate scale per parameter.

    Gradients accumulate in float32 in the `.grad` of `masters`, on the model's device. A master is
    the parameter itself if that is float32 or its float32 copy is in host memory; otherwise it is
    the float32 copy.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, lr_scale: dict[str, float] | None = None
    ) -> None:
        self.config = config
        self.params = self.own_params(model)
        self.masters = {name: self._make_master(p) for name, p in self.params.items()}
        self.matrices = matrix_names(model) if config.kind == "muon" else set()
        groups = self._parameter_groups(lr_scale or {})
        self.adam = make_torch_optimizer(groups, config)
        for name, p in self.params.items():
            if p.dtype != torch.float32:
                hook = _float32_accumulation_hook(p, self.masters[name])
                p.register_post_accumulate_grad_hook(hook)
                set_master(p, self.masters[name])

    def own_params(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the parameters that this process updates: the trainable ones."""
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _make_master(self, p: Tensor) -> Tensor:
        if self.config.kind == "adamw_offloaded" or p.dtype == torch.float32:
            return p
        return p.detach().float().clone()

    def _parameter_groups(self, lr_scale: dict[str, float]) -> list[dict[str, Any]]:
        """Return the masters by the scale of their learning rate and, for Muon, by their kind."""
        groups: dict[tuple[float, bool], list[Tensor]] = {}
        for name, master in self.masters.items():
            key = (lr_scale.get(name, 1.0), name in self.matrices)
            groups.setdefault(key, []).append(master)
        return [
            {"params": groups[scale, is_matrix], "scale": scale, "matrices": is_matrix}
            for scale, is_matrix in sorted(groups)
        ]

    def masters_by_id(self) -> dict[int, Tensor]:
        """Return the masters by the id of their parameter."""
        return {id(p): self.masters[name] for name, p in self.params.items()}

    def has_gradients(self) -> bool:
        """Return whether any gradient was accumulated since the last step."""
        return any(master.grad is not None for master in self.masters.values())

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the global norm of the gradients."""
        return torch.stack(torch._foreach_norm(gradients)).norm()

    def step(self, lr: float) -> float:
        """Clip, update and clear the gradients; return their norm before clipping.

        If the norm exceeds `optimizer.skip_grad_norm`, the update is skipped.

        Raises: RunError if the norm is not finite and skip_grad_norm is not set.
        """
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = self.norm(gradients)
        max_norm = self.config.skip_grad_norm
        if max_norm is not None and not norm <= max_norm:
            self.adam.zero_grad(set_to_none=True)
            return norm.item()
        if not torch.isfinite(norm):
            self.adam.zero_grad(set_to_none=True)
            raise RunError(
                f"the gradient norm is {norm.item()}; lower optimizer.lr, or look for broken "
                "rewards in the last rollouts"
            )
        if self.config.max_grad_norm > 0:
            scale = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            scale = scale.to(gradients[0].device)  # in host memory with cluster.offload
            torch._foreach_mul_(gradients, scale)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.write_back()
        return norm.item()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters into the model's parameters, rounded to their type."""
        params: list[Tensor] = []
        masters: list[Tensor] = []
        for name, p in self.params.items():
            if p is not self.masters[name]:
                params.append(p)
                masters.append(self.masters[name])
        if params:
            torch._foreach_copy_(params, masters)

    def save(self, file: Path) -> None:
        """Write masters and state as tensors named `key/parameter`.

        The keys are the same for all kinds except adamw_8bit, whose state has its own.
        """
        save_file(self.tensors(), file)

    def files(self, file: Path) -> list[File]:
        """Return this process's part of what save() writes."""
        return [TensorsFile(self.tensors(), file)]

    def tensors(self) -> dict[str, Tensor]:
        """Return what save() writes, by name."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.params[name]:
                tensors[f"master/{name}"] = master.detach()
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = torch.as_tensor(value)
        return {name: t.contiguous() for name, t in tensors.items()}

    def read(self, file: Path) -> dict[str, Tensor]:
        """Return what save() wrote, or this process's part of it."""
        return dict(read_tensors(file))

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Continue from save(). Parameters without saved state start from their current value."""
        states: dict[str, dict[str, Tensor]] = {}
        for tensor_name, tensor in self.read(file).items():
            key, _, name = tensor_name.partition("/")
            states.setdefault(name, {})[key] = tensor
        self.adam.state.clear()
        for name, master in self.masters.items():
            self._restore(name, master, states.get(name, {}))
        self.write_back()

    def _restore(self, name: str, master: Tensor, saved: dict[str, Tensor]) -> None:
        kind = self.config.kind
        if master is not self.params[name]:
            master.copy_(saved.get("master", self.params[name]))
        if not saved.keys() - {"master"}:
            return
        expected = "square_avg" if kind == "rmsprop" else "exp_avg"
        if kind == "adamw_8bit" and master.numel() >= MIN_ELEMENTS:
            expected += CODES
        if kind == "muon" and name in self.matrices:
            expected = "momentum_buffer"
        if expected not in saved:
            raise RunError(
                f"optimizer.kind={kind} cannot read the saved optimizer, which is of another kind; "
                "continue with the kind that saved it"
            )
        if isinstance(self.adam, OffloadedAdamW):
            self.adam.restore(master, saved)
            self.params[name].copy_(self.adam.state[master].get("master", master))
            return
        state: dict[str, Any] = {}
        for key, tensor in saved.items():
            if key not in ("master", "step"):
                state[key] = tensor.to(master.device)
        if "step" not in saved:  # Muon counts none
            self.adam.state[master] = state
            return
        step: Any = saved["step"].to("cpu")
        if kind == "adamw_fused":  # the fused kernel reads the step on the device
            step = step.to(master.device)
        self.adam.state[master] = {"step": step, **state}


def _float32_accumulation_hook(p: Tensor, master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that accumulates the gradients of a bfloat16 parameter in float32."""

    def convert_own_gradient(p: Tensor) -> None:
        if p.grad is not None and p.grad.dtype != torch.float32:
            p.grad = p.grad.float()  # later gradients are added to it in place

    def add_to_master(p: Tensor) -> None:
        if p.grad is None:
            return
        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad.add_(p.grad)
        p.grad = None

    if p is master:
        p.grad_dtype = None  # lets its gradient have another type than the parameter
        return convert_own_gradient
    return add_to_master
