"""Methods that learn from preferences: they learn on held-out pairs, and refuse other data."""

from pathlib import Path

import pytest
import torch
from jsonl import write_jsonl
from method_runs import bound, run

from postgrad.data.problems import problems_of_rows
from postgrad.data.rows.labels import label_of
from postgrad.errors import ConfigError
from postgrad.methods.kto import mismatch
from postgrad.types import Batch, Trajectory

STEPS = (
    "optimizer.lr=3e-3",
    "optimizer.warmup_steps=0",
    "training.problems_per_step=24",
    "training.checkpoint_every=1000",
)


def pair_overrides(folder: Path, labeled: bool = False) -> list[str]:
    """Data whose chosen answer repeats the first digit, the rejected one the second.

    Every fifth pair is held out. Labeled data have one response per row instead.
    """
    rows = []
    for a in range(10):
        for b in range(10):
            if a == b:
                continue
            pair = {"prompt": f"{a}+{b}=", "chosen": str(a) * 3, "rejected": str(b) * 3}
            if labeled:
                label = (a + b) % 2 == 0
                response = pair["chosen" if label else "rejected"]
                pair = {"prompt": pair["prompt"], "completion": response, "label": label}
            rows.append(pair | {"uid": f"{a}{b}"})
    train = write_jsonl(folder / "train.jsonl", *[row for i, row in enumerate(rows) if i % 5])
    held = write_jsonl(folder / "held.jsonl", *rows[::5])
    return [f"data.train={train}", f"data.validation={held}"]


NAMES = ("margin", "accuracy", "reward_chosen", "reward_rejected")
LEARNERS = ["dpo_norm", "dpo_sft", "ipo", "simpo"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["dpo", "kto", "orpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in LEARNERS)],
)
def test_held_out_pairs_are_told_apart(recipe, fresh, tmp_path):
    data = pair_overrides(tmp_path, labeled=recipe == "kto")
    steps = 60 if recipe == "dpo" else 40
    lines = run(recipe, fresh, tmp_path, *data, *STEPS, f"training.steps={steps}")
    first, last = [line for line in lines if "validation/accuracy" in line]
    # A model of random weights prefers neither.
    assert first["validation/accuracy"] < 0.75, first
    assert last["validation/accuracy"] > 0.85, last
    logged = [line for line in lines if "grad_norm" in line]
    if recipe == "kto":
        assert {"kto/accuracy", "kto/kl"} <= logged[0].keys()
        return
    assert {f"dpo/{name}" for name in NAMES} <= logged[0].keys()
    if recipe in ("dpo_sft", "orpo"):
        losses = [line["dpo/sft_loss"] for line in logged]
        assert losses[-1] < losses[0] - 0.5, losses
    if recipe == "dpo":  # the policy starts as its reference
        assert abs(logged[0]["dpo/margin"]) < 1e-6 and first["validation/margin"] == 0.0
        assert sum(line["dpo/margin"] for line in logged[-3:]) / 3 > 1.0
        assert sum(line["dpo/accuracy"] for line in logged[-3:]) / 3 > 0.95
        assert last["validation/margin"] > 0.5


def test_online_dpo_pairs_best_and_worst(fresh):
    scores = iter([0.0, 1.0, 0.5, 1.0] + [0.25] * 4 + [1.0, None, 0.0, 0.5] + [0.5] * 4)
    world = bound("online_dpo", fresh, "rollout.samples=4", value=lambda text: next(scores))
    batch = world.until("estimate")
    # The failed row has left the third group.
    preference = batch.rows["preference"].tolist()
    assert preference == [-1, 1, 0, 0, *[0] * 4, 1, -1, 0, *[0] * 4]
    assert world.metrics["dpo/groups_with_pair"] == 0.5
    batch.tokens["reference_logprobs"] = torch.zeros(batch.num_tokens)
    pairs = world.method.objective.prepare(batch)
    assert pairs.rows["index"].tolist() == [1, 0, 0, 1]
    assert pairs.rows["pair_weight"].tolist() == [0.5] * 4


def test_kto_mismatches_prompts_and_responses():
    rows = [
        Trajectory("a", [1], [2, 3], group=0),
        Trajectory("a", [1], [4], group=0, index=1),
        Trajectory("b", [5, 6], [7], group=1),
    ]
    mixed = mismatch(Batch.of(rows))
    assert [ids.tolist() for ids in mixed.prompt.split()] == [[1], [1], [5, 6]]
    assert [ids.tolist() for ids in mixed.response.split()] == [[7], [7], [2, 3]]
    assert mixed.tokens["loss_mask"].numel() == mixed.num_tokens == 4


@pytest.mark.parametrize(
    ("value", "label"),
    [
        *((value, True) for value in (True, 1, 1.0, "True", "true")),
        *((value, False) for value in (False, 0, "0", "False")),
        *((value, None) for value in ("good", 2, None)),
    ],
)
def test_kto_reads_labels_as_files_write_them(value, label):
    (problem,) = problems_of_rows([{"prompt": "1+1=", "completion": "2", "label": value}], "rows")
    assert label_of(problem) is label


@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_kto_reports_data_with_one_label(column, fresh):
    def notes(*labels: bool) -> list[str]:
        rows = [{"prompt": "1+1=", "completion": "2", column: label} for label in labels]
        method = bound("kto", fresh).method
        problems = problems_of_rows(rows, "rows")
        method.check_problems(problems)
        return method.data_notes(method.ports.encoder, problems)

    assert notes(True, False) == []
    (note,) = notes(True, True)
    assert "all 2 responses of data.train are desirable" in note
    (note,) = notes(False, False)
    assert "all 2 responses of data.train are undesirable" in note


def test_kto_counts_a_pair_as_both_labels(fresh):
    method = bound("kto", fresh, "method.desirable_weight=0").method
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    problems = problems_of_rows([pair, pair], "rows")
    method.check_problems(problems)
    assert method.data_notes(method.ports.encoder, problems) == []


@pytest.mark.parametrize(("label", "name"), [(True, "desirable"), (False, "undesirable")])
def test_kto_refuses_a_weight_of_0_for_the_only_label(label, name, fresh):
    rows = [{"prompt": "1+1=", "completion": "2", "label": label}] * 2
    problems = problems_of_rows(rows, "rows")
    method = bound("kto", fresh, f"method.{name}_weight=0").method
    with pytest.raises(ConfigError, match=f"method.{name}_weight=0"):
        method.check_problems(problems)
    method.check_validation_problems(problems)  # a held-out set may have one label
