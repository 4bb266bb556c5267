"""What a method may call: the policy, the engine, the scorer, and other models by role."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from postgrad.errors import UnknownName, did_you_mean

if TYPE_CHECKING:  # transformers takes seconds to import, and a list of settings needs no model
    from postgrad.model.port import Critic, Policy
    from postgrad.rollout.engine import Engine
    from postgrad.rollout.respond import Encoder, Scorer
    from postgrad.rollout.turns import TurnRunner

LIVE = "policy:live"  # the path of a role that is the engine of this run
KINDS = ("frozen", "critic", "engine", "chat", "scores")


@dataclass(frozen=True)
class Role:
    """A model that a method needs besides the policy.

    Args:
        kind: `frozen` gives log-probs and is never trained. `critic` is trained on values. `engine`
            continues prompts; its port is a Generator. `chat` answers messages; its port is a Chat.
            `scores` is a reward model; its port is a ModelVerifier.
        path: where the model is, as in model.path. Empty: the policy's starting model. An engine or
            a chat may also be `policy:live` (the engine that samples the rollouts of this run), a
            model of a server (`http://host:8000/v1#model`), or an entry of a file of servers
            (`servers.json#model`).
        lr: the learning rate of a critic.
    """

    kind: str
    path: str = ""
    lr: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName(f"Role({self.kind!r}): {did_you_mean(self.kind, KINDS)}", at="roles")


@dataclass
class Ports:
    """The models and services that a method may call, wherever they run.

    `models` has the method's roles by name. `turns` is set with tools, an environment
    or an agent.
    """

    policy: "Policy"
    engine: "Engine"
    scorer: "Scorer"
    encoder: "Encoder"
    models: dict[str, Any] = field(default_factory=dict)
    turns: "TurnRunner | None" = None

    @property
    def reference(self) -> "Policy":
        return self.models["reference"]

    @property
    def critic(self) -> "Critic":
        return self.models["critic"]
