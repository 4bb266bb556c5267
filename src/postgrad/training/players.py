"""What takes part in a response beside the model: prompts, environments with tools, or agents."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from postgrad.config.schema import AgentConfig, EnvironmentConfig
from postgrad.rollout.turns import TurnRunner

if TYPE_CHECKING:  # imported by what has them
    from postgrad.agents.runner import Agents
    from postgrad.data.encode.encoder import Encoder
    from postgrad.environments.lookup import Environments

# (descriptions of tools, whether a prompt may be empty because an environment adds its text)
MakeEncoder = Callable[[Any, bool], "Encoder"]


class PlayersConfig(Protocol):
    """The settings of a run or of an evaluation."""

    environment: EnvironmentConfig
    agent: AgentConfig
    rollout: Any  # a RolloutConfig
    reward: Any  # a RewardConfig


@dataclass
class Players:
    """What takes part in responses; `turns` runs the environments or the agents, if there are."""

    encoder: "Encoder"
    environments: "Environments | None" = None
    agents: "Agents | None" = None
    turns: TurnRunner | None = None

    def verifier(self, setting: str) -> str:
        """Return the verifier of reward.verifier, which may be the environment's own reward."""
        from postgrad.environments.port import choose_verifier

        return choose_verifier(setting, self.environments or self.agents)


def open_players(config: PlayersConfig, make_encoder: MakeEncoder) -> Players:
    """Open the environments, tools and agents of the settings. Raises ConfigError."""
    rollout = config.rollout
    if config.environment.name or rollout.tools:
        from postgrad.environments.lookup import Environments
        from postgrad.rollout.conversations import Turns

        environments = Environments(config.environment, rollout)
        encoder = make_encoder(environments.schemas, environments.has_environment)
        turns = Turns(environments, encoder, rollout.max_turns)
        players = Players(encoder, environments, turns=turns)
    else:
        players = Players(make_encoder((), False))
    if config.agent.command:
        from postgrad.agents.runner import Agents

        players.agents = Agents(config.agent, players.encoder, config.reward.verifier)
        players.turns = players.turns or players.agents
    return players
