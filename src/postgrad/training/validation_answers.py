"""The answers of a validation: their metrics, and files in RUN/eval/validation-STEP/.

The folder has the files of an evaluation, so the page shows them as one: SET.jsonl (with a second
pass also SET-sampled.jsonl) and summary.json.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.files import atomic_write_text
from postgrad.rollout.respond import Answer
from postgrad.verifiers.reward_log import PREFIX as LOG_PREFIX

if TYPE_CHECKING:
    from postgrad.verifiers.scorer import Scorer

PASS_SCORE = 1.0  # smallest score of a right answer
FOLDER_NAME = re.compile(r"validation-([0-9]{6,})")


def answer_folders(run: Path) -> dict[int, Path]:
    """Return the folder of each validation of a run, by step; other evaluations are left out."""
    folders: dict[int, Path] = {}
    for path in (run / "eval").glob("validation-*"):
        match = FOLDER_NAME.fullmatch(path.name)
        if match is not None:
            folders[int(match[1])] = path
    return folders


class ValidationAnswers:
    """Collects the answers of one validation, set by set, and writes them."""

    def __init__(self, config: Config, folder: Path, scorer: "Scorer") -> None:
        self.config = config
        self.folder = folder
        self.scorer = scorer
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def add(self, set_name: str, answers: Mapping[str, Sequence[Answer]]) -> dict[str, float]:
        """Keep the answers of a set, by pass; return metrics of the last pass.

        They are validation/length, truncated and part/NAME; with k > 1 samples per problem also
        best@k and maj@k; log/NAME if reward functions log metrics.
        """
        rows: list[dict[str, Any]] = []
        for number, some in enumerate(answers.values()):
            rows = [self._row(answer) for answer in some]
            self.rows[set_name if number == 0 else f"{set_name}-sampled"] = rows
        return answer_metrics(rows) if rows else {}

    def write(self, step: int) -> None:
        """Write the files of this validation. Raises RunError."""
        if not self.rows:
            return
        from postgrad.results.metrics import INTERVAL, summarize

        folder = self.folder / "eval" / f"validation-{step:06d}"
        summary = {
            "model": f"{self.config.name}-step-{step}",
            "settings": {
                "step": step,
                "seed": self.config.seed,
                "reward": {"verifier": self.config.reward.verifier, "pass_score": PASS_SCORE},
            },
            "interval": INTERVAL,
            "sets": {name: summarize(rows) for name, rows in self.rows.items()},
            "speed": {},
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, rows in self.rows.items():
                lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                atomic_write_text(folder / f"{name}.jsonl", lines)
            atomic_write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            raise RunError(f"{folder} could not be written: {error.strerror}") from error

    def _row(self, answer: Answer) -> dict[str, Any]:
        from postgrad.results.rows import result_row

        problem = answer.problem
        return result_row(
            problem,
            answer.sample,
            answer.text,
            answer.verdict,
            verifier=self.scorer.name_for(problem),
            pass_score=PASS_SCORE,
            prompt=str(problem.messages[-1]["content"]),
            finish=answer.finish,
            length=len(answer.tokens),
            seed=answer.seed,
            logged=answer.logged,
            metrics=answer.metrics,
        )


def answer_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics of the rows of one pass, as validation/NAME."""
    from postgrad.results.metrics import group_by_problem, summarize

    summary = summarize(rows)
    metrics = {"length": summary["length"]["mean"], "truncated": summary["truncated"]}
    metrics |= {f"part/{name}": value for name, value in summary["parts"].items()}
    metrics |= {f"{LOG_PREFIX}{name}": value for name, value in summary.get("log", {}).items()}
    samples = summary["samples"]
    if samples > 1:
        groups = group_by_problem(rows)
        best = [max(row["score"] or 0.0 for row in group) for group in groups]
        metrics[f"best@{samples}"] = sum(best) / len(best)
        if summary["maj"]:
            metrics[f"maj@{samples}"] = summary["maj"][str(samples)]["value"]
    return {f"validation/{name}": value for name, value in metrics.items()}
