"""Classmates: several models that continue the same thoughts, and the scores of their texts.

Seeds come from (run seed, step, the row's name, member, sample), so a member's text does not depend
on the other members or rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from postgrad.pictures import Picture
from postgrad.problem import Failure, Problem
from postgrad.rollout.engine import Completion, Sampling, trajectory_seed
from postgrad.rollout.generator import Generator
from postgrad.rollout.respond import Scorer

# One list per row, ordered by member, then by sample; None where a member wrote nothing.
Texts = list[list[str | None]]


class Classmates:
    """Several generators, each with its own tokenizer.

    Args:
        name: the members' name in metrics, in failure reasons and in seeds.
        generators: the members.
        starts, ends: each member's markers around a thought.
        sampling: how each member samples.
        num_samples: texts per row and member.
        seed: the run's seed.
    """

    def __init__(
        self,
        name: str,
        generators: Sequence[Generator],
        starts: Sequence[str],
        ends: Sequence[str],
        sampling: Sampling,
        num_samples: int,
        seed: int,
    ) -> None:
        self.name = name
        self.generators = generators
        self.starts = starts
        self.ends = ends
        self.sampling = sampling
        self.num_samples = num_samples
        self.seed = seed
        # By the problem's uid: each member's mean score without a thought.
        self.solo_scores: dict[str, list[float]] = {}

    def generate(
        self,
        problems: Sequence[Problem],
        thoughts: Sequence[str | None],
        targets: Sequence[Problem],
        names: Sequence[str],
        step: int,
    ) -> tuple[Texts, dict[str, float]]:
        """Let every member answer each row's target after the row's thought; also return metrics.

        Args:
            problems: the problem that each thought is about.
            thoughts: None means that no member is asked for this row.
            targets: the problem to answer; usually the row's own problem.
            names: the rows' names, for the seeds.
            step: the training step, for the seeds.
        """
        texts: Texts = [[] for _ in names]
        completions: list[Completion] = []
        images = [_images(*pair) for pair in zip(problems, targets, strict=True)]
        for member, generator in enumerate(self.generators):
            prompts = [
                [] if thought is None else self.prompt(member, problem, thought, target)
                for problem, thought, target in zip(problems, thoughts, targets, strict=True)
            ]
            seeds = [self._seeds(f"{self.name}/{name}/{member}", step) for name in names]
            results = generator.generate(prompts, seeds, self.sampling, images)
            for row_texts, row_completions in zip(texts, results, strict=True):
                if row_completions is None:
                    row_texts += [None] * self.num_samples
                    continue
                row_texts += [generator.encoder.decode(c.tokens) for c in row_completions]
                completions += row_completions
        return texts, self._metrics(thoughts, completions)

    def _seeds(self, name: str, step: int) -> list[int]:
        return [
            trajectory_seed(self.seed, step, name, sample) for sample in range(self.num_samples)
        ]

    def _metrics(
        self, thoughts: Sequence[str | None], completions: Sequence[Completion]
    ) -> dict[str, float]:
        num_asked = sum(thought is not None for thought in thoughts)
        num_tokens = sum(len(completion.tokens) for completion in completions)
        num_truncated = sum(completion.finish == "length" for completion in completions)
        count = max(1, len(completions))
        return {
            f"{self.name}/asked": num_asked / max(1, len(thoughts)),
            f"{self.name}/length": num_tokens / count,
            f"{self.name}/truncated": num_truncated / count,
        }

    def prompt(self, member: int, problem: Problem, thought: str, target: Problem) -> list[int]:
        """Return the token ids of one member's prompt.

        The thought starts the answer to its own problem. With another target, the thought is the
        answer to the first problem, and the target follows as the next question. The member's
        special tokens are removed from the thought, so that a thought cannot write turns.
        """
        encoder = self.generators[member].encoder
        thought = encoder.without_special_tokens(thought)
        if target.uid == problem.uid:
            return encoder.encode_prefilled(
                problem, self.starts[member], thought, self.ends[member]
            )
        turn = {"role": "assistant", "content": thought}
        messages = (*problem.messages, turn, *target.messages)
        both = replace(problem, uid="", messages=messages, images=_images(problem, target))
        return encoder.prompt(both)

    def score(
        self, scorer: Scorer, problems: Sequence[Problem], texts: Texts
    ) -> tuple[Tensor, list[str]]:
        """Return scores (rows, members, samples), NaN where there is no text, and failure reasons.

        A row's reason says why one of its texts could not be scored; "" if all were.
        """
        positions: list[tuple[int, int]] = []
        written: list[str] = []
        for row, row_texts in enumerate(texts):
            for column, text in enumerate(row_texts):
                if text is not None:
                    positions.append((row, column))
                    written.append(text)
        num_members = len(self.generators)
        scores = torch.full((len(texts), num_members * self.num_samples), torch.nan)
        reasons = [""] * len(texts)
        verdicts = scorer.score([problems[row] for row, _ in positions], written)
        for (row, column), verdict in zip(positions, verdicts, strict=True):
            if isinstance(verdict, Failure):
                reasons[row] = f"{self.name}, {verdict.kind}: {verdict.reason}"
            else:
                scores[row, column] = verdict.value
        return scores.view(len(texts), num_members, self.num_samples), reasons

    def score_alone(
        self, scorer: Scorer, problems: Sequence[Problem], no_output_score: float, again: bool
    ) -> tuple[Tensor, list[str]]:
        """Return (rows, members, 1) mean scores without a thought, and failure reasons as `score`.

        Each problem is answered once; `solo_scores` keeps the results. `again` answers all of them
        anew, because a member's weights have changed.
        """
        if again:
            self.solo_scores.clear()
        missing: dict[str, Problem] = {}
        for problem in problems:
            if problem.uid not in self.solo_scores:
                missing[problem.uid] = problem
        failed = self._score_missing(scorer, list(missing.values()), no_output_score)
        no_scores = [0.0] * len(self.generators)
        rows = [self.solo_scores.get(problem.uid, no_scores) for problem in problems]
        return torch.tensor(rows)[:, :, None], [failed.get(problem.uid, "") for problem in problems]

    def _score_missing(
        self, scorer: Scorer, problems: list[Problem], no_output_score: float
    ) -> dict[str, str]:
        """Add the scores of these problems to `solo_scores`; return failure reasons by uid."""
        thoughts = [""] * len(problems)
        names = [f"alone/{problem.uid}" for problem in problems]
        texts, _ = self.generate(problems, thoughts, problems, names, step=0)
        scores, reasons = self.score(scorer, problems, texts)
        means = torch.where(scores.isnan(), no_output_score, scores).mean(-1).tolist()
        failed: dict[str, str] = {}
        for problem, reason, member_means in zip(problems, reasons, means, strict=True):
            if reason:
                failed[problem.uid] = reason
            else:
                self.solo_scores[problem.uid] = member_means
        return failed


def _images(problem: Problem, target: Problem) -> tuple[Picture, ...]:
    """Return the pictures of a member's prompt."""
    if target.uid == problem.uid:
        return problem.prompt_images
    return (*problem.prompt_images, *target.prompt_images)
