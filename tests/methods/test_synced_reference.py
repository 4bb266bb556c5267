"""A reference that follows the policy: what it becomes, what reads it, and that runs continue."""

import json
from pathlib import Path

import pytest
import torch
from families import save_family
from method_runs import VERIFIERS, bound
from safetensors.torch import load_file
from tiny_runs import SELF_DISTILL, config_of, metrics_of, overrides_of, random_batch, toy_run

from postgrad.cli.main import main
from postgrad.cluster.host import build_host
from postgrad.errors import ConfigError
from postgrad.methods.ports import Role, sync_copies
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SYNCED = ("method.kl=loss", "method.reference_sync_every=2")
RUN = (*toy_run(steps=4, response_tokens=6), "optimizer.lr=3e-3", "optimizer.warmup_steps=0")
EVERY_STEP = ("training.checkpoint_every=1", "training.keep_checkpoints=9")


@pytest.fixture
def verifier(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(VERIFIERS)
    return f"reward.verifier={file}:graded"


def weights_of(run: Path, step: int, name: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step}" / name / "model.safetensors")


def mixed(first: dict, second: dict, share: float) -> dict[str, torch.Tensor]:
    """The slow reference: a weighted mean in float64."""
    return {
        name: ((1 - share) * weight.double() + share * second[name].double())
        for name, weight in first.items()
    }


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-6) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        torch.testing.assert_close(weight.double(), expected[name].double(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_reference_moves_to_the_policy_every_second_step(share, tiny, verifier, tmp_path):
    own = (*SYNCED, f"method.reference_mixup={share}", f"runs={tmp_path}", verifier)
    run = train(config_of("grpo", tiny, *RUN, *EVERY_STEP, *own), Reporter()).folder
    start = load_file(tiny / "model.safetensors")
    assert_close(weights_of(run, 1, "reference"), start)
    moved = mixed(start, weights_of(run, 2, "policy"), share)
    assert_close(weights_of(run, 2, "reference"), moved)
    assert_close(weights_of(run, 3, "reference"), moved)
    moved_again = mixed(moved, weights_of(run, 4, "policy"), share)
    assert_close(weights_of(run, 4, "reference"), moved_again)
    lines = metrics_of(run)
    assert [line["reference/synced"] for line in lines] == [0, 1, 0, 1]
    # The KL of a step is computed before its update: 0 while the policy is the reference.
    kl = [line["kl/reference"] for line in lines]
    assert kl[0] == pytest.approx(0, abs=1e-7) and kl[1] > 1e-7 and kl[3] > 1e-7
    assert (kl[2] < 1e-7) == (share == 1.0)


def test_a_small_share_is_not_lost_in_16_bits(tiny):
    own = ("method.reference_sync_every=1", "method.reference_mixup=0.002")
    host = build_host(config_of("dpo", tiny, "model.dtype=bfloat16", *own))
    reference = host.models["reference"]
    target = {name: weight + 1.0 for name, weight in host.policy.weights().items()}
    expected = {name: p.detach().double() for name, p in reference.model.named_parameters()}
    for _ in range(100):
        reference.publish(target)
        expected = mixed(expected, target, 0.002)
    for name, p in reference.model.named_parameters():
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(p.double(), expected[name], atol=0.005, rtol=0.01)


def test_an_average_is_saved_in_float32_and_loaded_exactly(tiny, tmp_path):
    own = ("method.reference_sync_every=1", "method.reference_mixup=0.3", "model.dtype=bfloat16")
    config = config_of("dpo", tiny, *own)
    reference = build_host(config).models["reference"]
    target = {name: p.detach() + 0.37 for name, p in reference.model.named_parameters()}
    reference.publish(target)
    reference.save(str(tmp_path))
    saved = load_file(tmp_path / "reference" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert json.loads((tmp_path / "reference" / "config.json").read_text())["dtype"] == "float32"
    other = build_host(config).models["reference"]
    other.load(str(tmp_path))
    batch = random_batch(3)
    for _ in range(2):  # also after a further update, which reads the masters
        ours, theirs = reference.logprobs(batch)["logprobs"], other.logprobs(batch)["logprobs"]
        assert torch.equal(ours, theirs)
        reference.publish(target)
        other.publish(target)


def test_with_lora_the_reference_follows_the_merged_weights(tiny):
    made = bound("dpo", tiny, "model.lora.rank=4", "method.reference_sync_every=1")
    reference, policy = made.method.ports.reference, made.host.policy
    batch = random_batch(5)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if "lora_B" in name:
                p.add_(0.05)
    before = reference.logprobs(batch)["logprobs"]
    current = policy.logprobs(batch)["logprobs"]
    assert (before - current).abs().max() > 0.01
    sync_copies(made.method, made.step_done)  # step 0 is a multiple of every number
    torch.testing.assert_close(reference.logprobs(batch)["logprobs"], current, atol=1e-5, rtol=0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_with_a_4_bit_base_the_reference_starts_as_the_policy(share, tmp_path):
    folder = save_family(tmp_path / "llama", "llama", hidden_size=64, head_dim=16)
    four_bit = ("model.quantization=4bit", "model.lora.rank=4")
    own = ("method.reference_sync_every=1", f"method.reference_mixup={share}")
    made = bound("dpo", folder, *four_bit, *own)
    reference, policy = made.method.ports.reference, made.host.policy
    batch = random_batch(5)
    for _ in range(2):  # also after an update from the same policy
        expected = policy.logprobs(batch)["logprobs"]
        torch.testing.assert_close(
            reference.logprobs(batch)["logprobs"], expected, atol=1e-5, rtol=0
        )
        sync_copies(made.method, made.step_done)


@pytest.mark.parametrize("recipe", ["dpo", "kto", "distill"])
def test_other_methods_have_a_model_that_follows(recipe, tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"
    columns = {"chosen": "1", "rejected": "2"} if recipe != "distill" else {"response": "1"}
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", **columns}) + "\n" for a in range(9)))
    name = "teacher" if recipe == "distill" else "reference"
    method = SELF_DISTILL if recipe == "distill" else ()
    own = (*method, f"method.{name}_sync_every=2", f"method.{name}_mixup=0.5", f"data.train={rows}")
    config = config_of(recipe, tiny, *RUN, *EVERY_STEP, *own, f"runs={tmp_path}")
    run = train(config, Reporter()).folder
    start = load_file(tiny / "model.safetensors")
    expected = mixed(start, weights_of(run, 2, "policy"), 0.5)
    assert_close(weights_of(run, 2, name), expected)
    assert any((expected[key] - start[key].double()).abs().max() > 1e-4 for key in start)


@pytest.mark.parametrize(
    ("recipe", "words", "key"),
    [
        ("grpo", [*SYNCED, "training.steps=1"], "training.steps"),
        ("simpo", ["method.reference_sync_every=2"], "method.reference_sync_every"),
        (
            "distill",
            [*SELF_DISTILL, "method.refresh=true", "method.teacher_sync_every=1"],
            "method.teacher_sync_every",
        ),
    ],
)
def test_settings_without_effect_are_refused(recipe, words, key, tiny, tmp_path, capsys):
    words = overrides_of(tiny, *toy_run(), *words, f"runs={tmp_path / 'runs'}")
    assert main(["train", recipe, *words]) == 2
    assert key in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "synced"},
        {"kind": "synced", "sync_every": 1, "path": "other/model"},
        {"kind": "synced", "sync_every": 1, "share": 0.0},
        {"kind": "frozen", "sync_every": 1},
    ],
)
def test_roles_that_cannot_follow_are_refused(arguments):
    with pytest.raises(ConfigError, match="Role"):
        Role(**arguments)


OWN = """
from postgrad.methods.grpo import Grpo
from postgrad.methods.ports import Role


class Own(Grpo):
    def roles(self):
        return {NAME: Role("synced", sync_every=1, share=0.1)}
"""


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("policy", [], "'policy'"),  # a checkpoint would have the copy in place of the policy
        ("a/b", [], "'a/b'"),
        ("state.json", [], "'state.json'"),
        ("reference", ["method.reference_sync_every=2"], "method.reference_sync_every"),
    ],
)
def test_copies_of_an_own_method_that_cannot_work_are_refused(
    name, words, expected, tiny, tmp_path, capsys
):
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("NAME", repr(name)))
    words = overrides_of(tiny, *toy_run(), *words, f"method={file}:Own", f"runs={tmp_path / 'r'}")
    assert main(["train", "grpo", *words]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


NOT_MOVED = """
    def publish(self, batch, step):
        return batch
"""


def test_a_publish_of_ones_own_that_moves_no_copy_ends_the_run(tiny, verifier, tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("NAME", "'ema'") + NOT_MOVED)
    words = overrides_of(tiny, *toy_run(), verifier, f"method={file}:Own", f"runs={tmp_path}")
    assert main(["train", "grpo", *words]) == 1
    assert "super().publish" in capsys.readouterr().err
    file.write_text(OWN.replace("NAME", "'ema'"))
    assert main(["train", "grpo", *words, "name=moved"]) == 0
    assert [line["ema/synced"] for line in metrics_of(tmp_path / "moved")] == [1, 1]
