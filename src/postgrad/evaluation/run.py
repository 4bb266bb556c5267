"""The work of an evaluation: batch after batch is answered, judged and written; then the summary of all that is there."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from postgrad.cluster import place_chat, place_engine
from postgrad.errors import RunError
from postgrad.evaluation import folder as files
from postgrad.evaluation.alpaca import is_alpaca, write_answers
from postgrad.evaluation.metrics import INTERVAL, summarize
from postgrad.evaluation.plan import Plan, engine_config, settle
from postgrad.evaluation.progress import Progress
from postgrad.evaluation.report import markdown
from postgrad.evaluation.votes import can_vote, vote
from postgrad.evaluation.winrate import win_rates
from postgrad.judge.pairwise import answer_of
from postgrad.methods.support.judging import connect_scorer
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Engine, Request, Sampling
from postgrad.rollout.respond import Answer, respond
from postgrad.verifiers.scorer import LLM_JUDGE


@dataclass
class Timed:
    """An engine whose tokens and seconds are counted."""

    engine: Engine
    tokens: int = 0
    seconds: float = 0.0

    @property
    def shares_weights(self) -> bool:
        return self.engine.shares_weights

    def publish(self, weights: dict[str, Tensor]) -> None:
        self.engine.publish(weights)

    def speed(self) -> dict[str, Any]:
        """Of this process alone; what an earlier one had answered is not in it."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
        }

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        began = time.perf_counter()
        out = self.engine.generate(requests, sampling)
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(done.tokens) for group in out for done in group)
        return out


def evaluate(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Answer what is not answered yet; returns the summary, which is in the folder too."""
    config, folder = plan.config, plan.folder
    stored = files.stored_settings(folder)
    if stored is not None:
        files.restore_auto_settings(stored, config)
    settle(plan)
    if stored is not None:
        files.check_same_settings(folder, stored, plan.identity)
    with ExitStack() as stack:
        scorer = stack.enter_context(plan.scorer)
        if (
            stored is not None
        ):  # held before it is looked at; a new folder is made only once the model is loaded
            stack.enter_context(files.locked_folder(folder, plan.identity))
        samples, batch = config.rollout.samples, config.rollout.batch
        done = {
            name: files.resume(folder / f"{name}.jsonl", problems, samples, batch)
            for name, problems in plan.sets.items()
        }
        speed: dict[str, Any] = {}
        if any(done[name] < len(problems) for name, problems in plan.sets.items()):
            progress.loading(plan)
            settings = engine_config(config)
            engine = Timed(stack.enter_context(place_engine(settings)))
            models: dict[str, Any] = {}
            if _is_marked(plan):
                judge_config = config.reward.judge
                models["judge"] = place_chat(
                    settings,
                    judge_config.model,
                    engine.engine,
                    config.data.template,
                    judge_config.concurrency,
                )
            if stored is None:
                stack.enter_context(files.locked_folder(folder, plan.identity))
            connect_scorer(config, scorer, models, folder)
            stack.enter_context(progress)
            for name in plan.sets:
                _answer_set(plan, name, done[name], engine, progress)
            speed = engine.speed()
        scorer.close()
        return _conclude(plan, speed)


def _is_marked(plan: Plan) -> bool:
    """Whether a language model judges."""
    return plan.config.reward.verifier == LLM_JUDGE


def _answer_set(plan: Plan, name: str, done: int, engine: Timed, progress: Progress) -> None:
    config, problems = plan.config, plan.sets[name]
    file = plan.folder / f"{name}.jsonl"
    rows = [row for _, row in files.read_rows(file)] if done else []
    right, failed, total = (
        sum(row["right"] for row in rows),
        sum(bool(row["failure"]) for row in rows),
        len(rows),
    )
    progress.begin(name, len(problems), done)
    for start in range(done, len(problems), config.rollout.batch):
        chosen = problems[start : start + config.rollout.batch]
        answers = respond(
            engine,
            plan.scorer,
            plan.prompts,
            chosen,
            plan.sampling,
            config.rollout.samples,
            config.seed,
            plan.turns,
        )
        batch = [_row(plan, answer) for answer in answers]
        failed += sum(bool(row["failure"]) for row in batch)
        total += len(batch)
        _check_failures(plan, name, batch, failed / total)
        files.append(file, batch)
        right += sum(row["right"] for row in batch)
        progress.advance(
            name, start + len(chosen), right / total, engine.tokens / max(engine.seconds, 1e-9)
        )


def _check_failures(plan: Plan, name: str, batch: list[dict[str, Any]], share: float) -> None:
    limit = plan.config.reward.max_failure_rate
    if share > limit:
        first = next(row["failure"] for row in batch if row["failure"])
        raise RunError(
            f"set {name}: {share:.0%} of the responses could not be judged (reward.max_failure_rate={limit:g}); "
            f"the first of the last batch: {first['kind']}: {first['reason']}"
        )


def _row(plan: Plan, answer: Answer) -> dict[str, Any]:
    """One line of a result file. Nothing in it depends on the clock."""
    problem, verdict = answer.problem, answer.verdict
    verifier = plan.scorer.name_for(problem)
    score = verdict.value if isinstance(verdict, Score) else None
    return {
        "uid": problem.uid,
        "sample": answer.sample,
        "data_source": problem.data_source,
        "prompt": _prompt(plan, problem),
        "response": answer.text,
        "tokens": answer.tokens,
        "ground_truth": problem.ground_truth,
        "verifier": verifier,
        "score": score,
        "right": score is not None and score >= plan.config.reward.pass_score,
        "parts": verdict.parts if isinstance(verdict, Score) else {},
        "failure": {"kind": verdict.kind, "reason": verdict.reason}
        if isinstance(verdict, Failure)
        else None,
        "answer": vote(verifier, answer.text, problem),
        "can_vote": can_vote(verifier),
        "finish": answer.finish,
        "length": len(answer.tokens),
        "seed": answer.seed,
    }


def _prompt(plan: Plan, problem: Problem) -> str:
    """The prompt as the model sees it, special tokens written out."""
    return plan.prompts.tokenizer.decode(
        plan.prompts.encode(problem), clean_up_tokenization_spaces=False
    )  # type: ignore[return-value]


def _result(plan: Plan, name: str) -> dict[str, Any]:
    """What a set's result file says; the answers also as AlpacaEval's tool reads them, where that is their kind."""
    rows, problems = (
        [row for _, row in files.read_rows(plan.folder / f"{name}.jsonl")],
        plan.sets[name],
    )
    result = summarize(rows) | {"dropped": plan.dropped[name], "prompts_truncated": plan.cut[name]}
    if not plan.pairwise and not is_alpaca(problems):
        return result
    answers = [
        row | {"response": answer_of(row["response"], plan.config.rollout.stop or ())}
        for row in rows
    ]
    write_answers(plan.folder / f"{name}.outputs.json", problems, answers, plan.target.label, name)
    return result | {"win": win_rates(answers)} if plan.pairwise else result


def _conclude(plan: Plan, speed: dict[str, Any]) -> dict[str, Any]:
    """summary.json and report.md from the result files. What the clock says stands under `speed`, apart from all else."""
    sets = {name: _result(plan, name) for name in plan.sets}
    file = plan.folder / "summary.json"
    if not speed and file.is_file():  # nothing was left to do: what the clock said then still holds
        speed = json.loads(file.read_text()).get("speed", {})
    summary = {
        "model": plan.target.label,
        "settings": plan.identity,
        "interval": INTERVAL,
        "sets": sets,
        "speed": speed,
    }
    files.write(file, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    files.write(plan.folder / "report.md", markdown(summary))
    return summary
