"""Process reward models: they learn held-out steps, are stock classifiers, and score rollouts."""

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from method_runs import SMALL, VERIFIERS, run
from tiny_runs import config_of

from postgrad.data.render import Prompts
from postgrad.data.scored_rows import stepwise_ids
from postgrad.errors import ConfigError
from postgrad.methods.process_reward_model import NO_STEP, ProcessRewardModel, steps_of
from postgrad.methods.support.reward_models import StepVerifier
from postgrad.model.load import load, load_tokenizer
from postgrad.model.loaded import Loaded
from postgrad.model.process_reward_model import (
    BIAS,
    StepModel,
    StepPolicy,
    scores_steps,
    separator_of,
)
from postgrad.model.reward_model import SCORE
from postgrad.model.tiny import make_tiny
from postgrad.problem import Failure, Problem, Score
from postgrad.types import Batch
from postgrad.verifiers.model_terms import ModelTerm, model_terms
from postgrad.verifiers.scorer import Scorer

CPU = torch.device("cpu")
SEPARATOR = "="
RECIPE = "process_reward_model"
OWN = f"method.step_separator='{SEPARATOR}'"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "fresh", seed=0, layers=2, width=32)


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def problem(steps=("12", "74"), labels=(False, True)) -> Problem:
    messages = ({"role": "user", "content": "1+1="},)
    return Problem("p", messages, "", extra={"completions": list(steps), "labels": list(labels)})


def stepwise_rows(number: int) -> list[dict]:
    """Rows of one to three steps; a step is right if it has a seven."""
    draw = random.Random(0)
    rows = []
    for i in range(number):
        steps = ["".join(draw.choices("0123477", k=3)) for _ in range(draw.randint(1, 3))]
        labels = ["7" in step for step in steps]
        rows.append({"uid": str(i), "prompt": f"{i % 10}+1=", "completions": steps})
        rows[-1]["labels"] = labels
    return rows


@pytest.fixture(scope="module")
def trained(fresh, tmp_path_factory) -> tuple[list[dict], Path]:
    """(metrics, folder) of a process reward model."""
    folder = tmp_path_factory.mktemp(RECIPE)
    rows = stepwise_rows(160)
    lines = run(
        RECIPE,
        fresh,
        folder,
        f"data.train={write(folder / 'train.jsonl', rows[:128])}",
        f"data.validation={write(folder / 'held.jsonl', rows[128:])}",
        OWN,
        "name=test",
        "optimizer.lr=5e-3",
        "rollout.max_response_tokens=12",
        "training.steps=40",
        "training.problems_per_step=16",
        "training.checkpoint_every=1000",
    )
    return lines, folder / "test" / "checkpoints" / "step-40" / "policy"


def make_method(folder: Path) -> ProcessRewardModel:
    config = config_of(RECIPE, folder, *SMALL, OWN)
    method = ProcessRewardModel(config)
    prompts = Prompts(load_tokenizer(config.model), "plain")
    method.ports = type("", (), {"prompts": prompts})()  # type: ignore[assignment]
    return method


@pytest.mark.slow
def test_it_labels_held_out_steps(trained):
    lines, _ = trained
    first, last = (line for line in lines if "validation/accuracy" in line)
    assert first["validation/accuracy"] < 0.8 and last["validation/accuracy"] > 0.9
    assert last["validation/loss"] < first["validation/loss"] / 2
    steps = [line for line in lines if f"{RECIPE}/accuracy" in line]
    assert steps[-1][f"{RECIPE}/accuracy"] > 0.9


def test_a_label_is_at_the_token_after_its_step(fresh):
    """Scores are read before a token: "12=74=" and the end have labels at "7" and at the end."""
    method = make_method(fresh)
    row = method.stepwise_row(problem())
    assert row.tokens["step_label"] == [NO_STEP, NO_STEP, NO_STEP, 0.0, NO_STEP, NO_STEP, 1.0]
    assert method.ports.prompts.decode(list(row.response)) == "12=74="
    batch = method.prepare(Batch.of([row]))
    assert batch.tokens["step_weight"].tolist() == [0, 0, 0, 0.5, 0, 0, 0.5]


def test_steps_that_are_too_long_are_refused_or_dropped(fresh):
    """The steps "12=74=" have 6 tokens, "1=" has 2."""
    method = make_method(fresh)
    tokenizer = load_tokenizer(method.config.model)
    short = problem(("1",), (True,))
    dropping = method.row_encoder(Prompts(tokenizer, "plain", overlong="drop"))
    assert dropping.drop_overlong_demonstrations([short, problem()], 5) == ([short], 1)
    refusing = method.row_encoder(Prompts(tokenizer, "plain"))
    assert refusing.drop_overlong_demonstrations([short, problem()], 6)[1] == 0
    with pytest.raises(ConfigError, match=r"rollout\.max_response_tokens"):
        refusing.drop_overlong_demonstrations([short, problem()], 5)


@pytest.mark.slow
def test_the_folder_is_a_stock_classifier_with_the_same_scores(trained):
    from transformers import AutoModelForTokenClassification

    _, folder = trained
    stock = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert stock.config.id2label == {0: "wrong", 1: "right"}
    config = config_of("grpo", folder)
    assert scores_steps(config.model) and separator_of(config.model) == SEPARATOR
    method = make_method(folder)
    prompts: Prompts = method.ports.prompts  # type: ignore[assignment]
    inputs = [stepwise_ids(prompts, problem(), steps, "=") for steps in (["12", "74"], ["7"])]
    expected = []
    for ids, ends in inputs:
        with torch.no_grad():
            right = stock(input_ids=torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
        expected += [float(right[end - 1]) for end in ends]
    assert expected[0] < 0.5 < expected[1] and expected[2] > 0.5
    rows, ends = zip(*inputs, strict=True)
    scores = StepModel(config.model, CPU).step_scores(rows, ends)
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-5)
    # Training continues from the folder with the same head and the same scores.
    policy = StepPolicy(method.config, load(method.config.model, CPU, uses_lm_head=False), method)
    batch = Batch.of([method.stepwise_row(problem())])
    logits = policy.logprobs(batch)["scores"][batch.tokens["step_label"] != NO_STEP]
    torch.testing.assert_close(logits.sigmoid(), torch.tensor(expected[:2]), rtol=0, atol=1e-5)


def test_a_head_with_two_outputs_becomes_their_difference(fresh):
    """Folders that others trained have weights for both labels."""
    method = make_method(fresh)
    policy = StepPolicy(method.config, load(method.config.model, CPU, uses_lm_head=False), method)
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(2, 32, generator=draw), torch.randn(2, generator=draw)
    with torch.no_grad():
        policy.read_head({SCORE: weight, BIAS: bias})
        hidden = torch.randn(5, 32, generator=draw)
        right = (hidden @ weight.T + bias).softmax(-1)[:, 1]
        torch.testing.assert_close(policy.head(hidden)[:, 0].sigmoid(), right)
        before = policy.head.weight.clone()
        policy.read_head({SCORE: torch.ones(3, 32)})  # another number of labels
        assert torch.equal(policy.head.weight, before)


def test_checkpoints_continue_with_the_same_bytes(fresh, tmp_path):
    method = make_method(fresh)
    loaded = load(method.config.model, CPU)
    first, second = (
        StepPolicy(method.config, Loaded(copy.deepcopy(loaded.model), loaded.tokenizer), method)
        for _ in range(2)
    )
    with torch.no_grad():
        for p in (*first.model.parameters(), *first.head.parameters()):
            p.add_(0.01)
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    for mine, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(first.head.weight, second.head.weight)
    assert torch.equal(first.head.bias, second.head.bias)


class Given:
    """A process reward model with these probabilities, whatever it reads."""

    def __init__(self, *values: float) -> None:
        self.values = values
        self.ends: list[list[int]] = []

    def scores(self, rows):
        raise NotImplementedError

    def step_scores(self, rows, ends):
        self.ends = [list(of_row) for of_row in ends]
        return torch.tensor(self.values)


@pytest.mark.parametrize(
    ("step_score", "expected"), [("", 0.5), ("min", 0.5), ("product", 0.3), ("mean", 0.55)]
)
def test_the_score_of_a_response_by_hand(fresh, step_score, expected):
    """Two steps with 0.6 and 0.5, then none, then one with 0.25; the prompt has four tokens."""
    prompts = make_method(fresh).ports.prompts
    model = Given(0.6, 0.5, 0.25)
    verifier = StepVerifier(model, prompts, SEPARATOR, step_score)  # type: ignore[arg-type]
    scores = verifier.score([problem()] * 3, ["12==345", "=", "7"])
    assert [one.value for one in scores if isinstance(one, Score)] == pytest.approx(
        [expected, 0.0, 0.25]
    )
    assert model.ends == [[4 + 3, 4 + 7], [], [4 + 2]], "an empty step is none"


def test_a_conversation_that_is_too_long_is_a_failure(trained):
    _, folder = trained
    config = config_of("grpo", folder)
    model = StepModel(config.model, CPU)
    model.context = 9
    prompts = Prompts(load_tokenizer(config.model), "plain")
    verifier = StepVerifier(model, prompts, SEPARATOR, "min")
    long, short = verifier.score([problem()] * 2, ["123=456", "7"])
    assert isinstance(long, Failure) and isinstance(short, Score)


def test_terms_name_how_steps_are_scored(trained, fresh, tmp_path):
    assert model_terms("exact + 0.5*model:/a/b#mean") == [
        ModelTerm(0.5, "/a/b", "reward_model", "mean")
    ]
    with pytest.raises(ConfigError, match=r"#maen.*mean"):
        Scorer("model:/a/b#maen")
    pairs = [{"prompt": f"{i}+1=", "chosen": "7", "rejected": "3"} for i in range(9)]
    data = write(tmp_path / "pairs.jsonl", pairs)
    run("reward_model", fresh, tmp_path, f"data.train={data}", "name=rm")
    folder = tmp_path / "rm" / "checkpoints" / "step-2" / "policy"
    with pytest.raises(ConfigError, match=r"whole responses.*remove #mean"):
        run("grpo", fresh, tmp_path, f"reward.verifier=model:{folder}#mean", "name=x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("steps", "labels"),
    [
        ([], []),
        (["1"], []),
        (["1", "2"], [True]),
        ("12", [True, True]),
        (["1", " "], [True, True]),
        (["1", 2], [True, True]),
        (["1"], [None]),
        (["1"], [0.5]),
    ],
)
def test_rows_without_labeled_steps_are_refused(steps, labels):
    row = Problem("p", (), "", extra={"completions": steps, "labels": labels})
    with pytest.raises(ConfigError, match="problem p"):
        steps_of(row)


def test_labels_may_be_numbers():
    assert steps_of(problem(labels=(0, 1))) == (["12", "74"], [False, True])


@pytest.mark.slow
def test_policies_learn_from_it(trained, fresh, tmp_path):
    verifiers = tmp_path / "mine.py"
    verifiers.write_text(VERIFIERS)
    lines = run(
        "grpo",
        fresh,
        tmp_path,
        f"reward.verifier=model:{trained[1]}#mean + 0.0*{verifiers}:sevens",
        "optimizer.lr=5e-3",
        "training.steps=20",
        "training.problems_per_step=8",
        "rollout.samples=8",
        "training.checkpoint_every=1000",
    )
    scores = [line["reward/reward_model"] for line in lines]
    sevens = [line[f"reward/{verifiers}:sevens"] for line in lines]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.2, scores
    assert sum(sevens[-3:]) / 3 > sum(sevens[:3]) / 3 + 0.1, sevens


@pytest.mark.slow
def test_a_child_process_gives_the_same_scores(trained, fresh, tmp_path):
    values = []
    for backend in ("local", "process"):
        overrides = (f"reward.verifier=model:{trained[1]}", f"cluster.backend={backend}")
        lines = run("grpo", fresh, tmp_path / backend, *overrides)
        values.append([line["reward/mean"] for line in lines])
    assert values[0] == values[1]
