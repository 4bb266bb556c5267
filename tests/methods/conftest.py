"""Fixtures of the tests of methods."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def loaded(tiny: Path) -> Any:
    """The tiny model in float64. Copy it before you train it."""
    import torch
    from tiny_runs import config_of

    from postgrad.model.load.load import load

    model = load(config_of("grpo", tiny).model, torch.device("cpu"))
    model.model.double()
    return model


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the verifiers of method_runs.py, for reward.verifier=FILE:NAME."""
    from method_runs import VERIFIERS

    file = tmp_path_factory.mktemp("verifiers") / "mine.py"
    file.write_text(VERIFIERS)
    return file
