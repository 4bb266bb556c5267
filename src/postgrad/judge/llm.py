"""A language model that rates responses: it reads the question and the response and gives a number.

The model is a function that answers prompts, wherever it runs. A reply without a rating is asked
for again; after the last try it is a Failure, never a zero. Ratings are stored by judge and
prompt, so that no prompt is asked twice.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from postgrad.config.schema import JudgeConfig
from postgrad.errors import RunError
from postgrad.judge.templates import fill
from postgrad.pictures import text_of_content
from postgrad.problem import Failure, Problem, Score

# (prompts, number of the attempt) -> one reply or Failure per prompt
AskModel = Callable[[Sequence[str], int], list[str | Failure]]

RATINGS_STEM = "judge"  # ratings are in judge.jsonl, in the folder of a run or an evaluation

_RATING_LINE = re.compile(r"^[\s>#*_`-]*rating[\s*_`]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_FIRST_NUMBER = re.compile(r"[\s*_`\[(<{]*([+-]?\d+)")
_ONLY_NUMBER = re.compile(r"[\[(]?[+-]?\d+[\])]?\.?")


def parse_rating(reply: str, lowest: int, highest: int) -> int | None:
    """Return the rating in a judge's reply, clamped to the scale, or None.

    The rating is the number on the last RATING line, or a reply that is one whole number. Numbers
    in prose do not count. 7.9 and 7/10 are read as 7.
    """
    lines = _RATING_LINE.findall(reply)
    text = lines[-1] if lines else reply.strip()
    match = _FIRST_NUMBER.match(text)
    if match is None:
        return None
    if not lines and not _ONLY_NUMBER.fullmatch(text):
        return None
    return min(max(int(match[1]), lowest), highest)


def question_of(problem: Problem) -> str:
    """Return the question that the judge sees: the last user message.

    A data set can give another wording for judges, as `raw_question_for_monitor`.
    """
    for extra in (
        problem.extra,
        problem.extra.get("reward_model"),
        problem.extra.get("extra_info"),
    ):
        if isinstance(extra, dict) and isinstance(extra.get("raw_question_for_monitor"), str):
            return extra["raw_question_for_monitor"]
    for message in reversed(problem.messages):
        if message["role"] == "user":
            return text_of_content(message["content"])
    return text_of_content(problem.messages[-1]["content"])


class RatingStore:
    """Ratings by key, in memory and, if `file` is given, in a JSON-lines file.

    Each rating is one line: a killed process loses at most the last line.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.ratings: dict[str, int] = {}
        if file is None or not file.is_file():
            return
        for line in file.read_text().splitlines():
            try:
                key, rating = json.loads(line)
            except ValueError:  # the process was killed while it wrote this line
                continue
            self.ratings[key] = rating

    def add(self, ratings: dict[str, int]) -> None:
        """Store these ratings, in the file too. Raises RunError if it cannot be written."""
        self.ratings |= ratings
        if self.file is None or not ratings:
            return
        try:
            with self.file.open("a+b") as file:
                if not _ends_with_newline(file.fileno()):
                    file.write(b"\n")
                for item in ratings.items():
                    file.write(json.dumps(item).encode() + b"\n")
        except OSError as error:
            raise RunError(f"{self.file} could not be written: {error.strerror}") from error


def _ends_with_newline(fd: int) -> bool:
    """Return whether a file is empty or its last byte is a newline."""
    size = os.fstat(fd).st_size
    return size == 0 or os.pread(fd, 1, size - 1) == b"\n"


class LlmJudge:
    """Rates responses through a model.

    Args:
        config: reward.judge.
        template: the prompt, with {question} and {response}.
        ask: the model.
        file: where ratings are stored; None keeps them in memory only.
        judge_name: part of the key under which a rating is stored; default: reward.judge.model.
    """

    def __init__(
        self,
        config: JudgeConfig,
        template: str,
        ask: AskModel,
        file: Path | None = None,
        judge_name: str = "",
    ) -> None:
        self.config = config
        self.template = template
        self.ask = ask
        self.store = RatingStore(file)
        self.judge_name = judge_name or config.model

    def rate(
        self, questions: Sequence[str], texts: Sequence[str], lowest: int, highest: int
    ) -> list[int | Failure]:
        """Return one rating or Failure per text, in order."""
        prompts = [
            fill(self.template, question=question, response=text)
            for question, text in zip(questions, texts, strict=True)
        ]
        return self.ask_all(prompts, lambda reply: parse_rating(reply, lowest, highest), "rating")

    def ask_all(
        self, prompts: Sequence[str], parse: Callable[[str], int | None], kind: str
    ) -> list[int | Failure]:
        """Return what `parse` reads in the reply to each prompt, or a Failure, in order.

        Equal prompts are asked once. `kind` names the value in the reason of a Failure.
        """
        keys = [self._key(prompt) for prompt in prompts]
        pending = {
            key: prompt
            for key, prompt in zip(keys, prompts, strict=True)
            if key not in self.store.ratings
        }
        failures: dict[str, Failure] = {}
        for attempt in range(self.config.retries + 1):
            if not pending:
                break
            replies = self.ask(list(pending.values()), attempt)
            ratings: dict[str, int] = {}
            for key, reply in zip(list(pending), replies, strict=True):
                if isinstance(reply, Failure):
                    failures[key] = reply
                    continue
                rating = parse(reply)
                if rating is None:
                    failures[key] = _no_value(kind, reply, attempt + 1)
                    continue
                ratings[key] = rating
                del pending[key]
            self.store.add(ratings)
        return [self._rating_or_failure(key, failures) for key in keys]

    def _key(self, prompt: str) -> str:
        text = f"{self.judge_name}\0{prompt}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _rating_or_failure(self, key: str, failures: dict[str, Failure]) -> int | Failure:
        if key in self.store.ratings:
            return self.store.ratings[key]
        return failures.get(key, Failure("judge", "not asked"))

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """Return one Score, whose value is the rating, or one Failure per response, in order."""
        questions = [question_of(problem) for problem in problems]
        ratings = self.rate(questions, responses, self.config.lowest, self.config.highest)
        scores: list[Score | Failure] = []
        for rating in ratings:
            if isinstance(rating, Failure):
                scores.append(rating)
            else:
                scores.append(Score(float(rating), {"rating": float(rating)}))
        return scores


def _no_value(kind: str, reply: str, tries: int) -> Failure:
    end = " ".join(reply.split())[-80:]
    return Failure("judge", f"no {kind} in the judge's reply after {tries} tries; it ends {end!r}")
