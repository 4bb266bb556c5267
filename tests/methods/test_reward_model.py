"""Reward models: they learn held-out pairs, are stock classifiers, and score rollouts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from jsonl import write_jsonl
from method_runs import SMALL, run
from refused import refused
from tiny_runs import config_of

from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.reward_model import RewardModel as Method
from postgrad.model.load.load import load, load_tokenizer
from postgrad.model.scored import RewardModel, RewardPolicy
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.expression import parse_reward
from postgrad.verifiers.scorer import Scorer

CPU = torch.device("cpu")


def problem(question: str) -> Problem:
    return Problem("p", ({"role": "user", "content": question},), "")


@pytest.fixture(scope="module")
def trained(fresh, tmp_path_factory) -> tuple[list[dict], Path]:
    """(metrics, folder) of a reward model that prefers responses with more sevens."""
    folder = tmp_path_factory.mktemp("reward_model")
    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(160):
        digits = torch.randint(0, 10, (2, 5), generator=draw)
        texts = ["".join(map(str, row.tolist())) for row in digits]
        few, many = sorted(texts, key=lambda text: text.count("7"))
        many = many if many.count("7") > few.count("7") else "7" + many[1:]
        if many.count("7") == few.count("7"):
            few = few.replace("7", "1")
        pair = {"prompt": f"{i % 10}+1=", "chosen": many, "rejected": few}
        rows.append(pair | {"uid": str(i), "margin": 0.1})
    data = write_jsonl(folder / "train.jsonl", *rows[:128])
    held = write_jsonl(folder / "held.jsonl", *rows[128:])
    lines = run(
        "reward_model",
        fresh,
        folder,
        f"data.train={data}",
        f"data.validation={held}",
        "optimizer.lr=3e-3",
        "optimizer.warmup_steps=0",
        "training.steps=40",
        "training.problems_per_step=32",
        "training.checkpoint_every=1000",
    )
    return lines, folder / "test" / "checkpoints" / "step-40" / "policy"


@pytest.mark.slow
def test_it_orders_held_out_pairs(trained):
    lines, _ = trained
    steps = [line for line in lines if "reward_model/accuracy" in line]
    first, last = [line["validation/accuracy"] for line in lines if "validation/accuracy" in line]
    assert first < 0.75 and last > 0.9, (first, last)
    assert steps[-1]["reward_model/margin"] > steps[0]["reward_model/margin"] + 1
    scores = steps[-1]["reward_model/reward_chosen"], steps[-1]["reward_model/reward_rejected"]
    assert abs(sum(scores)) < 1.5, "centered"


@pytest.mark.slow
def test_the_folder_is_a_stock_classifier_with_the_same_scores(trained, fresh):
    from transformers import AutoModelForSequenceClassification

    _, folder = trained
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    assert stock.config.num_labels == 1 and type(stock).__name__ == "Qwen3ForSequenceClassification"
    config = config_of("reward_model", folder, *SMALL)
    prompts = Encoder(load_tokenizer(config.model), "plain")
    rows = [prompts.scored(problem("1+1="), text) for text in ("77", "1", "70707")]
    with torch.no_grad():
        expected = [float(stock(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    scores = RewardModel(config.model, CPU).scores(rows)
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-5)
    assert expected[0] > expected[1]
    # Training continues from the folder with the same score head and the same scores.
    method = Method(config)
    method.ports = type("", (), {"encoder": prompts})()  # type: ignore[assignment]
    policy = RewardPolicy(config, load(config.model, CPU, uses_lm_head=False), method.objective)
    pair = Problem("p", problem("1+1=").messages, "", extra={"chosen": "77", "rejected": "1"})
    batch = _batch(method.pair_rows(pair))
    tokens = policy.logprobs(batch)["scores"]
    last = tokens[batch.response.lengths.cumsum(0) - 1]
    torch.testing.assert_close(last, torch.tensor(expected[:2]), rtol=0, atol=1e-5)


def _batch(rows):
    from postgrad.types import Batch

    return Batch.of(rows)


def test_scores_start_near_zero(fresh):
    """The standard deviation of a new head is 1 / (width + 1), the width of this model is 32."""
    config = config_of("reward_model", fresh, *SMALL)
    policy = RewardPolicy(
        config, load(config.model, CPU), find_method("reward_model")(config).objective
    )
    assert 0.6 < float(policy.head.weight.detach().std()) * 33 < 1.5


def test_padding_at_the_end_is_never_scored(fresh):
    """transformers skips it; a tokenizer whose padding is its end token then has no end."""
    tokenizer = load_tokenizer(config_of("grpo", fresh).model)
    prompts = Encoder(tokenizer, "plain")
    ids = prompts.scored(problem("1+1="), "2")
    assert ids[-1] == tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.eos_token
    assert prompts.scored(problem("1+1="), "2") == ids[:-1]


def test_pairs_that_are_too_long_are_refused_or_dropped(fresh):
    """What the chat template writes after a response counts: "777==" has 5 tokens, not 4."""
    method = Method(config_of("reward_model", fresh))
    tokenizer = load_tokenizer(method.config.model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}=={% endfor %}"
    pairs = [
        Problem(chosen, problem("1+1").messages, "", extra={"chosen": chosen, "rejected": "1"})
        for chosen in ("77", "777")
    ]

    def fit(encoder: Encoder, limit: int) -> list[Problem]:
        return encoder.fit(pairs, partial(method.encode_row, encoder), limit)[0]

    assert fit(Encoder(tokenizer, "chat", overlong="drop"), 4) == pairs[:1]
    refusing = Encoder(tokenizer, "chat")
    assert fit(refusing, 5) == pairs
    with refused("too_large", "rollout.max_response_tokens"):
        fit(refusing, 4)
    truncating = Encoder(tokenizer, "chat", overlong="left", max_prompt_tokens=3)
    with refused("conflict", "data.overlong"):
        fit(truncating, 4)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_policies_learn_from_a_reward_model_in_a_sum(recipe, trained, fresh, verifiers, tmp_path):
    own = ("method.critic_lr=5e-3",) if recipe == "ppo" else ()
    lines = run(
        recipe,
        fresh,
        tmp_path,
        f"reward.verifier=0.2*model:{trained[1]} + 0.0*{verifiers}:sevens",
        "optimizer.lr=5e-3",
        "training.steps=25",
        "training.problems_per_step=8",
        "rollout.samples=8",
        "training.checkpoint_every=1000",
        *own,
    )
    scores = [line["reward/reward_model"] for line in lines]
    sevens = [line[f"reward/{verifiers}:sevens"] for line in lines]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 1, scores
    assert sum(sevens[-3:]) / 3 > sum(sevens[:3]) / 3 + 0.15, sevens
    assert abs(lines[0]["reward/mean"] - 0.2 * scores[0]) < 1e-5


def test_terms_of_a_sum():
    text = "math - 0.5*model:/a/b.c/d + 0.1*overlong(limit=5) + 2*model:org/name - 1"
    models = [(one.weight, one.model_path, one.role) for one in parse_reward(text).models]
    assert models == [(-0.5, "/a/b.c/d", "reward_model"), (2.0, "org/name", "reward_model-2")]
    assert [one.label for one in parse_reward(text).rules] == ["math", "overlong(limit=5)"]
    assert parse_reward("math").models == parse_reward("model:a/b").rules == []


def test_the_first_failure_of_rules_and_models_counts():
    class Model:
        def __init__(self, score):
            self.answer = score

        def score(self, problems, responses):
            return [self.answer]

    with Scorer("exact - 0.5*model:x + 2", workers=1) as scorer:
        right = Problem("p", problem("1+1=").messages, "2")
        scorer.reward_models = {"reward_model": Model(Score(4.0))}
        parts = {"exact": 1.0, "exact.answer": 1.0, "reward_model": 4.0}
        assert scorer.score([right], ["2"]) == [Score(1.0, parts)]
        scorer.reward_models = {"reward_model": Model(Failure("reward_model", "too long"))}
        assert scorer.score([right], ["2"]) == [Failure("reward_model", "reward_model: too long")]
        unusable = Problem("p", problem("1+1=").messages, "")
        (failure,) = scorer.score([unusable], ["2"])
        assert isinstance(failure, Failure) and failure.reason.startswith("exact: ")


def test_rules_and_models_are_added(trained, fresh):
    _, folder = trained
    with Scorer(f"2*exact + model:{folder}", workers=1) as scorer:
        with refused("unsupported", "reward.verifier"):
            scorer.score([problem("1+1=")], ["2"])

        class Seven:
            def score(self, problems, responses):
                return [Score(7.0) for _ in responses]

        scorer.reward_models = {"reward_model": Seven()}
        right = Problem("p", problem("1+1=").messages, "2")
        assert scorer.score([right], ["2"]) == [
            Score(9.0, {"exact": 1.0, "exact.answer": 1.0, "reward_model": 7.0})
        ]


def test_what_is_no_reward_model_is_refused(trained, fresh, tmp_path):
    for path, words in ((fresh, "not a reward model"), (tmp_path / "none", "no such folder")):
        with pytest.raises(ConfigError, match=words) as caught:
            run("grpo", fresh, tmp_path / "runs", f"reward.verifier=model:{path}")
        assert f"reward.verifier=model:{path}: " in str(caught.value)
        assert "model.path" not in str(caught.value)
    with refused("wrong_value", "reward.verifier"):
        Scorer("model:http://host/v1#model")
    pairs = [
        {"prompt": f"{i}+1=", "chosen": "2", "rejected": "3", "margin": "wide"} for i in range(9)
    ]
    data = write_jsonl(tmp_path / "pairs.jsonl", *pairs)
    with refused("wrong_value", "margin"):
        run("reward_model", fresh, tmp_path / "runs", f"data.train={data}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_child_process_gives_the_same_scores(trained, fresh, tmp_path):
    """Both where the reward model is a verifier and where it is trained."""
    _, folder = trained
    pairs = [{"prompt": f"{i}+1=", "chosen": "7", "rejected": "3"} for i in range(9)]
    data = write_jsonl(tmp_path / "pairs.jsonl", *pairs)
    runs = {
        "grpo": (f"reward.verifier=model:{folder}", "reward/mean"),
        "reward_model": (f"data.train={data}", "reward_model/margin"),
    }
    for recipe, (override, metric) in runs.items():
        values = []
        for backend in ("local", "process"):
            folder = tmp_path / recipe / backend
            lines = run(recipe, fresh, folder, override, f"cluster.backend={backend}")
            values.append([line[metric] for line in lines])
        assert values[0] == values[1], recipe
