"""Replaces every automatic setting by what this machine offers: device, threads, rows, passes."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from postgrad.cluster.ports import is_remote_role
from postgrad.config.schema import ClusterConfig, Config, copy_settings, engine_config
from postgrad.data.encode.styles import stop_strings
from postgrad.errors import ConfigError, Missing, RunError, Unsupported, WrongValue
from postgrad.machine import available_cores
from postgrad.methods.method import Method
from postgrad.model.device import (
    KERNEL_DEVICE,
    choose_device,
    choose_dtype,
    has_own_memory,
    is_gpu,
    memory_info,
    supports_triton,
    total_memory_bytes,
)
from postgrad.model.load.load import load_tokenizer, model_config, model_hidden_size

if TYPE_CHECKING:  # the estimate is imported where a GPU is
    from postgrad.sizing.devices import Device
    from postgrad.sizing.workload import PictureSizes, Plan, RowKinds

Result = TypeVar("Result")

MAX_ROWS_CPU = 256  # default of rollout.max_rows
MAX_ROWS_GPU = 2048


def resolve(
    config: Config, method: Method | None = None, planned: "Device | None" = None
) -> Config:
    """Return a copy of the settings in which nothing is automatic. Raises ConfigError.

    config.yaml keeps the values, and a resumed run uses them.

    Args:
        config: the settings; they are not changed.
        method: says which models load besides the policy.
        planned: the GPU of a run that is only estimated; None: this machine.
    """
    config = copy_settings(config)
    check_cluster(config.cluster)
    if config.cluster.backend == "ray":
        from postgrad.cluster.meshes import check_meshes

        check_meshes(config, method.all_roles() if method else {})
    if not planned:
        from postgrad.rollout.kinds import check_engine

        check_engine(engine_config(config))
    device = _resolve_device(config, planned)
    if config.model.kept_attention_blocks and not (planned or supports_triton(device)):
        raise Unsupported(
            f"model.kept_attention_blocks={config.model.kept_attention_blocks} needs a device with "
            f"Triton's kernels, and model.device={device.type}; remove it"
        )
    if config.model.threads == 0:
        config.model.threads = 1 if planned else choose_threads(config, device)
    if config.rollout.max_rows == 0:
        config.rollout.max_rows = MAX_ROWS_CPU if device.type == "cpu" else MAX_ROWS_GPU
    config.rollout.stop = stop_strings(config.rollout.stop, config.data.prompt_style)
    _resolve_passes(config, method, device, planned)
    return config


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse engines without a process of their own, and pools without workers.

    Raises ConfigError.
    """
    if cluster.engines > {"local": 0, "process": 1, "ray": cluster.engines}[cluster.backend]:
        raise Missing(
            f"cluster.engines={cluster.engines} needs a process for each engine; "
            "use cluster.engines=1 with cluster.backend=process, or cluster=ray"
        )
    if cluster.backend == "ray":
        for name, size in cluster.pools.items():
            if size < 1:
                raise WrongValue(
                    f"cluster.pools.{name}={size} is out of range; it must be at least 1"
                )


def _resolve_device(config: Config, planned: "Device | None") -> torch.device:
    """Set model.device and model.dtype; return the device."""
    model = config.model
    if planned:
        model.device = KERNEL_DEVICE
    if planned or (config.cluster.address and is_gpu(model.device)):
        # The workers of the Ray cluster have the GPU; this machine need not have one.
        device = torch.device(model.device)
        if model.dtype == "auto":
            model.dtype = "bfloat16"
    else:
        device = choose_device(model.device)
    model.device = device.type
    model.dtype = choose_dtype(model.dtype, device)
    return device


def choose_threads(config: Config, device: torch.device) -> int:
    """Return the CPU threads per process; Ray workers share the cores of a machine.

    Where a GPU computes, threads serve little but an optimizer on the host: all cores.
    """
    if device.type == "cpu":
        from postgrad.model.threads import probe_threads

        width = model_hidden_size(config.model, config.seed)
        threads = probe_threads(width, config.model.dtype)
    else:
        threads = available_cores()
    cluster = config.cluster
    if cluster.backend != "ray":
        return threads
    num_workers = cluster.workers + sum(cluster.pools.values())
    num_workers += cluster.engines * config.rollout.tensor_parallel
    return max(1, min(threads, available_cores() // num_workers))


# ---- passes: tokens, checkpointing and kept attention, on one GPU by the estimated memory


def local_roles(config: Config, method: Method) -> dict[str, tuple[str, Any]]:
    """Return (kind, transformers configuration) of the models that load besides the policy."""
    from postgrad.cluster.host import is_base_model
    from postgrad.sizing.workload import SHARED_WEIGHTS

    roles: dict[str, tuple[str, Any]] = {}
    for name, role in method.all_roles().items():
        if not is_remote_role(role.path):
            model = replace(config.model, path=role.path or config.model.path)
            kind = SHARED_WEIGHTS if is_base_model(config, role) else role.kind
            roles[name] = (kind, model_config(model, config.seed))
    return roles


def _resolve_passes(
    config: Config, method: Method | None, device: torch.device, planned: "Device | None"
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
    defaults = training.token_budget or default, bool(model.activation_checkpointing)
    chosen = defaults
    is_auto = training.token_budget == 0 or model.activation_checkpointing is None
    has_estimate = config.cluster.backend != "ray" and has_own_memory(device)
    if is_auto and has_estimate:
        from postgrad.sizing.choose import choose_passes

        choose = partial(
            choose_passes,
            default_budget=default_token_budget(device, bool(model.lora.rank)),
            recomputed_budget=default_token_budget(device, eager=True),
        )
        chosen = _estimate(choose, config, method, device, planned) or defaults
    training.token_budget, model.activation_checkpointing = chosen
    if chosen != defaults and not planned:
        changed = f"training.token_budget={training.token_budget}"
        if model.activation_checkpointing:
            changed += " model.activation_checkpointing=true"
        line = "the defaults would not fit into the GPU's memory"
        print(f"{changed}: {line} (postgrad doctor --fit shows the estimate)", file=sys.stderr)
    if model.kept_attention_blocks is None:
        model.kept_attention_blocks = 0
        if model.activation_checkpointing and has_estimate:
            from postgrad.sizing.choose import choose_kept_attention

            kept = _estimate(choose_kept_attention, config, method, device, planned)
            model.kept_attention_blocks = kept or 0


def _estimate(
    choose: "Callable[[Plan, Device], Result]",
    config: Config,
    method: Method | None,
    device: torch.device,
    planned: "Device | None",
) -> "Result | None":
    """Return what a function of sizing/choose.py finds for the run; None without an estimate."""
    try:
        plan_and_gpu = _plan_on_gpu(config, method, device, planned)
        return choose(*plan_and_gpu) if plan_and_gpu else None
    except (ConfigError, RunError):  # a model that cannot be simulated; the run shows if it fits
        return None


def _plan_on_gpu(
    config: Config, method: Method | None, device: torch.device, planned: "Device | None"
) -> "tuple[Plan, Device] | None":
    """Return the run and the GPU that its memory is estimated for; None if it has no estimate."""
    from postgrad.sizing.devices import make_gpu
    from postgrad.sizing.workload import plan_of_settings, runs_packed

    transformers_config = model_config(config.model, config.seed)
    if not runs_packed(config, transformers_config):
        return None
    # A driver whose models are in another process does not open the GPU to ask what is free.
    is_local = config.cluster.backend == "local"
    gpu = planned
    if gpu is None:
        free = memory_info(device)[0] if is_local else total_memory_bytes(device)
        gpu = make_gpu(device.type, free)
    roles = {} if method is None else local_roles(config, method)
    pictures = _picture_sizes(config, transformers_config)
    plan = plan_of_settings(config, transformers_config, roles, row_kinds(method), pictures)
    return plan, gpu


def _picture_sizes(config: Config, transformers_config: Any) -> "PictureSizes":
    """Return what bounds the pictures of the data, which are not read yet."""
    from postgrad.sizing.workload import NO_PICTURES, PictureSizes

    if not hasattr(transformers_config, "vision_config"):
        return NO_PICTURES
    from postgrad.model.vision import KEPT_FEATURE_BYTES, SIZES, noise
    from postgrad.picture_processor import PictureProcessor

    processor = PictureProcessor(load_tokenizer(config.model, config.seed))
    # The features of so many tokens are more than what is kept.
    return PictureSizes(KEPT_FEATURE_BYTES, processor.bytes_per_token(noise(0, SIZES[0])))


def row_kinds(method: Method | None) -> "RowKinds":
    """Return which rows the method trains on; sampled ones if there is none."""
    from postgrad.sizing.workload import SAMPLED, RowKinds

    if method is None:
        return SAMPLED
    traits = method.traits
    if traits.samples:
        return RowKinds(rows_per_loss=traits.rows_per_loss)
    return RowKinds(
        traits.given_per_problem,
        traits.rows_per_loss,
        samples_in_validation=method.needs_verifier(),
    )
