"""AdamW with float32 masters, gradient accumulation in float32, clipping and the learning-rate schedule.

When the model computes in bfloat16 the optimiser holds float32 copies of the weights and writes the rounded ones back after each
step. Parameters that got no gradient (frozen ones) are left alone: no decay, no state.
"""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from postgrad.config.schema import OptimiserConfig
from postgrad.errors import RunError

STATE = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(config: OptimiserConfig, step: int, total_steps: int) -> float:
    """The rate at a step counted from 1: linear warm-up over `warmup_steps`, then constant, linear or cosine down to the final ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps - 1) / max(1, total_steps - config.warmup_steps))
    falling = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * falling)


class Optimiser:
    """One AdamW over the model's trainable parameters, in groups that may have their own share of the learning rate."""

    def __init__(self, model: nn.Module, config: OptimiserConfig, lr_scale: dict[str, float] | None = None) -> None:
        self.config = config
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: p if p.dtype == torch.float32 else p.detach().float().clone() for name, p in self.params.items()}
        scales = {name: (lr_scale or {}).get(name, 1.0) for name in self.params}
        groups = [{"params": [self.masters[n] for n in scales if scales[n] == s], "scale": s} for s in sorted(set(scales.values()))]
        beta1, beta2 = config.betas
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, weight_decay=config.weight_decay)
        for name, p in self.params.items():
            if p is not self.masters[name]:
                p.register_post_accumulate_grad_hook(self._accumulate_wide(self.masters[name]))

    @staticmethod
    def _accumulate_wide(master: Tensor):
        def hook(p: Tensor) -> None:
            if p.grad is None:
                return
            master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
            p.grad = None

        return hook

    def step(self, lr: float) -> float:
        """Clip, step, clear. Returns the gradient's norm before clipping; a norm that is not finite stops the run."""
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if not torch.isfinite(norm):
            self.adam.zero_grad(set_to_none=True)
            raise RunError(
                f"the gradient norm is {norm.item()}; lower optimiser.lr, or look at the last rollouts for broken rewards"
            )
        if self.config.max_grad_norm > 0:
            share = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for g in gradients:
                g.mul_(share)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.write_back()
        return norm.item()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        for name, p in self.params.items():
            if p is not self.masters[name]:
                p.copy_(self.masters[name])

    def save(self, file: Path) -> None:
        tensors = {f"master/{n}": m for n, m in self.masters.items() if m is not self.params[n]}
        for name, master in self.masters.items():
            for key in STATE if master in self.adam.state else ():
                tensors[f"{key}/{name}"] = self.adam.state[master][key]
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, file)

    @torch.no_grad()
    def load(self, file: Path) -> None:
        tensors = load_file(file)
        self.adam.state.clear()
        for name, master in self.masters.items():
            if f"master/{name}" in tensors:
                master.copy_(tensors[f"master/{name}"])
            if f"step/{name}" in tensors:
                self.adam.state[master] = {
                    key: tensors[f"{key}/{name}"].to("cpu" if key == "step" else master.device) for key in STATE
                }
        self.write_back()
