"""Checks of BuPO's settings, before a run writes anything. All raise ConfigError."""

from typing import Any

from postgrad.errors import ConfigError
from postgrad.methods.base import Method
from postgrad.methods.support.checks import refuse_unread
from postgrad.model.port import after
from postgrad.model.views import check_blocks


def check(method: Method) -> None:
    """Refuses a first phase longer than the run, or one that trains frozen blocks."""
    phase_one = method.settings.phase_one_steps
    steps = method.config.training.steps
    if phase_one > steps:
        raise ConfigError(
            f"method.phase_one_steps={phase_one} exceeds training.steps={steps}; "
            f"lower it, or set it to {steps} to train the internal policy only"
        )
    if phase_one and method.settings.correction == "bypass":
        raise ConfigError(
            "method.correction=bypass compares the trained policy with the engine, and phase 1 "
            "trains an internal policy; remove it, or add method.phase_one_steps=0"
        )
    if phase_one and method.settings.lr_scale_below == 0.0:
        raise ConfigError(
            "method.lr_scale_below=0 freezes the blocks that phase 1 trains; "
            "add method.phase_one_steps=0"
        )


def check_unread(settings: Any) -> None:
    """Refuses settings of the first phase if there is none."""
    if not settings.phase_one_steps:
        refuse_unread("method", settings, ["internal_norm"], "with method.phase_one_steps=0")


def check_model(method: Method, model: Any) -> None:
    """Refuses more blocks than the model has, and blocks that have no internal policy."""
    num_blocks = method.settings.num_blocks
    num_layers = model.config.get_text_config().num_hidden_layers
    if num_blocks > num_layers:
        raise ConfigError(
            f"method.num_blocks={num_blocks} is out of range; "
            f"{method.config.model.path} has blocks 1..{num_layers}"
        )
    check_blocks(model, after(num_blocks, method.settings.internal_norm))
