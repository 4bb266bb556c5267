"""Self-distillation, a method in one file: the teacher is the policy with a hint in its prompt.

    postgrad train distill method=examples/self_distill.py:SelfDistill method.divergence=reverse \\
        model.path=MODEL data.train=FILE

The student samples from the plain prompt. The teacher sees the same response after a prompt that
also has the demonstration of the problem (SDFT, Shenfeld et al. 2026), or its ground truth with
method.hint=ground_truth (OPSD). Expect: distill/reverse falls. The teacher is the starting model;
method.refresh=true makes it the policy of the current step.
"""

from dataclasses import dataclass, replace

from postgrad import Batch, ConfigError
from postgrad.config.schema import setting
from postgrad.methods.distill import Distill, DistillSettings
from postgrad.methods.ports import Role
from postgrad.problem import problem_label
from postgrad.types import Ragged

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


class SelfDistill(Distill):
    Settings = SelfDistillSettings

    def check_teacher(self):
        settings = self.settings
        if settings.teacher:
            raise ConfigError(
                f"method.teacher={settings.teacher}: the teacher of SelfDistill is the policy; "
                "remove it, or leave out method=examples/self_distill.py:SelfDistill"
            )
        template = settings.hint_template
        if "{question}" not in template or "{hint}" not in template:
            raise ConfigError(
                f"method.hint_template={template!r} needs both {{question}} and {{hint}}"
            )

    def check_problems(self, problems):
        for problem in problems:
            if not self.hint_of(problem):
                raise ConfigError(
                    f"{problem_label(problem)} has no {self.settings.hint}; "
                    "SelfDistill shows it to the teacher (method.hint)"
                )

    def roles(self):
        settings = self.settings
        roles = super().roles()
        del roles["teacher"]
        if not settings.refresh:
            roles["teacher"] = Role("frozen")
        return roles

    def teacher(self):
        return self.ports.policy if self.settings.refresh else super().teacher()

    def teacher_batch(self, batch, step):
        """Return the same responses after prompts with a hint."""
        prompts = [
            self.ports.encoder.prompt(self.with_hint(problem)) for problem in step.problems(batch)
        ]
        return Batch(Ragged.of(prompts), batch.response, dict(batch.tokens), dict(batch.rows))

    def with_hint(self, problem):
        """Return the problem as the teacher sees it."""
        *before, last = problem.messages
        question = self.settings.hint_template.replace("{question}", last["content"])
        text = question.replace("{hint}", self.hint_of(problem))
        messages = (*before, {**last, "content": text})
        return replace(problem, uid=f"{problem.uid}/hint", messages=messages)

    def hint_of(self, problem):
        if self.settings.hint == "ground_truth":
            return problem.ground_truth
        return problem.demonstrations[0] if problem.demonstrations else ""
