"""`postgrad init NAME [--verifier]`: a method or a verifier of your own, with its test, in the current folder."""

import importlib.util
import keyword
from pathlib import Path

from postgrad.errors import ConfigError

HELP = """usage: postgrad init NAME               NAME.py with a method of your own, and test_NAME.py
       postgrad init NAME --verifier    the same with a verifier

Writes two short files into the current folder, never over files that are there. Both work as they are: run the test, then change them."""

METHOD = '''"""{title}: GRPO that also pays for short responses. Change what differs in your method, leave out what does not.

A method is a subclass that replaces or inserts stages: draw, compose, sample, enrich, score, estimate, update, publish (they run on the
driver and see the batch) and view, prepare, loss (they run beside the model and may use the configuration only).
"""

from dataclasses import dataclass

from postgrad.config.schema import setting
from postgrad.methods.base import Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.types import Batch


@dataclass
class {title}Settings(GrpoSettings):
    brevity: float = setting(0.1, "reward for using none of rollout.max_response_tokens", at_least=0.0)


class {title}(Grpo):
    Settings = {title}Settings

    def score(self, batch: Batch, step: Step) -> Batch:
        """The verifier's reward, and a share for the tokens that were not used. `reward/brevity` becomes a metric by its name."""
        batch = super().score(batch, step)
        used = batch.response.lengths / self.config.rollout.max_response_tokens
        batch.rows["reward/brevity"] = self.settings.brevity * (1 - used)
        batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/brevity"]
        return batch
'''

METHOD_TEST = '''"""{title} pays for brevity, and a run with it trains: two steps of a tiny model on the CPU."""

import json

from postgrad.cli.main import main

WORDS = [
    *("method={name}:{title}", "method.brevity=0.5", "model.path=tiny", "model.device=cpu", "model.dtype=float32", "model.threads=1"),
    *("data.train=arithmetic:1", "data.template=plain", "rollout.samples=4", "rollout.max_response_tokens=6", "optimizer.lr=1e-3"),
    *("training.steps=2", "training.problems_per_step=4", "reward.workers=1", "name=test"),
]


def test_a_run_pays_for_brevity_and_learns_from_it(tmp_path):
    assert main(["train", "grpo", *WORDS, f"runs={{tmp_path}}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert abs(line["reward/brevity"] - 0.5 * (1 - line["response/length"] / 6)) < 1e-5
        assert line["reward/mean"] >= line["reward/brevity"] and line["grad_norm"] > 0


def test_its_setting_is_checked(tmp_path, capsys):
    assert main(["train", "grpo", *WORDS, "method.brevity=-1", f"runs={{tmp_path}}"]) == 2
    assert "method.brevity=-1.0 is out of range" in capsys.readouterr().err
'''

VERIFIER = '''"""{name}: is the last number of the response the right one? Half of the score for any number at all.

A verifier takes the response's text and the problem, and returns a number, a bool, or a Score with named parts. What it raises becomes
a failure: it is recorded and kept out of the loss. It runs in a child process with a time limit and should not import torch.
"""

import re

from postgrad.problem import Problem, Score


def {name}(response: str, problem: Problem) -> Score:
    numbers = re.findall(r"-?\\d+", response)
    right = bool(numbers) and numbers[-1] == problem.ground_truth
    value = 1.0 if right else 0.5 if numbers else 0.0
    return Score(value, {{"right": float(right), "has_number": float(bool(numbers))}})
'''

VERIFIER_TEST = '''"""{name}: the last number counts, any number is worth half."""

import pytest
from {name} import {name}

from postgrad.problem import Problem
from postgrad.verifiers.scorer import Scorer

PROBLEM = Problem("u1", [{{"role": "user", "content": "3+4="}}], "7", "mine")


@pytest.mark.parametrize(("response", "score"), [("3 and 4 make 7", 1.0), ("8", 0.5), ("no idea", 0.0), ("", 0.0)])
def test_scores(response, score):
    assert {name}(response, PROBLEM).value == score


def test_it_works_where_a_run_calls_it(monkeypatch, request):
    """In a child process, found by the words of reward.verifier."""
    monkeypatch.chdir(request.path.parent)
    with Scorer("{name}.py:{name}", timeout_s=30.0, workers=1) as scorer:
        found = scorer.score([PROBLEM, PROBLEM], ["7", "seven"])
    assert [verdict.value for verdict in found] == [1.0, 0.0]
'''


def run(words: list[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        print(HELP)
        return 0
    verifier = "--verifier" in words
    names = [word for word in words if word != "--verifier"]
    if len(names) != 1 or names[0].startswith("-"):
        raise ConfigError(
            f"init wants one name, and --verifier if you like; it got {' '.join(names) or 'none'}"
        )
    name = names[0]
    files = {
        Path(f"{name}.py"): VERIFIER if verifier else METHOD,
        Path(f"test_{name}.py"): VERIFIER_TEST if verifier else METHOD_TEST,
    }
    check_name(name, list(files))
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    try:
        for file, text in files.items():
            with file.open("x") as stream:
                stream.write(text.format(name=name, title=title))
    except OSError as error:
        raise ConfigError(f"the files cannot be written here: {error.strerror}") from error
    print(f"wrote {' and '.join(str(file) for file in files)}; try the test, then the real thing:")
    print(f"  python -m pytest test_{name}.py")
    use = f"grpo reward.verifier={name}.py:{name}" if verifier else f"grpo method={name}:{title}"
    print(f"  postgrad train {use} model.path=MODEL data.train=FILE")
    return 0


def check_name(name: str, files: list[Path]) -> None:
    """Refuse what Python cannot import, what would hide another module, and files that are there."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.strip("_"):
        raise ConfigError(
            f"{name} cannot be the name of a Python file; use letters, digits and _, e.g. my_method"
        )
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} is there already; choose another name, or move it away")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"{name} is the name of an installed module, which {files[0]} would hide; choose another, e.g. my_{name}"
        )
