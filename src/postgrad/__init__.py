"""Postgrad: RL post-training for language models. Each method is one file; see docs/design.md.

From Python:

    train           train a model; returns a Run
    Trainer         the same as a loop over steps
    Run             a run folder as an object: metrics, rollouts, plot, generate, save
    evaluate        sample and score answers of a model
    generate        sample answers
    score           score answers
    extract_answer  the final answer of a response, for majority votes
    Session         the low level: sample, forward_backward, optim_step
    Callback        what a run calls

Importing the package is quick: each name loads its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from postgrad.version import __version__

if TYPE_CHECKING:
    from postgrad.api.callbacks import Callback
    from postgrad.api.evaluation import Evaluation, evaluate, generate, score
    from postgrad.api.run import Run
    from postgrad.api.session import Session
    from postgrad.api.trainer import Trainer, train
    from postgrad.errors import ConfigError, RunError
    from postgrad.problem import Failure, Problem, Score
    from postgrad.results.votes import extract_answer
    from postgrad.training.result import StepResult
    from postgrad.types import Batch

__all__ = [
    "Batch",
    "Callback",
    "ConfigError",
    "Evaluation",
    "Failure",
    "Problem",
    "Run",
    "RunError",
    "Score",
    "Session",
    "StepResult",
    "Trainer",
    "__version__",
    "evaluate",
    "extract_answer",
    "generate",
    "score",
    "train",
]

_MODULES = {
    "Batch": "postgrad.types",
    "Callback": "postgrad.api.callbacks",
    "ConfigError": "postgrad.errors",
    "Evaluation": "postgrad.api.evaluation",
    "Failure": "postgrad.problem",
    "Problem": "postgrad.problem",
    "Run": "postgrad.api.run",
    "RunError": "postgrad.errors",
    "Score": "postgrad.problem",
    "Session": "postgrad.api.session",
    "StepResult": "postgrad.training.result",
    "Trainer": "postgrad.api.trainer",
    "evaluate": "postgrad.api.evaluation",
    "extract_answer": "postgrad.results.votes",
    "generate": "postgrad.api.evaluation",
    "score": "postgrad.api.evaluation",
    "train": "postgrad.api.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        hint = ""
        if name.endswith(("Trainer", "Config")):  # as GRPOTrainer and GRPOConfig of TRL
            hint = "; a method is a recipe, postgrad.train('grpo', ...): see docs/python.md"
        raise AttributeError(f"module 'postgrad' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
