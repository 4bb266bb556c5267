"""prepare() checks and loads a run; it writes nothing, and its argument stays as it was."""

import copy
import dataclasses

import pytest
from tiny_runs import config_of, toy_run, tree

from postgrad.training.driver import train
from postgrad.training.prepare import prepare
from postgrad.training.report import Reporter

AUTO = ["model.device=auto", "model.dtype=auto", "training.token_budget=0", "rollout.max_rows=0"]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_settings_of_the_caller_stay_as_they_were(is_resumed, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for word in toy_run() if not word.startswith("training.steps")]
    config = config_of("grpo", tiny, *words, *AUTO, "training.epochs=0.05")
    if is_resumed:
        train(config, Reporter())
    before = copy.deepcopy(dataclasses.asdict(config))
    files = tree(tmp_path)
    run = prepare(config)
    run.scorer.close()
    assert dataclasses.asdict(config) == before and tree(tmp_path) == files
    assert run.config.training.steps == 1  # 0.05 of 91 problems, 4 per step
    assert run.config.model.dtype != "auto" and run.config.rollout.max_rows == 256
    assert run.method.config is run.config
