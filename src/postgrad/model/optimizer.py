"""AdamW with float32 masters, gradient accumulation in float32, clipping and the learning-rate schedule.

When the model computes in bfloat16 the optimizer holds float32 copies of the weights and writes the rounded ones back after each
step. Parameters that got no gradient (frozen ones) are left alone: no decay, no state. `optimizer.kind` says where and how the
state is kept; what is accumulated, clipped, scheduled and saved is the same for all kinds.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import OptimizerConfig
from postgrad.errors import ConfigError, RunError
from postgrad.model.offload import OffloadedAdamW


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate at a step counted from 1: linear warm-up over `warmup_steps`, then constant, linear or cosine to the final ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min(
        1.0, (step - config.warmup_steps - 1) / max(1, total_steps - config.warmup_steps)
    )
    falling = (
        1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * falling)


def make_adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The AdamW that `optimizer.kind` names. Raises ConfigError when this machine cannot run it."""
    beta1, beta2 = config.betas
    numbers: dict[str, Any] = {
        "lr": config.lr,
        "betas": (beta1, beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.kind == "adamw_offloaded":
        return OffloadedAdamW(groups, **numbers)
    if config.kind == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]
        except ImportError as error:
            raise ConfigError(
                "optimizer.kind=adamw_8bit needs one more package: pip install bitsandbytes; without it adamw_offloaded saves more"
            ) from error
        return AdamW8bit(groups, **numbers)
    try:
        return torch.optim.AdamW(
            groups, **numbers, fused=True if config.kind == "adamw_fused" else None
        )
    except RuntimeError as error:
        raise ConfigError(
            f"optimizer.kind={config.kind} does not run here ({error}); use optimizer.kind=adamw"
        ) from error


class Optimizer:
    """One AdamW over the model's trainable parameters, in groups that may have their own share of the learning rate.

    `masters` are the tensors in whose `.grad` the gradients add up, float32 and on the model's device: the parameter itself where
    it is float32 or its master lives in host memory, else the float32 copy.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, lr_scale: dict[str, float] | None = None
    ) -> None:
        self.config = config
        self.params = self.own_params(model)
        offloaded = config.kind == "adamw_offloaded"
        self.masters = {
            name: p if offloaded or p.dtype == torch.float32 else p.detach().float().clone()
            for name, p in self.params.items()
        }
        scales = {name: (lr_scale or {}).get(name, 1.0) for name in self.params}
        groups = [
            {"params": [self.masters[n] for n in scales if scales[n] == s], "scale": s}
            for s in sorted(set(scales.values()))
        ]
        self.adam = make_adamw(groups, config)
        for name, p in self.params.items():
            if p.dtype != torch.float32:
                p.register_post_accumulate_grad_hook(self._accumulate_wide(p, self.masters[name]))

    def own_params(self, model: nn.Module) -> dict[str, Tensor]:
        """What this process steps: the trainable parameters."""
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def masters_by_id(self) -> dict[int, Tensor]:
        """By the parameter's id, the tensor in whose `.grad` its gradients add up."""
        return {id(p): self.masters[name] for name, p in self.params.items()}

    def has_gradients(self) -> bool:
        """Whether anything was added up since the last step."""
        return any(master.grad is not None for master in self.masters.values())

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm of the whole gradient."""
        return torch.stack(torch._foreach_norm(gradients)).norm()  # pyright: ignore[reportPrivateImportUsage]

    @staticmethod
    def _accumulate_wide(p: Tensor, master: Tensor) -> Callable[[Tensor], None]:
        def onto_itself(p: Tensor) -> None:
            if p.grad is not None and p.grad.dtype != torch.float32:
                p.grad = p.grad.float()  # later gradients are added to it in place

        def onto_master(p: Tensor) -> None:
            if p.grad is None:
                return
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

        if p is master:
            p.grad_dtype = None  # its gradient may have another type than the parameter
            return onto_itself
        return onto_master

    def step(self, lr: float) -> float:
        """Clip, step, clear. Returns the gradient's norm before clipping; one that is not finite stops the run, or is skipped if asked."""
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = self.norm(gradients)
        bound = self.config.skip_grad_norm
        if bound is not None and not norm <= bound:
            self.adam.zero_grad(set_to_none=True)
            return norm.item()
        if not torch.isfinite(norm):
            self.adam.zero_grad(set_to_none=True)
            raise RunError(
                f"the gradient norm is {norm.item()}; lower optimizer.lr, or look at the last rollouts for broken rewards"
            )
        if self.config.max_grad_norm > 0:
            share = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, share)  # pyright: ignore[reportPrivateImportUsage]
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.write_back()
        return norm.item()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        rounded = {name: p for name, p in self.params.items() if p is not self.masters[name]}
        if rounded:
            torch._foreach_copy_(list(rounded.values()), [self.masters[name] for name in rounded])  # pyright: ignore[reportPrivateImportUsage]

    def save(self, file: Path) -> None:
        """Masters and state as `key/parameter`: the same names for all kinds but the 8-bit one, whose state is its own."""
        save_file(self.tensors(), file)

    def tensors(self) -> dict[str, Tensor]:
        """What save() writes, by name."""
        tensors = {
            f"master/{n}": m.detach() for n, m in self.masters.items() if m is not self.params[n]
        }
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                # bitsandbytes gives all parameters one code table, and safetensors wants each memory once.
                tensors[f"{key}/{name}"] = (
                    value.clone() if key.startswith("qmap") else torch.as_tensor(value)
                )
        return {name: t.contiguous() for name, t in tensors.items()}

    def read(self, file: Path) -> dict[str, Tensor]:
        """What save() wrote, as this process needs it."""
        return load_file(file)

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Continue from save(). Parameters without saved state start afresh from their present value."""
        states: dict[str, dict[str, Tensor]] = {}
        for place, tensor in self.read(file).items():
            key, _, name = place.partition("/")
            states.setdefault(name, {})[key] = tensor
        self.adam.state.clear()
        for name, master in self.masters.items():
            self._restore(name, master, states.get(name, {}))
        self.write_back()

    def _restore(self, name: str, master: Tensor, saved: dict[str, Tensor]) -> None:
        if master is not self.params[name]:
            master.copy_(saved.get("master", self.params[name]))
        if "step" not in saved:
            return
        if ("state1" in saved) != (self.config.kind == "adamw_8bit"):
            raise RunError(
                f"the saved optimizer is not of optimizer.kind={self.config.kind}; continue with the kind that saved it"
            )
        if isinstance(self.adam, OffloadedAdamW):
            self.adam.restore(master, saved)
            self.params[name].copy_(self.adam.state[master].get("master", master))
            return
        state: dict[str, Any] = {
            key: t.to(master.device) for key, t in saved.items() if key not in ("master", "step")
        }
        if self.config.kind == "adamw_8bit":
            step: Any = int(saved["step"])
        else:  # the fused kernel reads the step on the device
            step = saved["step"].to(master.device if self.config.kind == "adamw_fused" else "cpu")
        self.adam.state[master] = {"step": step, **state}
