"""The line of an evaluation: responses -> scores -> rows -> summary.

`postgrad generate` (generate.py) is this line without scores, `postgrad score` (score.py) has a
file of responses instead of a model.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from postgrad.cluster.backends import open_engine
from postgrad.cluster.generators import open_scoring_models
from postgrad.data.rollout_folder import write_pictures
from postgrad.data.show import shorten_pictures
from postgrad.errors import ConfigError
from postgrad.evaluation import folder as files
from postgrad.evaluation.alpaca import is_alpaca, write_answers
from postgrad.evaluation.plan import Plan, engine_config, resolve_auto_settings
from postgrad.evaluation.progress import Progress
from postgrad.evaluation.report import markdown
from postgrad.evaluation.winrate import win_rates
from postgrad.job_folder import restore_auto
from postgrad.judge.pairwise import answer_of
from postgrad.methods.support.judging import connect_scorer
from postgrad.problem import Problem
from postgrad.results.metrics import INTERVAL, summarize
from postgrad.results.rows import check_failure_rate, result_row
from postgrad.rollout.engine import Completion, Engine, Request, Sampling
from postgrad.rollout.respond import Answer, Response, generate, respond


@dataclass
class TimedEngine:
    """An engine that counts its tokens and seconds."""

    engine: Engine
    tokens: int = 0
    seconds: float = 0.0

    @property
    def shares_weights(self) -> bool:
        return self.engine.shares_weights

    def publish(self, weights: dict[str, Tensor]) -> None:
        self.engine.publish(weights)

    def speed(self) -> dict[str, Any]:
        """Return tokens, seconds and tokens per second of this process."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
        }

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        began = time.perf_counter()
        groups = self.engine.generate(requests, sampling)
        self.seconds += time.perf_counter() - began
        for group in groups:
            self.tokens += sum(len(completion.tokens) for completion in group)
        return groups


def evaluate(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Generate and score the missing responses; return the summary and write it to the folder.

    Raises:
        ConfigError: the folder has results of other settings, or is in use, or the verifier can
            score no problem of a set.
        RunError: too many responses could not be scored, or a file could not be written.
    """
    config = plan.config
    folder = plan.folder
    is_stored = continue_job(plan, folder)
    with ExitStack() as stack:
        scorer = stack.enter_context(plan.scorer)
        if plan.turns is not None:
            stack.callback(plan.turns.close)
        # An existing folder is locked before it is read. A new one is created only after the
        # model is loaded, so that a model that cannot be loaded leaves no folder.
        if is_stored:
            stack.enter_context(files.locked_folder(folder, plan.identity))
        speed: dict[str, Any] = {}
        if not is_stored or not _is_complete(plan):
            for name, problems in plan.sets.items():
                scorer.check_fit(problems, name)
            progress.loading(plan)
            for note in (*plan.notes, *scorer.truth_notes(plan.sets)):
                progress.note(note)
            engine = TimedEngine(stack.enter_context(open_engine(engine_config(config))))
            models = open_scoring_models(
                engine_config(config), config.reward, engine.engine, config.data.template
            )
            if not is_stored:
                stack.enter_context(files.locked_folder(folder, plan.identity))
            connect_scorer(config, scorer, models, folder)
            stack.enter_context(progress)
            for name in plan.sets:
                run_set(plan, name, folder, engine, progress)
            speed = engine.speed()
        scorer.close()
        sets = {name: _summarize_set(plan, name) for name in plan.sets}
        return write_summary(folder, plan.target.label, plan.identity, sets, speed)


def continue_job(plan: Plan, folder: Path) -> bool:
    """Resolve the plan's `auto` settings; return whether the folder has results to continue.

    Raises:
        ConfigError: the folder has results of other settings.
    """
    stored = files.stored_settings(folder)
    if stored is not None:
        restore_auto(plan.config, stored, files.AUTO)
    resolve_auto_settings(plan)
    if stored is not None:
        files.check_same_settings(folder, stored, plan.identity)
    return stored is not None


def _resume(plan: Plan, name: str, folder: Path) -> int:
    """Return how many problems of the set have results in the folder already."""
    rollout = plan.config.rollout
    file = folder / f"{name}.jsonl"
    return files.resume(file, plan.sets[name], rollout.samples, rollout.batch)


def _is_complete(plan: Plan) -> bool:
    done = [_resume(plan, name, plan.folder) for name in plan.sets]
    return done == [len(problems) for problems in plan.sets.values()]


def run_set(
    plan: Plan,
    name: str,
    folder: Path,
    engine: TimedEngine,
    progress: Progress,
    is_scored: bool = True,
) -> None:
    """Append the missing rows of a set to its file in the folder, batch by batch."""
    num_done = _resume(plan, name, folder)
    config = plan.config
    problems = plan.sets[name]
    file = folder / f"{name}.jsonl"
    rows = [row for _, row in files.read_rows(file)] if num_done else []
    num_right = sum(row.get("right", False) for row in rows)
    num_failed = sum(bool(row.get("failure")) for row in rows)
    num_responses = len(rows)
    progress.begin(name, len(problems), num_done)
    for start in range(num_done, len(problems), config.rollout.batch):
        chunk = problems[start : start + config.rollout.batch]
        if is_scored:
            write_pictures(folder, [p for problem in chunk for p in problem.prompt_images])
        sampled = (chunk, plan.sampling, config.rollout.samples, config.seed, plan.turns)
        accuracy = None
        if is_scored:
            answers = respond(engine, plan.scorer, plan.encoder, *sampled)
            batch = [_result_row(plan, answer) for answer in answers]
            num_responses += len(batch)
            num_failed += sum(bool(row["failure"]) for row in batch)
            limit = config.reward.max_failure_rate
            check_failure_rate(name, batch, num_failed / num_responses, limit)
            num_right += sum(row["right"] for row in batch)
            accuracy = num_right / num_responses
        else:
            batch = [_response_row(one) for one in generate(engine, plan.encoder, *sampled)]
        files.append(file, batch)
        tokens_per_second = engine.tokens / max(engine.seconds, 1e-9)
        progress.advance(name, start + len(chunk), accuracy, tokens_per_second)


def _response_row(response: Response) -> dict[str, Any]:
    return {
        "uid": response.problem.uid,
        "sample": response.sample,
        "response": response.text,
        "finish": response.finish,
        "length": len(response.tokens),
    }


def _result_row(plan: Plan, answer: Answer) -> dict[str, Any]:
    return result_row(
        answer.problem,
        answer.sample,
        answer.text,
        answer.verdict,
        verifier=plan.scorer.name_for(answer.problem),
        pass_score=plan.config.reward.pass_score,
        prompt=_prompt_text(plan, answer.problem),
        tokens=answer.tokens,
        finish=answer.finish,
        length=len(answer.tokens),
        seed=answer.seed,
    )


def _prompt_text(plan: Plan, problem: Problem) -> str:
    """Return the prompt as the model gets it; of the tokens of a picture there is their number."""
    ids = plan.encoder.prompt(problem)
    text = str(plan.encoder.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return shorten_pictures(text) if problem.images else text


def _summarize_set(plan: Plan, name: str) -> dict[str, Any]:
    """Return the metrics of a set; write SET.outputs.json for AlpacaEval and pairwise judges."""
    problems = plan.sets[name]
    rows = [row for _, row in files.read_rows(plan.folder / f"{name}.jsonl")]
    result = summarize(rows)
    result["dropped"] = plan.dropped[name]
    result["prompts_truncated"] = plan.truncated_prompts[name]
    if not plan.is_pairwise and not is_alpaca(problems):
        return result
    stop = plan.config.rollout.stop or ()
    answers = [row | {"response": answer_of(row["response"], stop)} for row in rows]
    write_answers(plan.folder / f"{name}.outputs.json", problems, answers, plan.target.label, name)
    if plan.is_pairwise:
        result["win"] = win_rates(answers)
    return result


def write_summary(
    folder: Path, model: str, identity: dict[str, Any], sets: dict[str, Any], speed: dict[str, Any]
) -> dict[str, Any]:
    """Write summary.json and report.md; return the summary. Only `speed` contains times."""
    file = folder / "summary.json"
    if not speed and file.is_file():  # nothing was generated now: keep the stored speed
        with contextlib.suppress(ConfigError):  # a damaged summary is written again without it
            speed = files.read_json_object(file).get("speed", {})
    summary = {
        "model": model,
        "settings": identity,
        "interval": INTERVAL,
        "sets": sets,
        "speed": speed,
    }
    files.write(file, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    files.write(folder / "report.md", markdown(summary))
    return summary
