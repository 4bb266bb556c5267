"""Runs that follow each other in one Python process equal runs in processes of their own."""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from api_rows import ROWS
from refused import refused
from tiny_runs import forkserver, metrics_without_timing

import postgrad
from postgrad import user_code

# Both folders have a file mine.py with a reward and a loss.
MINE = """
from postgrad.algorithms.losses import Loss, TokenLoss


def reward(response, problem):
    return sum(character in "{good}" for character in response) / 4 + 0.01 * len(response)


def weigh(logprobs, advantages):
    return TokenLoss(-{scale} * advantages * logprobs.exp(), {{}})


loss = Loss(weigh, reads=("logprobs", "advantages"))
"""
RUNS = {
    "a": (
        {"good": "13579", "scale": 1.0},
        {"recipe": "grpo", "seed": 1, "loss": "mine.py:loss", "temperature": 0.7},
    ),
    "b": (
        {"good": "02468", "scale": 3.0},
        {"recipe": "ppo", "seed": 2, "loss": "mine.py:loss", "weight_decay": 0.1},
    ),
}


def process_state() -> dict:
    """What a run must not leave changed in its process."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)],
        "handlers": [str(handler) for handler in logging.getLogger().handlers],
        "hooks": str(sys.excepthook),
        "folder": str(Path.cwd()),
    }


def train_in(folder: str, names: str, model: str) -> None:
    """Runs the trainings of these names one after the other; writes the state around them."""
    os.environ["POSTGRAD_CACHE"] = str(Path(folder).parent / "cache")
    torch.set_num_threads(2)
    before = process_state()
    start = Path.cwd()
    for number, name in enumerate(names):
        own = Path(folder) / str(number)
        own.mkdir(parents=True)
        values, arguments = RUNS[name]
        (own / "mine.py").write_text(MINE.format(**values))
        os.chdir(own)
        postgrad.train(
            **arguments,
            model=model,
            data=ROWS,
            reward="mine.py:reward",
            steps=2,
            batch_size=2,
            group_size=4,
            max_tokens=4,
            lr=3e-3,
            device="cpu",
            dtype="float32",
            threads=1,
            template="plain",
            name="test",
            runs=own,
            progress=False,
            settings={"reward.workers": 1},
        )
        os.chdir(start)
    (Path(folder) / "state.json").write_text(json.dumps([before, process_state()]))


@pytest.mark.slow
def test_runs_of_one_process_equal_runs_of_their_own_processes(tiny, tmp_path):
    for names in ("b", "aba"):
        process = forkserver().Process(
            target=train_in, args=(str(tmp_path / names), names, str(tiny))
        )
        process.start()
        process.join(600)
        assert process.exitcode == 0, names
        before, after = json.loads((tmp_path / names / "state.json").read_text())
        assert before == after, names
    alone = metrics_without_timing(tmp_path / "b" / "0" / "test")
    first, between, last = (metrics_without_timing(tmp_path / "aba" / n / "test") for n in "012")
    assert len(first) == len(alone) == 2 and first[0]["grad_norm"] > 0 and first != alone
    assert between == alone
    assert first == last


@pytest.mark.slow
def test_calls_leave_the_number_of_threads_as_it_is(tiny, folder):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        options = {"device": "cpu", "dtype": "float32", "threads": 1, "template": "plain"}
        postgrad.generate(tiny, "1+1=", max_tokens=2, **options)
        assert torch.get_num_threads() == 2
        postgrad.evaluate(tiny, ROWS[:2], reward="exact", max_tokens=2, progress=False, **options)
        assert torch.get_num_threads() == 2
        session = postgrad.Session(tiny, max_tokens=2, **options)
        session.logprobs(session.sample(["1+1="], 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_module_of_another_folder_is_refused(tmp_path, monkeypatch):
    """A new process would import the other file, so the name means two modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_module_of_a_user.py").write_text(f"NAME = {name!r}\n")
    try:
        monkeypatch.chdir(tmp_path / "first")
        assert user_code.load_module("own_module_of_a_user", "method=x").NAME == "first"
        assert user_code.load_module("own_module_of_a_user", "method=x").NAME == "first"
        monkeypatch.chdir(tmp_path / "second")
        with refused("conflict", "method"):
            user_code.load_module("own_module_of_a_user", "method=x")
    finally:
        sys.modules.pop("own_module_of_a_user", None)
