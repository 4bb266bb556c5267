"""Push to a hub in a thread: complete or not at all, refusals in one line, nothing sent twice."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_hub import TOKEN, Hub, serving_hub

from postgrad.cli.main import main
from postgrad.publish import push as pushing
from postgrad.publish.card import model_card

CONFIG = """name: counting
seed: 3
model: {path: example/base, dtype: float32, lora: {rank: 4}}
data: {train: arithmetic:1, validation: 'arithmetic:1:digits:test'}
method: {name: grpo}
optimizer: {lr: 0.002}
training: {steps: 8, problems_per_step: 4}
rollout: {samples: 8, temperature: 1.0, max_response_tokens: 5}
"""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setattr(pushing, "PAUSES_S", (0.01, 0.02))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


@pytest.fixture
def run_of(tmp_path) -> Path:
    """A run folder with one checkpoint, a merged policy and an adapter."""
    run = tmp_path / "runs" / "counting"
    policy, adapter = (run / "checkpoints" / "step-6" / name for name in ("policy", "adapter"))
    for folder in (policy, adapter):
        folder.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    lines = [{"step": n, "reward/mean": n / 10, "loss": -0.1 * n} for n in range(1, 9)] + [
        {"step": 5, "validation/accuracy": 0.5}
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "rew'
    )
    (run / "checkpoints" / "latest").write_text("step-6\n")
    (policy.parent / "state.json").write_text("{}")
    (policy / "config.json").write_text('{"model_type": "qwen3"}')
    (policy / "tokenizer.json").write_text("{}")
    (policy / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_bytes(b"small" * 10)
    return run


def run_push(capsys, *arguments: str) -> tuple[int, str]:
    """Return the exit code of `postgrad push` and what it printed."""
    capsys.readouterr()
    code = main(["push", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.err if code else printed.out


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_run_is_pushed_with_a_card(hub: Hub, run_of, capsys):
    code, printed = run_push(capsys, run_of, "me/counts")
    assert code == 0 and f"pushed: {hub.address}/me/counts" in printed and "(private)" in printed, (
        printed
    )
    files = hub.files("me/counts")
    card = files.pop("README.md").decode()
    assert files == files_of(run_of / "checkpoints" / "step-6" / "policy")
    assert hub.repos["me/counts"]["private"]
    assert hub.repos["me/counts"]["commits"] == ["counting, step 6"]
    front, text = yaml.safe_load(card.split("---\n")[1]), card.split("---\n", 2)[2]
    assert front["base_model"] == "example/base"
    assert front["library_name"] == "transformers"
    assert "grpo" in front["tags"]
    for part in (
        "**grpo** from `example/base` (checkpoint of step 6)",
        "`arithmetic:1`",
        "learning rate: 0.002",
        "LoRA rank: 4",
    ):
        assert part in text, part
    assert "| mean reward | 0.1 (step 1) | 0.6 (step 6) |" in text, "nothing after the checkpoint"
    assert "| held-out accuracy, greedy | 0.5 (step 5) | 0.5 (step 5) |" in text
    assert CONFIG.strip() in text and "postgrad train config.yaml" in text


@pytest.mark.slow
def test_second_push_sends_only_new_files_and_keeps_a_readme(hub: Hub, run_of, capsys):
    assert run_push(capsys, run_of, "me/counts", "private=false")[0] == 0
    assert not hub.repos["me/counts"]["private"] and hub.calls["upload"] == 1
    policy = run_of / "checkpoints" / "step-6" / "policy"
    (policy / "README.md").write_text("---\ntags: [mine]\n---\n# My own words\n")
    assert run_push(capsys, policy, "me/counts")[0] == 0
    assert hub.calls["upload"] == 1, "the weights are there already"
    assert hub.files("me/counts")["README.md"] == (policy / "README.md").read_bytes()


def test_adapter_is_pushed_alone(hub: Hub, run_of, capsys):
    assert run_push(capsys, run_of, "me/adapter", "lora=keep", "step=6")[0] == 0
    assert set(hub.files("me/adapter")) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [("create", 500), ("upload", 503), ("commit", 500), ("commit", 0), ("preupload", 502)]
)
def test_failed_call_is_repeated_and_sends_everything_once(
    hub: Hub, run_of, capsys, monkeypatch, fault
):
    # huggingface_hub also waits between its own attempts.
    monkeypatch.setattr("time.sleep", lambda s: None)
    hub.faults.append(fault)
    code, _ = run_push(capsys, run_of, "me/counts")
    assert code == 0 and len(hub.files("me/counts")) == 4 and not hub.faults
    assert len(hub.large) == 1 and hub.calls["upload"] == (2 if fault[0] == "upload" else 1)


@pytest.mark.slow
def test_push_that_failed_is_continued_by_the_same_command(hub: Hub, run_of, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda s: None)
    before = {p: p.read_bytes() for p in run_of.rglob("*") if p.is_file()}
    hub.faults += [("commit", 500)] * 3
    code, printed = run_push(capsys, run_of, "me/counts")
    assert (
        code == 1
        and printed.count("\n") == 1
        and "the hub answered 500" in printed
        and "repeat the same command" in printed
    ), printed
    assert hub.files("me/counts") == {} and hub.calls["upload"] == 1
    assert run_push(capsys, run_of, "me/counts")[0] == 0
    assert len(hub.files("me/counts")) == 4 and hub.calls["upload"] == 1, (
        "the weights were there already"
    )
    assert {p: p.read_bytes() for p in run_of.rglob("*") if p.is_file()} == before


def test_refusals_are_one_line(hub: Hub, run_of, capsys, monkeypatch):
    def refused(*arguments: str) -> str:
        code, error = run_push(capsys, *arguments)
        assert code == 2 and error.count("\n") == 1, (code, error)
        return error

    assert "'counts' is not a name" in refused(run_of, "counts")
    assert "'me/a b' is not a name" in refused(run_of, "me/a b")
    assert "may not write to stranger/counts (403)" in refused(run_of, "stranger/counts")
    assert "did you mean private?" in refused(run_of, "me/counts", "privat=true")
    assert "private: maybe" in refused(run_of, "me/counts", "private=maybe")
    assert "user/name" in refused(run_of)
    assert "no such folder" in refused("/no/such", "me/counts")
    assert "has no checkpoint step=7; it has steps 6" in refused(run_of, "me/counts", "step=7")
    assert "is not a run, a checkpoint or a model folder" in refused(run_of.parent, "me/counts")
    assert hub.repos == {} and hub.calls["upload"] == 0
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token (401)" in refused(run_of, "me/counts")
    monkeypatch.delenv("HF_TOKEN")
    assert "set HF_TOKEN, or run: hf auth login" in refused(run_of, "me/counts")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE=1" in refused(run_of, "me/counts")


@pytest.mark.slow
def test_missing_network_is_one_line(hub: Hub, run_of, capsys, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda s: None)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound, but nobody listens
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        code, printed = run_push(capsys, run_of, "me/counts")
    assert (
        code == 1
        and printed.count("\n") == 1
        and "was not pushed" in printed
        and "refused" in printed
    ), printed


@pytest.mark.slow
def test_card_can_be_printed_without_a_push(hub: Hub, run_of, capsys):
    code, printed = run_push(capsys, run_of, "me/counts", "--card")
    assert code == 0 and "# counts" in printed and hub.calls.total() == 0


@pytest.mark.slow
def test_push_in_its_own_process(hub: Hub, run_of):
    policy = run_of / "checkpoints" / "step-6" / "policy"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "postgrad.cli.main", "push", str(policy), "me/counts"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0 and "pushed" in done.stdout and done.stderr == "", done.stderr
    assert (
        hub.files("me/counts")["model.safetensors"] == (policy / "model.safetensors").read_bytes()
    )


@pytest.mark.slow
def test_each_step_has_its_branch(hub, run_of, capsys):
    import shutil

    checkpoints = run_of / "checkpoints"
    shutil.copytree(checkpoints / "step-6", checkpoints / "step-4")
    code, out = run_push(capsys, run_of, "me/model", "step=all")
    assert code == 0 and hub.branches == ["step-4", "step-6", "main"], out
    assert hub.calls["branch"] == 2
    code, out = run_push(capsys, run_of, "me/model", "branch=best")
    assert code == 0 and hub.branches[-1] == "best" and "/tree/best" in out
    assert run_push(capsys, run_of, "me/model", "step=all", "branch=x")[0] == 2
    assert run_push(capsys, run_of / "checkpoints", "me/model", "step=all")[0] == 2


@pytest.mark.parametrize(
    ("architecture", "auto_class"),
    [
        ("Qwen3ForCausalLM", "AutoModelForCausalLM"),
        ("Qwen3VLForConditionalGeneration", "AutoModelForImageTextToText"),
        ("Qwen3ForSequenceClassification", "AutoModelForSequenceClassification"),
    ],
)
def test_the_card_loads_the_model_with_its_class(architecture, auto_class, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    text = model_card("me/model", tmp_path, tmp_path, None)
    assert f'{auto_class}.from_pretrained("me/model")' in text
