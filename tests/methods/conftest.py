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


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it comes from its initialization: nearly uniform."""
    from postgrad.model.load.tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "fresh", seed=0, layers=2, width=32)


@pytest.fixture
def with_tools(tmp_path: Path) -> Any:
    """Makes a method whose policy calls a tool in every second response."""
    from fake_engine import FakeEngine
    from method_runs import Bound
    from tiny_runs import config_of
    from tool_model import CALL, TOOLS, chat_model

    from postgrad.data.encode.encoder import Encoder
    from postgrad.environments.lookup import Environments
    from postgrad.environments.tools import Toolbox
    from postgrad.rollout.conversations import Turns

    (tmp_path / "mine.py").write_text(TOOLS)
    model = chat_model(tmp_path / "model")

    def make(recipe, *overrides):
        config = config_of(
            recipe,
            model,
            f"rollout.tools=[{tmp_path / 'mine.py'}:look]",
            "data.template=chat",
            "data.train=arithmetic:1:digits",
            "data.max_prompt_tokens=512",
            "rollout.max_response_tokens=60",
            "rollout.samples=4",
            "training.problems_per_step=2",
            "training.updates_per_step=1",
            "reward.workers=1",
            *overrides,
        )
        world = Bound(config)
        schemas = Toolbox(config.rollout.tools).schemas
        prompts = Encoder(world.prompts.tokenizer, "chat", 4096, tools=schemas)
        call = prompts.tokenizer.convert_tokens_to_ids(CALL)
        end = prompts.tokenizer.eos_token_id

        def reply(prompt, seed):
            if call in prompt:
                return [3, end]
            return [call, end] if seed % 2 else [4, 5, end]

        ports = world.method.ports
        ports.engine = FakeEngine(reply)
        ports.encoder = prompts
        ports.turns = Turns(Environments(config.environment, config.rollout), prompts, 4)
        world.scorer.value = lambda text: float(CALL in text)
        return world

    return make
