"""`postgrad score`: scores responses that a file already has; the report is that of eval."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postgrad.cluster.generators import open_scoring_models
from postgrad.config.compose import compose_section
from postgrad.config.overrides import Override, rename
from postgrad.config.schema import EngineConfig, ModelConfig, RolloutConfig, setting
from postgrad.config.setting import REQUIRED
from postgrad.data.sets import split_sets
from postgrad.errors import Conflict, Missing
from postgrad.evaluation import folder as files
from postgrad.evaluation.responses import Responded, read_responses
from postgrad.evaluation.run import write_summary
from postgrad.evaluation.settings import EvalReward
from postgrad.evaluation.winrate import win_rates
from postgrad.judge.templates import is_pairwise
from postgrad.methods.ports import LIVE
from postgrad.methods.support.judging import (
    check_judge,
    check_references,
    connect_scorer,
)
from postgrad.pictures import text_of_content
from postgrad.results.metrics import summarize
from postgrad.results.rows import check_failure_rate, result_row
from postgrad.verifiers.expression import LLM_JUDGE
from postgrad.verifiers.scorer import Scorer
from postgrad.version import __version__

SHORT_KEYS = {
    "data": "data.sets",
    "responses": "data.responses",
    "limit": "data.limit",
    "workers": "reward.workers",
    "verifier": "reward.verifier",
    "pass_score": "reward.pass_score",
}


@dataclass
class ScoreData:
    sets: str = setting(
        REQUIRED, "files of responses separated by commas; each is one set; NAME=FILE names a set"
    )
    responses: str = setting(
        "", "column of responses: a text or a list of texts; empty: responses, response, ..."
    )
    limit: int = setting(0, "use only the first problems of each file; 0: all", at_least=0)


@dataclass
class ScoreConfig:
    """The settings of `postgrad score`."""

    out: str = setting("", "output folder; empty: a name from the files and the settings")
    name: str = setting("", "name of the model in the report; empty: the name of the first file")
    seed: int = setting(0, "random seed of a judge", at_least=0)
    data: ScoreData = field(default_factory=ScoreData)
    reward: EvalReward = field(default_factory=EvalReward)

    @property
    def rollout(self) -> RolloutConfig:
        """What a judge reads of the sampling settings: their defaults, since nothing is sampled."""
        return RolloutConfig()


def read_score_settings(source: str, overrides: Sequence[Override]) -> ScoreConfig:
    """Return the checked settings of `postgrad score FILE key=value ...`. Raises ConfigError."""
    base: dict[str, Any] = {"data": {"sets": source}}
    renamed = [rename(override, lambda key: SHORT_KEYS.get(key, key)) for override in overrides]
    config: ScoreConfig = compose_section(ScoreConfig, renamed, base)
    check_judge(config.reward)
    if config.reward.judge.model == LIVE:
        raise Missing(f"reward.judge.model={LIVE} needs a policy; give a model or a server")
    return config


def score_files(config: ScoreConfig) -> dict[str, Any]:
    """Scores the responses of all files; returns the summary and writes it to the folder.

    The folder has the files of an evaluation: SET.jsonl, summary.json, report.md.

    Raises:
        ConfigError: a file cannot be read, or the folder has results of other settings.
        RunError: too many responses could not be scored.
    """
    reward = config.reward
    sources = split_sets(config.data.sets)
    sets: dict[str, list[Responded]] = {}
    for name, path in sources.items():
        entries = read_responses(path, config.data.responses)[: config.data.limit or None]
        sets |= _equal_samples(name, entries)
    problems = [entry.problem for entries in sets.values() for entry in entries]
    check_references(reward, problems)
    identity = _identity(config, sets)
    label = config.name or next(iter(sources))
    folder = files.output_folder(config.out, Path(), _safe(label), identity)
    stored = files.stored_settings(folder)
    if stored is not None:
        files.check_same_settings(folder, stored, identity)
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(reward.verifier, reward.timeout_s, reward.workers))
        scorer.check(problems)
        settings = EngineConfig(config.seed, ModelConfig(path=""), config.rollout)
        models = open_scoring_models(settings, reward)
        stack.enter_context(files.locked_folder(folder, identity))
        connect_scorer(config, scorer, models, folder)
        results = {name: _score_set(config, name, sets[name], scorer) for name in sets}
    for name, rows in results.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files.write(folder / f"{name}.jsonl", lines)
    summaries = {name: _summarize_set(config, sets[name], rows) for name, rows in results.items()}
    summary = write_summary(folder, label, identity, summaries, {})
    return summary | {"folder": str(folder)}


def _equal_samples(name: str, entries: list[Responded]) -> dict[str, list[Responded]]:
    """Return the sets of a file.

    If its problems have different numbers of responses, one per source.

    A file such as LUFFY's, which repeats the rows of some sources, becomes one set per source.
    """
    if len({len(entry.texts) for entry in entries}) == 1:
        return {name: entries}
    by_source: dict[str, list[Responded]] = {}
    for entry in entries:
        by_source.setdefault(entry.problem.data_source, []).append(entry)
    sets: dict[str, list[Responded]] = {}
    for source, group in by_source.items():
        counts = sorted({len(entry.texts) for entry in group})
        if len(counts) > 1:
            raise Conflict(
                f"set {name}: problems of source {source or '(none)'} have {counts[0]} to "
                f"{counts[-1]} responses; give every problem of a source the same number",
                at=name,
            )
        sets[f"{name}-{_safe(source)}"] = group
    return sets


def _score_set(
    config: ScoreConfig, name: str, entries: Sequence[Responded], scorer: Scorer
) -> list[dict[str, Any]]:
    """Return the result rows of a set, ordered by problem, then by response."""
    problems = [entry.problem for entry in entries for _ in entry.texts]
    texts = [text for entry in entries for text in entry.texts]
    verdicts = iter(scorer.score(problems, texts))
    rows: list[dict[str, Any]] = []
    for entry in entries:
        verifier = scorer.name_for(entry.problem)
        for sample, text in enumerate(entry.texts):
            row = result_row(
                entry.problem,
                sample,
                text,
                next(verdicts),
                verifier=verifier,
                pass_score=config.reward.pass_score,
                prompt=text_of_content(entry.problem.messages[-1]["content"]),
                finish=entry.finishes[sample] if entry.finishes else "",
                length=entry.lengths[sample] if entry.lengths else len(text),
            )
            rows.append(row)
    rate = sum(bool(row["failure"]) for row in rows) / len(rows)
    check_failure_rate(name, rows, rate, config.reward.max_failure_rate)
    return rows


def _summarize_set(
    config: ScoreConfig, entries: Sequence[Responded], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    result = summarize(rows)
    if not all(entry.lengths for entry in entries):
        result["length_unit"] = "characters"
    if config.reward.verifier == LLM_JUDGE and is_pairwise(config.reward.judge):
        result["win"] = win_rates(rows)
    return result


def _identity(config: ScoreConfig, sets: dict[str, list[Responded]]) -> dict[str, Any]:
    """Return what the results depend on. Files are identified by their content."""
    values: dict[str, Any] = dataclasses.asdict(config)
    for key in ("out", "name"):
        del values[key]
    del values["reward"]["workers"]
    digest = hashlib.blake2b(digest_size=8)
    for entries in sets.values():
        for entry in entries:
            fields = [entry.problem.uid, entry.problem.ground_truth, entry.texts]
            digest.update(json.dumps(fields).encode())
    values["data"] = {
        "files": list(split_sets(config.data.sets)),
        "content": digest.hexdigest(),
        "limit": config.data.limit,
    }
    values["versions"] = {"postgrad": __version__}
    return values


def _safe(text: str) -> str:
    """Return the text as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "none"
