"""A panel: several models that go on from the same thoughts, and what a verifier makes of what they write.

Seeds follow from (run seed, step, the row's name, member, sample), so nobody's words depend on who else was asked.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from postgrad.problem import Failure, Problem
from postgrad.rollout.engine import Completion, Sampling, trajectory_seed
from postgrad.rollout.generator import Generator
from postgrad.rollout.respond import Scorer

Texts = list[
    list[str | None]
]  # of each row: member after member, sample after sample; None where nothing was written


class Panel:
    """Several speakers, each with a tokenizer of its own.

    Args:
        name: what the members are called, in metrics, in reasons of failures and in seeds.
        speakers: the members.
        starts, ends: each member's markers around a thought.
        sampling, num_samples: how each of them writes, and how many texts a row.
        seed: the run's.
    """

    def __init__(
        self,
        name: str,
        speakers: Sequence[Generator],
        starts: Sequence[str],
        ends: Sequence[str],
        sampling: Sampling,
        num_samples: int,
        seed: int,
    ) -> None:
        self.name, self.speakers, self.starts, self.ends = name, speakers, starts, ends
        self.sampling, self.num_samples, self.seed = sampling, num_samples, seed
        self.alone: dict[
            str, list[float]
        ] = {}  # what each member earns without a thought, by the problem's uid

    def ask(
        self,
        problems: Sequence[Problem],
        thoughts: Sequence[str | None],
        targets: Sequence[Problem],
        names: Sequence[str],
        step: int,
    ) -> tuple[Texts, dict[str, float]]:
        """What the members write for each row: the answer to its target, after somebody's thought about its problem; and metrics.

        Nobody is asked where there is no thought. `names` are the rows', for the seeds.
        """
        texts: Texts = [[] for _ in names]
        written: list[Completion] = []
        for k, speaker in enumerate(self.speakers):
            asked = zip(problems, thoughts, targets, strict=True)
            prompts = [
                [] if thought is None else self.prompt(k, problem, thought, target)
                for problem, thought, target in asked
            ]
            whose = [f"{self.name}/{name}/{k}" for name in names]
            seeds = [
                [
                    trajectory_seed(self.seed, step, one, sample)
                    for sample in range(self.num_samples)
                ]
                for one in whose
            ]
            for row, said in zip(
                texts, speaker.generate(prompts, seeds, self.sampling), strict=True
            ):
                row += (
                    [None] * self.num_samples
                    if said is None
                    else [speaker.prompts.decode(one.tokens) for one in said]
                )
                written += said or []
        count = max(1, len(written))
        metrics = {
            "asked": sum(thought is not None for thought in thoughts) / max(1, len(names)),
            "length": sum(len(one.tokens) for one in written) / count,
            "truncated": sum(one.finish == "length" for one in written) / count,
        }
        return texts, {f"{self.name}/{key}": value for key, value in metrics.items()}

    def prompt(self, k: int, problem: Problem, thought: str, target: Problem) -> list[int]:
        """The thought as the beginning of the problem's answer; or as an answer given, and another problem asked next."""
        prompts = self.speakers[k].prompts
        if target.uid == problem.uid:
            return prompts.encode_prefilled(problem, self.starts[k], thought, self.ends[k])
        turn = {"role": "assistant", "content": thought}
        return prompts.encode(
            replace(problem, uid="", messages=(*problem.messages, turn, *target.messages))
        )

    def score(
        self, scorer: Scorer, problems: Sequence[Problem], texts: Texts
    ) -> tuple[Tensor, list[str]]:
        """(rows, members, samples) scores, NaN where there is no text; and for each row why one could not be judged, or ""."""
        said = [
            (i, j, text)
            for i, row in enumerate(texts)
            for j, text in enumerate(row)
            if text is not None
        ]
        scores = torch.full((len(texts), len(self.speakers) * self.num_samples), torch.nan)
        reasons = [""] * len(texts)
        found = scorer.score([problems[i] for i, _, _ in said], [text for _, _, text in said])
        for (i, j, _), verdict in zip(said, found, strict=True):
            if isinstance(verdict, Failure):
                reasons[i] = f"{self.name}, {verdict.kind}: {verdict.reason}"
            else:
                scores[i, j] = verdict.value
        return scores.view(len(texts), len(self.speakers), self.num_samples), reasons

    def score_alone(
        self, scorer: Scorer, problems: Sequence[Problem], no_output_score: float, again: bool
    ) -> tuple[Tensor, list[str]]:
        """(rows, members, 1) what each earns without a thought; and for each row why that could not be judged, or "".

        It is asked once a problem and kept in `alone`; `again`: a member has changed, so that it is asked anew.
        """
        if again:
            self.alone.clear()
        wanted = list(
            {problem.uid: problem for problem in problems if problem.uid not in self.alone}.values()
        )
        texts, _ = self.ask(
            wanted,
            [""] * len(wanted),
            wanted,
            [f"alone/{problem.uid}" for problem in wanted],
            step=0,
        )
        scores, reasons = self.score(scorer, wanted, texts)
        failed = {
            problem.uid: reason for problem, reason in zip(wanted, reasons, strict=True) if reason
        }
        means = torch.where(scores.isnan(), no_output_score, scores).mean(-1).tolist()
        self.alone |= {
            problem.uid: row
            for problem, row in zip(wanted, means, strict=True)
            if problem.uid not in failed
        }
        rows = [self.alone.get(problem.uid, [0.0] * len(self.speakers)) for problem in problems]
        return torch.tensor(rows)[:, :, None], [failed.get(problem.uid, "") for problem in problems]
