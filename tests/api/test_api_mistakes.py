"""The likeliest mistakes in Python get one line, as ConfigError, and write nothing."""

import os
from pathlib import Path
from typing import Any

import pytest
from api_rows import ROWS, odd
from refused import refused
from safetensors import SafetensorError
from tiny_runs import tree
from transformers import AutoModelForCausalLM

import postgrad
from postgrad.training.run import locked_folder


def trl_reward(completions, environments, **columns):
    return [0.0 for _ in completions]


def trl_reward_of_a_column(completions, answer, **columns):
    return [0.0 for _ in completions]


def one_argument(response):
    return 0.0


class TrlCallback:
    def on_step_end(self, args, state, control, **more):
        return control


class MistypedCallback(postgrad.Callback):
    def on_step_ends(self, trainer, step):
        trainer.stop()


class NoMethod:
    pass


def model_without_tokenizer(tiny: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny)


# (changed arguments, what the error names)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"args": object()}, "write its settings as arguments"),
    ({"data": {"train": ROWS, "test": ROWS}}, "one split"),
    ({"data": [{**ROWS[0], "when": Path()}]}, "column when"),
    ({"data": ROWS[:2]}, "problems_per_step"),
    ({"reward": trl_reward}, "environments, which is not available"),
    ({"reward": trl_reward_of_a_column}, "needs a column answer"),
    ({"reward": one_argument}, "response, problem"),
    ({"reward": lambda response, problem, answer: 1.0}, "also needs answer"),
    ({"reward": lambda solution_str, ground_truth, limit: 1.0}, "also needs limit"),
    ({"reward": [odd, "exact"], "reward_weights": [1.0]}, "one weight per reward"),
    ({"reward": [odd, "exact"], "reward_weights": ["1", 2]}, "must be a finite number"),
    ({"method": NoMethod}, "method is the class NoMethod"),
    ({"callbacks": [TrlCallback()]}, "postgrad.Callback"),
    ({"callbacks": [postgrad.Callback]}, "Callback\\(\\)"),
    ({"callbacks": odd}, "must be a list"),
    ({"callbacks": [MistypedCallback()]}, "did you mean on_step_end"),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes, named", MISTAKES, ids=[named for _, named in MISTAKES])
def test_a_mistake_is_one_line_and_nothing_is_written(small, folder, changes, named):
    before = set(os.listdir(folder))  # noqa: PTH208
    with pytest.raises(postgrad.ConfigError, match=named) as caught:
        postgrad.train(**small | changes)
    assert "\n" not in str(caught.value)
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())
    assert set(os.listdir(folder)) - before <= {"runs", "cache"}  # noqa: PTH208


def test_the_text_is_that_of_the_command_line(small, capsys):
    from postgrad.cli.main import main

    assert main(["train", "grpo", "model.path=tiny", "data.train=x.jsonl", "optimizer.lr=0"]) == 2
    line = capsys.readouterr().err.strip().removeprefix("postgrad: ")
    with refused("wrong_value", "optimizer.lr") as caught:
        postgrad.train(model="tiny", data="x.jsonl", settings={"optimizer.lr": 0})
    assert str(caught.value) == line


def test_a_model_in_memory_needs_its_tokenizer(small, tiny):
    with refused("missing", "tokenizer"):
        postgrad.train(**small | {"model": model_without_tokenizer(tiny)})


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1]], ids=["same rows", "other rows"])
def test_a_call_that_is_refused_keeps_the_rows_of_a_run_that_starts(small, rows):
    """The run has its lock, and no config.yaml while its models load."""
    request = postgrad.Trainer(**small)._request
    with request.stored(), locked_folder(request.config):
        before = tree(request.folder)
        with pytest.raises(postgrad.ConfigError, match=r"in use|other rows"):
            postgrad.train(**small | {"data": rows})
        assert tree(request.folder) == before and "train.jsonl" in before


@pytest.mark.parametrize(
    "error", [OSError(28, "no space"), SafetensorError("No space left on device")]
)
def test_a_run_folder_that_cannot_be_written_is_one_line(small, folder, monkeypatch, error):
    def fail(*_):
        raise error

    name = "atomic_write_text" if isinstance(error, OSError) else "save_once"
    monkeypatch.setattr(f"postgrad.api.request.{name}", fail)
    trainer = postgrad.Trainer(**small)
    trainer._request.model = object()  # type: ignore[assignment]
    with refused("unwritable", "runs/test"):
        trainer.train()
    assert not trainer.folder.exists()


@pytest.mark.slow
def test_other_rows_do_not_continue_a_run(small):
    postgrad.train(**small | {"steps": 1})
    with refused("changed", "name"):
        postgrad.train(**small | {"data": ROWS[::-1]})


def test_code_of_a_notebook_cannot_run_elsewhere(small):
    from postgrad.methods.grpo import Grpo

    class Local(Grpo):
        pass

    with refused("conflict", "method.name"):
        postgrad.train(**small, method=Local, cluster="process")


@pytest.mark.slow
def test_an_object_of_another_process_is_refused(small, folder):
    from postgrad.cli.main import main

    postgrad.train(**small | {"steps": 1})
    assert main(["train", "runs/test/config.yaml", "training.steps=2"]) == 2


def test_a_damaged_line_of_metrics_hides_no_other_line(folder):
    (folder / "config.yaml").write_text("training: {steps: 3}\n")
    lines = b'{"step": 1, "loss": 1.0}\n\x00\x00\xff\n{"step": 3, "loss": 3.0}\n{"step": 4, "lo'
    (folder / "metrics.jsonl").write_bytes(lines)
    run = postgrad.Run(folder)
    assert list(run.metrics["loss"]) == [1.0, 3.0]
    assert "step 3 of 3" in repr(run)


@pytest.mark.slow
def test_mistakes_with_runs_sessions_and_prompts(small, folder):
    with pytest.raises(postgrad.ConfigError, match="not a run folder"):
        postgrad.Run(folder)
    run = postgrad.train(**small | {"steps": 1})
    with refused("unknown_name", "step", shows="steps 1 to 1"):
        run.rollouts(step=9)
    with refused("conflict", "n"):
        run.generate("1+1=", n=2, temperature=0.0)
    with refused("wrong_value", "prompts"):
        run.generate(7)  # type: ignore[arg-type]
    with refused("conflict", "responses"):
        postgrad.score(ROWS, ["1"], reward="exact")
    with pytest.raises(postgrad.RunError, match="no step has run"):
        postgrad.Trainer(**small | {"name": "fresh"}).save()


def test_the_classes_of_trl_are_named():
    with pytest.raises(AttributeError, match=r"postgrad\.train"):
        getattr(postgrad, "GRPOTrainer")  # noqa: B009
