"""Self-distillation: the teacher is the policy itself with a hint in its prompt.

The student samples from the plain prompt. The teacher sees the same response after a prompt that
also has the solution or demonstration of the problem, and its log-probs are imitated as in
distillation. The teacher is the starting model, a copy that follows the policy, or the policy of
the current step. SDFT does this with demonstrations, OPSD with solutions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.config.schema import setting
from postgrad.errors import ConfigError
from postgrad.methods.distill import Distill, DistillSettings
from postgrad.methods.ports import Role
from postgrad.methods.step import Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.synced_reference import synced_role
from postgrad.problem import named
from postgrad.types import Batch, Problem, Ragged

HINTS = ("demonstration", "ground_truth")


@dataclass
class SelfDistillSettings(DistillSettings):
    hint: str = setting("demonstration", "what the teacher is shown", choices=HINTS)
    hint_template: str = setting(
        "{question}\n\nThis is a correct solution:\n{hint}\n\nAnswer the question in your own way.",
        "the teacher's question: a text with {question} and {hint}",
    )
    refresh: bool = setting(
        False, "the teacher is the policy of the current step instead of the starting model"
    )
    teacher_sync_every: int = setting(
        0,
        "steps between two updates of the teacher from the policy; 0: the starting model",
        at_least=0,
    )
    teacher_mixup: float = setting(
        1.0,
        "share of the policy's weights in the updated teacher; 1 copies the policy",
        above=0.0,
        at_most=1.0,
    )


class SelfDistill(Distill):
    Settings = SelfDistillSettings

    def check_teacher(self) -> None:
        settings = self.settings
        if settings.teacher:
            raise ConfigError(
                f"method.teacher={settings.teacher}: the teacher of self_distill is the policy; "
                "remove it, or use the recipe distill"
            )
        template = settings.hint_template
        if "{question}" not in template or "{hint}" not in template:
            raise ConfigError(
                f"method.hint_template={template!r} needs both {{question}} and {{hint}}"
            )

    def check_unread(self) -> None:
        super().check_unread()
        settings = self.settings
        if settings.refresh:
            names = ["teacher_sync_every", "teacher_mixup"]
            refuse_unread("method", settings, names, "with method.refresh=true")
        elif not settings.teacher_sync_every:
            reason = "with method.teacher_sync_every=0"
            fix = "add method.teacher_sync_every=1"
            refuse_unread("method", settings, ["teacher_mixup"], reason, fix)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not self.hint_of(problem):
                raise ConfigError(
                    f"{named(problem)} has no {self.settings.hint}; "
                    "self_distill shows it to the teacher (method.hint)"
                )

    def roles(self) -> dict[str, Role]:
        settings = self.settings
        roles = super().roles()
        del roles["teacher"]
        if not settings.refresh:
            roles["teacher"] = synced_role(settings.teacher_sync_every, settings.teacher_mixup)
        return roles

    def teacher(self) -> Any:
        return self.ports.policy if self.settings.refresh else super().teacher()

    def teacher_batch(self, batch: Batch, step: Step) -> Batch:
        """The same responses after prompts with a hint."""
        prompts = [
            self.ports.prompts.encode(self.with_hint(problem)) for problem in step.problems(batch)
        ]
        return Batch(Ragged.of(prompts), batch.response, dict(batch.tokens), dict(batch.rows))

    def with_hint(self, problem: Problem) -> Problem:
        """The problem as the teacher sees it."""
        *before, last = problem.messages
        question = self.settings.hint_template.replace("{question}", last["content"])
        text = question.replace("{hint}", self.hint_of(problem))
        messages = (*before, {**last, "content": text})
        return replace(problem, uid=f"{problem.uid}/hint", messages=messages)

    def hint_of(self, problem: Problem) -> str:
        if self.settings.hint == "ground_truth":
            return problem.ground_truth
        return problem.demonstrations[0] if problem.demonstrations else ""
