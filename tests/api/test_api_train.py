"""postgrad.train, Trainer and Run on a tiny model."""

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from api_rows import ROWS, odd
from refused import refused
from tiny_runs import metrics_without_timing, tree
from transformers import AutoModelForCausalLM, AutoTokenizer

import postgrad
from postgrad.algorithms.losses import TokenLoss
from postgrad.api.rows import as_problems
from postgrad.methods.grpo import Grpo
from postgrad.training.log import RunLog

WEIGHTS = "checkpoints/step-3/policy/model.safetensors"


def weights(run: postgrad.Run) -> bytes:
    return (run.folder / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_data_in_every_form_becomes_the_same_rows(small):
    import datasets
    import pandas
    import polars
    import pyarrow

    forms = [pandas.DataFrame, polars.DataFrame, datasets.Dataset.from_list, tuple, iter]
    forms.append(pyarrow.Table.from_pylist)
    expected = postgrad.Trainer(**small)._request.files
    for make in forms:
        given = postgrad.Trainer(**small | {"data": make(ROWS)})._request.files
        assert given == expected and expected, make


def trl_odd(completions, ground_truth, **columns):
    assert len(completions) == len(ground_truth) == 16
    return [odd(text, None) for text in completions]


@pytest.mark.slow
def test_a_reward_function_of_trl_gives_the_same_weights(small):
    ours = postgrad.train(**small)
    trl = postgrad.train(**small | {"reward": trl_odd, "name": "trl"})
    assert weights(ours) == weights(trl)


def test_problems_are_given_as_data():
    """A list of Problems is read as the rows from which they were read."""
    message = {"role": "user", "content": "1+1="}
    reply = {"role": "assistant", "content": "2"}
    rows = {
        "ground truth": {"prompt": "1+1=", "ground_truth": "2", "topic": "sums"},
        "demonstration": {"prompt": "1+1=", "response": "2"},
        "verl": {"prompt": [message], "reward_model": {"ground_truth": "2", "style": "rule"}},
        "pair": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        "conversation": {"messages": [message, reply, message, reply], "tools": [{"name": "add"}]},
        "text": {"text": "1+1=2"},
        "completion": {"prompt": [message], "completion": [reply, message, reply]},
    }
    for name, row in rows.items():
        problems = as_problems([row])
        assert as_problems(problems) == problems, name


@pytest.mark.slow
def test_a_run_has_metrics_rollouts_pictures_and_a_model(small, folder):
    run = postgrad.train(**small, validation={"low": ROWS[:3], "high": ROWS[-3:]})
    assert run.metrics.loc[3, "reward/mean"] > 0
    assert run.metrics.loc[0, "validation/low/accuracy"] >= 0
    assert list(run.metrics.index) == [0, 1, 2, 3]
    rollouts = run.rollouts(step=2)
    assert len(rollouts) == 16 and {"text", "reward", "advantages"} <= set(rollouts)
    assert run.rollouts().equals(run.rollouts(3))
    assert list(run.rollouts().columns)[:3] == ["text", "reward", "question"]
    run.plot("curves.png")
    assert Path("curves.png").stat().st_size > 10_000
    assert isinstance(run.generate("1+1="), str)
    assert [len(texts) for texts in run.generate(["1+1=", "2+1="], n=3)] == [3, 3]
    assert run.generate("1+1=", n=2, seed=1) != run.generate("1+1=", n=2, seed=2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run.save("out")), run.load()[1]
    assert model.config.vocab_size >= len(tokenizer)
    assert repr(postgrad.Run("runs/test")) == repr(run)  # a finished run is opened by its folder


@pytest.mark.slow
def test_the_page_of_a_run_is_served_until_it_is_stopped(small):
    import httpx

    run = postgrad.train(**small)
    page = run.view()
    try:
        answer = httpx.get(page.url)
        assert "Postgrad" in answer.text
        assert repr(page) == page.url
        # A notebook of this machine may frame it, other sites may not.
        assert f'<iframe src="{page.url}"' in page._repr_html_()
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors http://localhost:*" in policy
        assert "frame-ancestors *" not in policy
    finally:
        page.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(page.url)


@pytest.mark.slow
def test_a_loop_that_is_stopped_and_resumed_gives_the_same_bytes(small):
    whole = postgrad.train(**small | {"runs": "whole"})
    with postgrad.Trainer(**small) as trainer:
        for step in trainer:
            assert step.rewards.shape == (16,) and len(step.responses) == 16
            if step.number == 1:
                break
        assert trainer.save().name == "step-1"
    assert trainer.run.interrupted
    numbers = [step.number for step in trainer.resume()]
    assert numbers == [2, 3]
    assert tree(trainer.folder / "checkpoints")  # something is compared
    assert (trainer.folder / WEIGHTS).read_bytes() == weights(whole)
    assert metrics_without_timing(trainer.folder) == metrics_without_timing(whole.folder)


@pytest.mark.slow
def test_a_changed_learning_rate_is_used_and_survives_a_resume(small):
    def train(runs: str, stops: bool) -> postgrad.Run:
        trainer = postgrad.Trainer(**small | {"runs": runs})
        for step in trainer:
            if step.number == 1:
                trainer.lr = 1e-5
            if step.number == 2 and stops:
                trainer.stop()
        return trainer.resume().train() if stops else trainer.run

    once, twice = train("once", False), train("twice", True)
    assert list(once.metrics["lr"]) == [3e-3, 1e-5, 1e-5]
    assert weights(once) == weights(twice) != weights(postgrad.train(**small))


@pytest.mark.slow
def test_a_reopened_trainer_reports_the_learning_rate_of_its_checkpoint(small):
    with postgrad.Trainer(**small) as trainer:
        assert trainer.lr == 3e-3
        next(trainer)
        trainer.lr = 1e-5
    assert trainer.lr == 1e-5
    with postgrad.Trainer(**small) as reopened:
        assert reopened.lr == 1e-5
        next(reopened)
        assert reopened.lr == 1e-5


@pytest.mark.parametrize("lr", ["x", None, True, 0, -1e-5, float("nan")])
def test_a_learning_rate_that_is_no_number_above_0_is_refused(small, lr):
    with postgrad.Trainer(**small) as trainer, refused("wrong_value", "optimizer.lr"):
        trainer.lr = lr


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_the_same_call_continues(small, capfd):
    def interrupt(step: postgrad.StepResult) -> None:
        if step.number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    run = postgrad.train(**small | {"progress": True}, callbacks=[interrupt])
    assert run.interrupted and run.step == 2
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("saved at step 2 of 3 in runs/test; the same call continues it") == 1
    assert len(lines) == len(set(lines))  # nothing is printed twice
    assert postgrad.train(**small).step == 3
    assert capfd.readouterr().out == ""
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_callbacks_see_every_event_and_may_stop_the_run(small):
    seen: list[Any] = []

    class Log(postgrad.Callback):
        def on_train_begin(self, trainer):
            seen.append(("begin", trainer.step))

        def on_step_end(self, trainer, step):
            seen.append(("step", step.number))
            if step.number == 2:
                trainer.stop()

        def on_evaluate(self, trainer, step, metrics):
            seen.append(("evaluate", step))

        def on_save(self, trainer, checkpoint):
            seen.append(("save", checkpoint.name))

        def on_train_end(self, trainer):
            seen.append(("end", trainer.step))

    postgrad.train(**small, validation=ROWS[:2], callbacks=[Log()])
    assert seen == [
        ("begin", 0),
        ("evaluate", 0),
        ("step", 1),
        ("step", 2),
        ("save", "step-2"),
        ("end", 2),
    ]
    seen.clear()

    class Slower(Log):
        def on_train_begin(self, trainer):
            super().on_train_begin(trainer)
            trainer.lr = 1e-5

    run = postgrad.train(**small, validation=ROWS[:2], callbacks=[Slower()])
    assert seen == [("begin", 2), ("step", 3), ("evaluate", 3), ("save", "step-3"), ("end", 3)]
    assert run.metrics.loc[3, "lr"] == 1e-5


@pytest.mark.nightly
def test_rewards_of_every_kind_score(small):
    async def later(response, problem):
        await asyncio.sleep(0)
        return odd(response, problem)

    class Batch:
        def score(self, problems, responses):
            return [odd(one, None) for one in responses]

    limit = 4
    closure = lambda response, problem: odd(response, problem) * limit / 4  # noqa: E731
    runs = [
        postgrad.train(**small | {"reward": reward, "name": f"run-{number}"})
        for number, reward in enumerate((odd, later, closure, Batch()))
    ]
    assert len({weights(run) for run in runs}) == 1
    several = postgrad.train(
        **small | {"reward": [odd, "exact"], "name": "sum"}, reward_weights=[3.0, 0.5]
    )
    metrics = several.metrics.loc[1]
    expected = 3 * metrics["reward/odd"] + 0.5 * metrics["reward/exact"]
    assert metrics["reward/mean"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, r"data and reward\.verifier: "),
        ({"data": "arithmetic:1"}, r"reward\.verifier: "),
        ({"reward": "exact"}, "data: "),
        ({"reward": "exact", "validation": ROWS}, "data and validation: "),
        ({"reward": "exact", "data": "arithmetic:1", "loss": lambda logprobs: None}, "loss: "),
    ],
)
def test_what_is_in_memory_needs_a_name(small, changes, what):
    with refused("missing", "name", shows=f'{what}.*add name="'):
        postgrad.Trainer(**small | changes | {"name": None})
    named = postgrad.Trainer(**small | changes | {"name": None}, settings={"name": "mine"})
    assert named.folder == Path("runs/mine")
    texts = {"data": "arithmetic:1", "reward": "exact", "name": None}
    assert postgrad.Trainer(**small | texts).folder.name.startswith("grpo-")


@pytest.mark.slow
def test_evaluations_with_other_functions_of_one_name_are_apart(small):
    def make(value: float) -> Any:
        return lambda response, problem: value

    given = {"max_tokens": 2, "progress": False, "device": "cpu", "template": "plain", "threads": 1}
    values = [
        postgrad.evaluate(small["model"], ROWS[:2], reward=make(value), **given).accuracy
        for value in (0.0, 1.0)
    ]
    assert values == [0.0, 1.0]


@pytest.mark.slow
def test_a_failing_reward_names_its_error(small):
    def broken(response, problem):
        return problem.extra["answer"]

    with pytest.raises(postgrad.RunError, match="KeyError"):
        postgrad.train(**small | {"reward": broken})


@pytest.mark.slow
def test_method_loss_and_advantage_are_given_as_objects(small):
    class Doubled(Grpo):
        def score(self, batch, step):
            batch = super().score(batch, step)
            batch.rows["reward"] = batch.rows["reward"] * 2
            return batch

    def soft(logprobs, advantages, *, tau=1.0):
        return TokenLoss(-advantages * torch.sigmoid(tau * logprobs), {})

    def centered(rewards, groups):
        return rewards - rewards.mean()

    def one_tool(text: str) -> str:
        """Repeats a text.

        Args:
            text: any text
        """
        return text

    plain = postgrad.train(**small | {"runs": "plain"})
    doubled = postgrad.train(**small | {"runs": "doubled"}, method=Doubled)
    ratio = doubled.metrics.loc[1, "reward/mean"] / plain.metrics.loc[1, "reward/mean"]
    assert ratio == pytest.approx(2.0)
    other = postgrad.train(
        **small | {"runs": "other"},
        loss=soft,
        advantage=centered,
        settings={"method.loss_options": {"tau": 0.5}},
    )
    assert weights(other) != weights(plain)
    assert "loss: python:soft\n" in (other.folder / "config.yaml").read_text()
    tools = postgrad.Trainer(**small, tools=[one_tool], max_turns=2)
    assert tools.config.rollout.tools == ["python:one_tool"]


@pytest.mark.slow
def test_a_run_stopped_in_its_warm_up_returns_the_warm_up_run(small, monkeypatch):
    write = RunLog.write

    def write_and_press(self: RunLog, number: int, metrics: dict[str, float]) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        return write(self, number, metrics)

    warmup = {"warmup.recipe": "sft", "warmup.overrides": ["training.problems_per_step=4"]}
    rows = [{**row, "response": row["ground_truth"]} for row in ROWS]
    trainer = postgrad.Trainer(**small | {"data": rows}, settings=warmup)
    monkeypatch.setattr(RunLog, "write", write_and_press)
    run = trainer.train()
    assert run.interrupted and run.name == "test-warmup" and list(run.metrics.index) == [1]


@pytest.mark.slow
def test_a_warm_up_run_uses_the_same_objects(small):
    rows = [{**row, "response": row["ground_truth"]} for row in ROWS]
    run = postgrad.train(
        **small | {"data": rows, "steps": 1},
        settings={
            "warmup.recipe": "sft",
            "warmup.overrides": ["training.steps=1", "training.problems_per_step=4"],
        },
    )
    assert (run.folder.parent / "test-warmup/checkpoints/step-1").is_dir() and run.step == 1


@pytest.mark.slow
def test_a_model_in_memory_is_copied_and_not_changed(small, tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    before = [p.clone() for p in model.parameters()]
    run = postgrad.train(**small | {"model": (model, tokenizer)})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert weights(run) == weights(postgrad.train(**small | {"runs": "path"}))
    result = postgrad.evaluate((model, tokenizer), data=ROWS[:2], reward="exact", progress=False)
    assert 0.0 <= result.accuracy <= 1.0


@pytest.mark.nightly
def test_two_trainers_in_one_process_do_not_disturb_each_other(small):
    alone = [postgrad.train(**small | {"runs": f"alone{i}", "seed": i}) for i in range(2)]
    trainers = [postgrad.Trainer(**small | {"runs": f"both{i}", "seed": i}) for i in range(2)]
    for _ in range(3):
        for trainer in trainers:
            next(trainer)
    for trainer, run in zip(trainers, alone, strict=True):
        assert weights(trainer.train()) == weights(run)


@pytest.mark.nightly
def test_twenty_trainers_leave_no_threads_and_no_models_behind(small, folder):
    def train(i: int) -> None:
        postgrad.train(**small | {"steps": 1, "name": f"run{i}"})

    def count_models() -> int:
        gc.collect()
        return sum(type(one).__name__ == "Qwen3ForCausalLM" for one in gc.get_objects())

    train(0)
    threads = threading.active_count()
    models = count_models()  # fixtures of other tests may have some
    files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for i in range(1, 21):
        train(i)
    assert count_models() <= models
    assert threading.active_count() <= threads
    if files:
        assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2


@pytest.mark.slow
def test_evaluate_uses_the_reward_of_the_run_and_score_agrees(small):
    run = postgrad.train(**small)
    result = postgrad.evaluate(run, data={"a": ROWS[:2], "b": ROWS[2:4]}, n=2, progress=False)
    frame = result.responses
    assert set(result.summary["sets"]) == {"a", "b"} and len(frame) == 8
    again = postgrad.score(ROWS[:2] * 2, frame["response"][:4].tolist(), reward=odd)
    assert [one.value for one in again] == frame["score"][:4].tolist()
    assert postgrad.score(ROWS[1:2], ["1"], reward="exact")[0].value == 1.0
    rows = [{**ROWS[5], "response": "2"}]
    assert postgrad.score(rows, reward="exact")[0].value == 1.0


def test_responses_with_unusual_line_ends_are_one_row_each(tmp_path):
    row = {"uid": "a", "response": "one\u2028two\x85three"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n")
    result = postgrad.Evaluation({"sets": {"x": {}}}, tmp_path)
    assert result.responses["response"].tolist() == [row["response"]]


@pytest.mark.parametrize("name", ["a b", "a/b", "../a", "a,b", "a=b", ""])
def test_a_set_with_another_name_is_refused(name, tiny):
    with refused("wrong_value", "data"):
        postgrad.evaluate(tiny, {name: ROWS[:1]}, reward="exact", progress=False)


@pytest.mark.slow
def test_a_hub_id_is_the_hub_source_of_the_command_line(small, folder, monkeypatch):
    from postgrad.data.sources import hub

    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "other/train-0.jsonl"):
        file = folder / "hub" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text('{"prompt": "1+1=", "gold": "2"}\n' * 8)
    monkeypatch.setattr(hub, "fetch", lambda repo, _, **__: (folder / "hub", [], "commit"))
    data = "owner/sums:main/train:gold=ground_truth"
    trainer = postgrad.Trainer(**small | {"data": data}, validation="owner/sums:gold=ground_truth")
    assert trainer.config.data.train == f"hub:{data}"
    # The first of validation and test that the data set has.
    assert trainer.config.data.validation == "hub:owner/sums:test:gold=ground_truth"
    with refused("missing", "owner/sums"):
        postgrad.train(**small | {"data": "owner/sums"})
    with refused("unknown_name", "owner/sums"):
        postgrad.train(**small | {"data": "owner/sums:dev"})


@pytest.mark.slow
def test_a_trainer_that_is_dropped_releases_its_folder(small):
    trainer = postgrad.Trainer(**small)
    next(trainer)
    with refused("unwritable", "runs/test"):
        next(postgrad.Trainer(**small))
    del trainer
    assert next(postgrad.Trainer(**small)).number == 1  # no checkpoint was written yet


@pytest.mark.slow
def test_a_finished_run_whose_files_changed_is_returned_with_a_note(small, tiny, folder, capsys):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copytree(tiny, folder / "model")
    arguments = small | {"data": str(rows), "model": "model", "steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        postgrad.train(**arguments)
        postgrad.train(**arguments)  # the same files
    rows.write_text("".join(json.dumps(row) + "\n" for row in reversed(ROWS)))
    with pytest.warns(UserWarning, match=r"nothing was trained now \(\S+rows.jsonl changed"):
        postgrad.train(**arguments)
    (folder / "model" / "generation_config.json").write_text("{}")
    capsys.readouterr()
    postgrad.train(**arguments | {"progress": True})
    assert "rows.jsonl, model changed since then" in capsys.readouterr().out


@pytest.mark.slow
def test_the_loop_of_the_docs_runs_where_every_group_is_flat(small, capsys):
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    code = re.search(r"## The loop\n\n```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    given = {name: small[name] for name in ("batch_size", "group_size", "max_tokens", "device")}
    code = code[1].replace("steps=100", "steps=2").replace('"tiny"', "tiny")
    trainer = partial(postgrad.Trainer, **given, template="plain", threads=1, progress=False)
    names = {"rows": ROWS, "reward": lambda response, problem: 0.5, "tiny": small["model"]}
    exec(code, {"postgrad": SimpleNamespace(Trainer=trainer), **names})
    assert len(capsys.readouterr().out.splitlines()) >= 2
