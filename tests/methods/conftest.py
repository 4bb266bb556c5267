"""Fixtures of the tests of methods."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> Any:
    """The tiny model in float64. Copy it before you train it."""
    import torch
    from tiny_runs import config_of

    from postgrad.model.load import load

    model = load(config_of("grpo", tiny).model, torch.device("cpu"))
    model.model.double()
    return model
