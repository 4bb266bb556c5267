"""What a run leaves to the machine about its passes: tokens, checkpointing, kept attention."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from postgrad.cluster.remote_roles import is_remote_role
from postgrad.config.schema import Config
from postgrad.errors import ConfigError, RunError
from postgrad.methods.method import Method
from postgrad.model.device import DTYPES, has_own_memory, memory_info, total_memory_bytes
from postgrad.model.load.load import model_config
from postgrad.sizing.devices import GpuSpec

if TYPE_CHECKING:  # the estimate is imported where a GPU is
    from postgrad.sizing.choose import RowKinds
    from postgrad.sizing.plan import Plan


def local_roles(config: Config, method: Method) -> dict[str, tuple[str, Any]]:
    """Return (kind, transformers configuration) of the models that load besides the policy."""
    from postgrad.cluster.host import is_base_model
    from postgrad.model.synced import needs_masters
    from postgrad.sizing.plan import AVERAGED_WEIGHTS, SHARED_WEIGHTS

    roles: dict[str, tuple[str, Any]] = {}
    for name, role in method.all_roles().items():
        if not is_remote_role(role.path):
            model = replace(config.model, path=role.path or config.model.path)
            kind = role.kind
            if is_base_model(config, role):
                kind = SHARED_WEIGHTS
            elif kind == "synced" and needs_masters(role.share, DTYPES[config.model.dtype]):
                kind = AVERAGED_WEIGHTS
            roles[name] = (kind, model_config(model, config.seed))
    return roles


def resolve_passes(
    config: Config, method: Method | None, device: torch.device, planned: GpuSpec | None
) -> None:
    """Set what is auto: tokens per pass, activation checkpointing and kept attention.

    On one GPU they follow from the estimated memory of the run.
    """
    from postgrad.model.passes.layout import default_token_budget

    model = config.model
    training = config.training
    # Passes with LoRA or checkpointing are not captured as graphs; see model/passes/captured.py.
    is_eager = bool(model.lora.rank or model.activation_checkpointing)
    default = default_token_budget(device, eager=is_eager)
    chosen = training.token_budget or default, bool(model.activation_checkpointing)
    is_auto = training.token_budget == 0 or model.activation_checkpointing is None
    if is_auto and config.cluster.backend != "ray" and has_own_memory(device):
        chosen = _passes_that_fit(config, method, device, planned, chosen) or chosen
    training.token_budget, model.activation_checkpointing = chosen
    if model.kept_attention_blocks is None:
        model.kept_attention_blocks = _kept_attention(config, method, device, planned)


def _kept_attention(
    config: Config, method: Method | None, device: torch.device, planned: GpuSpec | None
) -> int:
    """Return how many recomputed blocks keep their attention: those for which memory is left."""
    model = config.model
    if not model.activation_checkpointing:
        return 0
    if config.cluster.backend == "ray" or not has_own_memory(device):
        return 0
    from postgrad.sizing.choose import choose_kept_attention

    try:
        made = _plan_on_gpu(config, method, device, planned)
        return choose_kept_attention(*made) if made else 0
    except (ConfigError, RunError):  # a model that cannot be simulated
        return 0


def _free_memory(config: Config, device: torch.device) -> int:
    """Return the bytes of the GPU that the models may use.

    A driver whose models are in another process does not open the GPU to ask what is free.
    """
    if config.cluster.backend == "local":
        return memory_info(device)[0]
    return total_memory_bytes(device)


def _passes_that_fit(
    config: Config,
    method: Method | None,
    device: torch.device,
    planned: GpuSpec | None,
    defaults: tuple[int, bool],
) -> tuple[int, bool] | None:
    """Return token budget and checkpointing by the estimate; None if the run has none."""
    from postgrad.model.passes.layout import default_token_budget
    from postgrad.sizing.choose import choose_passes

    budgets = [
        default_token_budget(device, eager) for eager in (bool(config.model.lora.rank), True)
    ]
    try:
        made = _plan_on_gpu(config, method, device, planned)
        if made is None:
            return None
        plan, gpu = made
        best = choose_passes(plan, gpu, *budgets)
    except (ConfigError, RunError):  # a model that cannot be simulated; the run shows if it fits
        return None
    if best != defaults and not planned:
        print(_passes_note(*best, gpu), file=sys.stderr)
    return best


def _plan_on_gpu(
    config: Config, method: Method | None, device: torch.device, planned: GpuSpec | None
) -> "tuple[Plan, GpuSpec] | None":
    """Return the run and the GPU that its memory is estimated for; None if it has no estimate."""
    from postgrad.sizing.choose import plan_of_settings
    from postgrad.sizing.packed import runs_packed

    transformers_config = model_config(config.model, config.seed)
    if not runs_packed(config, transformers_config):
        return None
    gpu = planned or GpuSpec(device.type, _free_memory(config, device))
    roles = {} if method is None else local_roles(config, method)
    return plan_of_settings(config, transformers_config, roles, row_kinds(method)), gpu


def row_kinds(method: Method | None) -> "RowKinds":
    """Return which rows the method trains on; sampled ones if there is none."""
    from postgrad.sizing.choose import SAMPLED, RowKinds

    if method is None or method.traits.samples:
        return SAMPLED if method is None else RowKinds(rows_per_loss=method.traits.rows_per_loss)
    return RowKinds(
        method.traits.given_per_problem,
        method.traits.rows_per_loss,
        samples_in_validation=method.needs_verifier(),
    )


def _passes_note(budget: int, checkpointing: bool, gpu: GpuSpec) -> str:
    settings = f"training.token_budget={budget}"
    if checkpointing:
        settings += " model.activation_checkpointing=true"
    return (
        f"{settings}: the defaults would not fit into {gpu.usable / 2**30:.1f} GiB "
        "(postgrad doctor --fit shows the estimate)"
    )
