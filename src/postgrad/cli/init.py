"""`postgrad init NAME [--KIND]`: writes a method, loss, environment or verifier, and its test."""

import importlib.util
import keyword
from pathlib import Path

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Writes NAME.py with a method of your own (or a loss, an environment, a verifier) and test_NAME.py
with its test to the current folder. It never overwrites files. Both work as they are: run the test,
then change them."""

METHOD = '''\
"""{title}: GRPO with an additional reward for short responses. Replace it with your own idea.

A method is a subclass that replaces or adds stages. draw, compose and sample make the rollouts of a
step; enrich, score, estimate, update and publish learn from them. A loss of your own is another
class, an objective: method.objective=FILE.py:CLASS.
"""

from dataclasses import dataclass

from postgrad.config.schema import setting
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.step import Step
from postgrad.types import Batch


@dataclass
class {title}Settings(GrpoSettings):
    brevity: float = setting(0.1, "reward of an empty response", at_least=0.0)


class {title}(Grpo):
    Settings = {title}Settings
    own_reward_parts = ("brevity",)  # settings may name it, such as method.reward_weights

    def score(self, batch: Batch, step: Step) -> Batch:
        """Adds a reward for unused tokens. The column `reward/brevity` also becomes a metric."""
        batch = super().score(batch, step)
        used = batch.response.lengths / self.config.rollout.max_response_tokens
        batch.rows["reward/brevity"] = self.settings.brevity * (1 - used)
        batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/brevity"]
        return batch
'''

METHOD_TEST = '''\
"""{title} rewards brevity, and a run trains with it: two steps of a tiny model on the CPU."""

import json

from postgrad.cli.main import main

OVERRIDES = [
    "method={name}:{title}",
    "method.brevity=0.5",
    "model.path=tiny",
    "model.device=cpu",
    "model.dtype=float32",
    "model.threads=1",
    "data.train=arithmetic:1",
    "data.template=plain",
    "rollout.samples=4",
    "rollout.max_response_tokens=6",
    "optimizer.lr=1e-3",
    "training.steps=2",
    "training.problems_per_step=4",
    "reward.workers=1",
    "name=test",
]


def test_a_run_rewards_brevity_and_learns_from_it(tmp_path):
    assert main(["train", "grpo", *OVERRIDES, f"runs={{tmp_path}}"]) == 0
    text = (tmp_path / "test" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert abs(line["reward/brevity"] - 0.5 * (1 - line["response/length"] / 6)) < 1e-5
        assert line["reward/mean"] >= line["reward/brevity"]
        assert line["grad_norm"] > 0


def test_a_negative_brevity_is_refused(tmp_path, capsys):
    assert main(["train", "grpo", *OVERRIDES, "method.brevity=-1", f"runs={{tmp_path}}"]) == 2
    assert "method.brevity" in capsys.readouterr().err
'''

VERIFIER = '''\
"""{name}: scores 1 if the last number of the response is right, 0.5 for any number.

A verifier takes the text of the response and the problem, and returns a number, a bool, or a Score
with named parts. An exception becomes a failure: it is recorded and kept out of the loss. The
verifier runs in a child process with a time limit and should not import torch.
"""

import re

from postgrad.problem import Problem, Score


def {name}(response: str, problem: Problem) -> Score:
    numbers = re.findall(r"-?\\d+", response)
    right = bool(numbers) and numbers[-1] == problem.ground_truth
    value = 0.5 if numbers else 0.0
    if right:
        value = 1.0
    return Score(value, {{"right": float(right), "has_number": float(bool(numbers))}})
'''

VERIFIER_TEST = '''\
"""{name} scores the last number of a response; any number scores half."""

import pytest
from {name} import {name}

from postgrad.problem import Problem
from postgrad.verifiers.scorer import Scorer

PROBLEM = Problem("u1", [{{"role": "user", "content": "3+4="}}], "7", "mine")


@pytest.mark.parametrize(
    ("response", "score"), [("3 and 4 make 7", 1.0), ("8", 0.5), ("no idea", 0.0), ("", 0.0)]
)
def test_scores(response, score):
    assert {name}(response, PROBLEM).value == score


def test_it_works_in_a_child_process_as_in_a_run(monkeypatch, request):
    """The value of reward.verifier names the file and the function."""
    monkeypatch.chdir(request.path.parent)
    with Scorer("{name}.py:{name}", timeout_s=30.0, workers=1) as scorer:
        scores = scorer.score([PROBLEM, PROBLEM], ["7", "seven"])
    assert [score.value for score in scores] == [1.0, 0.0]
'''

LOSS = '''\
"""{name}: a policy loss per token, with a smooth limit on the ratio. Replace it with your own.

The arguments before `*` are columns of the batch, one number per token: `logprobs` of the policy,
`old_logprobs` before the update, `advantages`, `mask`, `reward`, or a column of your own. Those
after `*` are options: method.loss_options.sharpness=2.
"""

import torch
from torch import Tensor


def {name}(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, sharpness: float = 1.0
) -> Tensor:
    ratio = (logprobs - old_logprobs).exp()
    return -advantages * 4 / sharpness * torch.sigmoid(sharpness * (ratio - 1))
'''

LOSS_TEST = '''\
"""{name} has the gradient of the plain policy loss before an update, and a run trains with it."""

import json

import torch
from {name} import {name}

from postgrad.cli.main import main

OVERRIDES = [
    "method.loss={name}.py:{name}",
    "method.loss_options.sharpness=2",
    "model.path=tiny",
    "model.device=cpu",
    "model.dtype=float32",
    "model.threads=1",
    "data.train=arithmetic:1",
    "data.template=plain",
    "rollout.samples=4",
    "rollout.max_response_tokens=6",
    "training.steps=1",
    "training.problems_per_step=4",
    "training.updates_per_step=2",
    "reward.workers=1",
    "name=test",
]


def test_the_gradient_at_the_old_policy_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -0.2], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0])
    {name}(logprobs, logprobs.detach(), advantages, sharpness=3.0).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


def test_a_run_trains_with_it(tmp_path, request, monkeypatch):
    monkeypatch.chdir(request.path.parent)
    assert main(["train", "grpo", *OVERRIDES, f"runs={{tmp_path}}"]) == 0
    (line,) = (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
'''

ENVIRONMENT = '''\
"""{title}: the policy guesses a number and is told whether it is higher or lower.

One object plays one trajectory: reset once, then step after each turn of the policy. The arguments
of the class are settings: environment.options.high=50. Public methods with other names are tools
that the policy may call.
"""

import random
import re

from postgrad.problem import Problem


class {title}:
    def __init__(self, high: int = 20, cost: float = 0.1) -> None:
        self.high = high
        self.cost = cost

    def reset(self, problem: Problem) -> str:
        """Return the text that ends the prompt. The state follows from the problem."""
        self.secret = random.Random(problem.uid).randint(1, self.high)
        return f"Guess my number from 1 to {{self.high}}. Reply with one number."

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return (observation, reward, done) after a turn of the policy."""
        numbers = re.findall(r"\\d+", action)
        if not numbers:
            return "Reply with one number.", -self.cost, False
        guess = int(numbers[-1])
        if guess == self.secret:
            return "Right!", 1.0, True
        return ("higher" if guess < self.secret else "lower"), -self.cost, False
'''

ENVIRONMENT_TEST = '''\
"""{title} answers guesses, and a run trains with it: one step of a tiny model on the CPU."""

import json

from {name} import {title}

from postgrad.cli.main import main
from postgrad.problem import Problem

PROBLEM = Problem("u1", [{{"role": "user", "content": ""}}], "", "mine")
OVERRIDES = [
    "environment={name}.py:{title}",
    "environment.options.high=9",
    "model.path=tiny",
    "model.device=cpu",
    "model.dtype=float32",
    "model.threads=1",
    "data.train=seeds:4",
    "data.template=plain",
    "rollout.samples=4",
    "rollout.max_turns=2",
    "rollout.max_response_tokens=60",
    "training.steps=1",
    "training.problems_per_step=4",
    "name=test",
]


def test_the_answers_lead_to_the_secret():
    game = {title}(high=9)
    assert "1 to 9" in game.reset(PROBLEM)
    assert game.step("no idea") == ("Reply with one number.", -0.1, False)
    low, high = 1, 9
    for _ in range(4):
        guess = (low + high) // 2
        answer, reward, done = game.step(f"It is {{guess}}")
        if done:
            break
        low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
    assert (answer, reward, done) == ("Right!", 1.0, True)


def test_a_run_plays_it(tmp_path, request, monkeypatch):
    monkeypatch.chdir(request.path.parent)
    assert main(["train", "grpo", *OVERRIDES, f"runs={{tmp_path}}"]) == 0
    (line,) = (tmp_path / "test" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward/mean"] < 1
'''

# What can be written: its file, its test, and the setting that uses it.
KINDS = {
    "method": (METHOD, METHOD_TEST, "method={name}.py:{title}"),
    "loss": (LOSS, LOSS_TEST, "method.loss={name}.py:{name}"),
    "environment": (ENVIRONMENT, ENVIRONMENT_TEST, "environment={name}.py:{title}"),
    "verifier": (VERIFIER, VERIFIER_TEST, "reward.verifier={name}.py:{name}"),
}


def run(argv: list[str]) -> int:
    parser = Parser("init NAME [--loss | --environment | --verifier]", DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="name of the module, e.g. my_method")
    group = parser.add_mutually_exclusive_group()
    for kind in ("loss", "environment", "verifier"):
        article = "an" if kind == "environment" else "a"
        group.add_argument(
            f"--{kind}",
            dest="kind",
            action="store_const",
            const=kind,
            help=f"write {article} {kind} instead of a method",
        )
    arguments = parser.parse(argv, help_if_empty=True)
    name = arguments.name
    source, test, setting = KINDS[arguments.kind or "method"]
    files = {Path(f"{name}.py"): source, Path(f"test_{name}.py"): test}
    check_name(name, list(files))
    title = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    try:
        for file, text in files.items():
            with file.open("x") as stream:
                stream.write(text.format(name=name, title=title))
    except OSError as error:
        raise ConfigError(
            f"{name}.py cannot be written: {error.strerror}; choose another folder"
        ) from error
    print(f"wrote {' and '.join(str(file) for file in files)}; run the test, then a training run:")
    print(f"  python -m pytest test_{name}.py")
    data = "seeds:1000" if arguments.kind == "environment" else "FILE"
    override = setting.format(name=name, title=title)
    print(f"  postgrad train grpo {override} model.path=MODEL data.train={data}")
    return 0


def check_name(name: str, files: list[Path]) -> None:
    """Raises ConfigError if Python cannot import the name, a module has it, or a file exists."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.strip("_"):
        raise ConfigError(
            f"{name} is not a valid name of a Python module; use letters, digits and _, "
            "e.g. my_method"
        )
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists; choose another name, or move the file")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"{name} is the name of an installed module, which {files[0]} would hide; "
            f"choose another name, e.g. my_{name}"
        )
