"""Classmate-CoT: complete runs, what is learned, and a model that judges."""

import json

import pyarrow.parquet as pq
import pytest
import yaml
from classmate_models import END, FOUR, Setting
from method_runs import SMALL, build_tokenizer, run
from openai_server import MODEL, serve
from refused import refused
from serve_process import command
from tiny_runs import config_of, metrics_of, metrics_without_timing, overrides_of

from postgrad.cli.main import main
from postgrad.cluster.backends import open_models
from postgrad.cluster.host import build_host
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.errors import ConfigError
from postgrad.methods.method import Step
from postgrad.rollout.engine import Completion
from postgrad.rollout.served_path import parse_served_path
from postgrad.training.warmup import warmup_config
from postgrad.types import Score

# ---- whole runs


VERIFIER = "def sevens(response, problem):\n    return response.count('7') / 4\n"


RUN = ("method.classmate_max_tokens=4", "optimizer.lr=5e-3", "method.condition=always")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    file = tmp_path_factory.mktemp("verifier") / "mine.py"
    file.write_text(VERIFIER)
    return f"reward.verifier={file}:sevens"


@pytest.mark.slow
def test_a_run_goes_the_same_way_wherever_the_classmates_are(tiny, verifier, tmp_path):
    """Greedy classmates in this process, a child process or behind a server give equal runs.

    `postgrad serve` writes the mapping file, and takes its entry away at its end.
    """
    overrides = (
        *RUN,
        verifier,
        "method.classmate_temperature=0",
        "training.steps=2",
        "method.reward_type=remove_wo_cot",
    )
    host = build_host(config_of("grpo", tiny))
    prompts = Encoder(build_tokenizer(config_of("grpo", tiny)), "plain")
    mapping = tmp_path / "servers.json"
    words = (str(tiny), "--name", "mate", "--servers", str(mapping), "--threads", "1")
    with serve(engine=host.engine, prompts=prompts) as served, command(*words):
        places = {
            "here": ["method.classmates=['']"],
            "path": [f"method.classmates=['{tiny}']"],
            "http": [f"method.classmates=['{served.url}?tokenizer={tiny}#{MODEL}']"],
            "file": [f"method.classmates=['{mapping}#mate']"],
            "child": ["method.classmates=['']", "cluster.backend=process"],
        }
        for name, more in places.items():
            run("classmate", tiny, tmp_path, *overrides, *more, f"name={name}")
    assert json.loads(mapping.read_text()) == {}
    metrics = {name: metrics_without_timing(tmp_path / name) for name in places}
    rows = {
        name: pq.read_table(tmp_path / name / "rollouts" / "step-000002.parquet").column(
            "classmate_texts"
        )
        for name in places
    }
    assert len(metrics["here"]) == 2 and metrics["here"][0]["grad_norm"] > 0
    for name in places:
        assert rows[name] == rows["here"] and metrics[name] == metrics["here"], name


def test_what_a_role_s_path_means(tiny, tmp_path):
    assert parse_served_path("http://h:8/v1?tokenizer=/t#m") == (
        "http://h:8/v1#m",
        "/t",
    ) and parse_served_path("https://h/v1#m") == (
        "https://h/v1#m",
        "m",
    )
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"a/b": {"local_host": "h", "port": 8}, "bad": {"port": 1}}))
    assert parse_served_path(f"{file}#a/b") == ("http://h:8/v1#a/b", "a/b")
    for path, message in {
        f"{file}#a/c": r"did you mean a/b\?",
        f"{file}#bad": "needs local_host",
        "no.json#x": "No such file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_served_path(path)
    nowhere = config_of("classmate", tiny, "method.classmates=[/no/such/x]")
    with refused("unreadable", "classmate-1"), open_models(nowhere):
        pass
    with open_models(config_of("classmate", tiny, "method.classmates=['policy:live']")) as placed:
        mate = placed.models["classmate-1"]
        assert mate.engine is placed.engine and mate.context == 512
        full, fits = mate.generate([[1] * 512, [1] * 510], [[0], [0]], sampling(9))
        assert full is None and isinstance(fits[0], Completion)


def sampling(limit):
    from postgrad.rollout.engine import Sampling

    return Sampling(1.0, limit)


@pytest.mark.slow
def test_a_warm_up_and_then_classmates_are_one_command(tiny, verifier, tmp_path):
    overrides = overrides_of(
        tiny,
        *SMALL,
        *RUN,
        verifier,
        f"runs={tmp_path}",
        'warmup.overrides=["training.steps=3","optimizer.lr=5e-3"]',
    )
    assert main(["train", "classmate_warmup_small", *overrides]) == 0
    first, second = metrics_of(tmp_path / "test-warmup"), metrics_of(tmp_path / "test")
    assert len(first) == 3 and len(second) == 2
    assert not any("classmate/asked" in line for line in first) and all(
        line["classmate/asked"] > 0 for line in second
    )
    warm = tmp_path / "test-warmup" / "checkpoints" / "step-3" / "policy"
    assert yaml.safe_load((tmp_path / "test" / "config.yaml").read_text())["model"]["path"] == str(
        warm
    )
    assert (warm / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes(), (
        "and it moved"
    )
    assert main(["train", "classmate_warmup_small", *overrides]) == 0
    assert (
        metrics_of(tmp_path / "test-warmup") == first and metrics_of(tmp_path / "test") == second
    ), "nothing is left to do"


@pytest.mark.slow
def test_thoughts_learn_to_help(tmp_path, verifier):
    """The classmate repeats the thought's last character, and a single seven scores 1.

    The policy's own output is six characters and scores 0, so only the classmate's reward teaches.
    """
    from postgrad.model.load.tiny import make_tiny

    fresh = make_tiny(tmp_path / "fresh", seed=0, layers=2, width=32)
    overrides = (
        "method.cot_start=''",
        "method.cot_end=''",
        "method.reward_type=vanilla",
        "method.condition=always",
        "optimizer.lr=5e-3",
    )
    config = config_of(
        "classmate", fresh, *SMALL, *overrides, "training.problems_per_step=8", "rollout.samples=8"
    )
    s = Setting(
        config,
        FOUR,
        reply=lambda prompt, seed: [prompt[-1], END],
        value=lambda text: float(text == "7"),
    )
    score = s.scorer.score
    s.scorer.score = lambda problems, texts, *_: [
        Score(0.0) if len(t) != 1 else v for t, v in zip(texts, score(problems, texts), strict=True)
    ]
    rewards = []
    for number in range(1, 25):
        step = Step(number, ProblemQueue(s.problems, shuffle=False))
        work = None
        for stage in [*s.method.sampling_stages(), *s.method.learning_stages()]:
            work = stage(work, step)
        rewards.append(float(work.rows["reward/classmate"].mean()))
    assert sum(rewards[:2]) / 2 < 0.2 and sum(rewards[-3:]) / 3 > 0.7, rewards


# ---- a model that judges


@pytest.mark.slow
def test_a_language_model_judges_any_method_and_a_monitor_reads_the_thoughts(tiny, tmp_path):
    """The judge gives the number of sevens after "The response:", the monitor always says 3."""

    def judge(text):
        part = text.split("The response:\n")[-1].split("\n")[0] if "The response:" in text else ""
        return (
            f"EXPLANATION: it has 99 of them\nRATING: {1 + part.count('7')}"
            if "The response:" in text
            else "RATING: 3"
        )

    with serve(chat=judge) as served:
        overrides = (
            "reward.verifier=llm_judge",
            f"reward.judge.model='{served.address}'",
            f"reward.judge.monitor='{served.address}'",
        )
        held_out = (
            "data.validation=arithmetic:1:digits:test",
            "training.steps=1",
            "method.classmate_max_tokens=4",
        )
        lines = run("classmate", tiny, tmp_path, *overrides, *held_out, "name=c")
        plain = run(
            "grpo",
            tiny,
            tmp_path,
            *overrides[:2],
            "training.steps=1",
            "reward.objective=minimize",
            "name=g",
        )
    step = next(line for line in lines if "reward/mean" in line)
    assert step["reward/rating"] == step["reward/mean"] >= 1 and step["reward/classmate"] >= 1
    metrics = lines[-1]
    assert (
        metrics["validation/monitor/pairs"] > 0
        and metrics["validation/monitor/prediction_mean"] == 3
    )
    error = 3 - metrics["validation/monitor/rating_mean"]
    assert (
        metrics["validation/monitor/mse"] >= error**2 - 1e-6 and metrics["validation/accuracy"] >= 1
    )
    assert plain[-1]["reward/mean"] == -plain[-1]["reward/rating"] <= -1, "minimized"
    assert len((tmp_path / "c" / "judge.jsonl").read_text().splitlines()) > 1


@pytest.mark.slow
def test_a_monitor_stays_with_the_run_that_has_thoughts(tiny):
    overrides = ("reward.judge.monitor='http://a/v1#m'", "reward.timeout_s=3")
    for recipe, monitor in (("sft", ""), ("classmate_warmup", "http://a/v1#m")):
        first = warmup_config(config_of("classmate", tiny, *overrides, f"warmup.recipe={recipe}"))
        assert (first.reward.judge.monitor, first.reward.timeout_s) == (monitor, 3)
