"""Settings of distillation from a teacher, and of self-distillation, which extends them."""

from dataclasses import dataclass

from postgrad.algorithms.distillation import DIVERGENCES
from postgrad.config.schema import setting
from postgrad.methods.support.grpo_settings import GrpoSettings


@dataclass
class DistillSettings(GrpoSettings):
    teacher: str = setting(
        "",
        "the teacher, a model with the same tokenizer: path, hub id, or a server's model, "
        "http://host:8000/v1?tokenizer=PATH#model",
    )
    divergence: str = setting(
        "sampled",
        "sampled: policy gradient on the sampled tokens; forward, reverse, jsd: direct gradient",
        choices=DIVERGENCES,
    )
    top_k: int = setting(
        64, "forward, reverse, jsd: most likely tokens of the teacher to compare", at_least=1
    )
    jsd_beta: float = setting(
        0.5, "jsd: share of the teacher in the mixture", above=0.0, at_most=0.99
    )
    distill_coef: float = setting(1.0, "coefficient of the distillation term", above=0.0)
    reward_coef: float = setting(
        0.0, "coefficient of the verifier's advantages; 0: no verifier is asked", at_least=0.0
    )
