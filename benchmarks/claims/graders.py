"""Verifiers beside each other on the responses of runs: confusion tables and disagreements.

    python benchmarks/research.py graders RUN_FOLDER... RESPONSES.jsonl... --out graders.md

Reads the rollouts of run folders, and files of `postgrad generate` or `postgrad eval`. The first
table scores the responses as they are. The second writes each response's final answer in the form
that a verifier asks for (a box, `####`, tags), so that verifiers differ by how they compare
answers, not by the form. The reference is the verifier that `reward.verifier=auto` takes for the
problems.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from postgrad.problem import Problem, Score

REWARDS = Path(__file__).resolve().parent / "rewards.py"
# Name in the table, verifier, and the form it asks for.
GRADERS: tuple[tuple[str, str, str], ...] = (
    ("verl's strict rule", f"{REWARDS}:verl_gsm8k", "#### {answer}"),
    ("gsm8k_strict", "gsm8k_strict", "#### {answer}"),
    ("gsm8k_flexible", "gsm8k_flexible", "#### {answer}"),
    ("math", "math", "\\boxed{{{answer}}}"),
    ("OAT", "oat", "\\boxed{{{answer}}}"),
    ("LUFFY v3", "think_math", "</think> \\boxed{{{answer}}}"),
    ("r1_zero, fast", "r1_zero", "</think> <answer>{answer}</answer>"),
    ("r1_zero, slow", "r1_zero_math", "</think> <answer>{answer}</answer>"),
)
EXAMPLES = 3
TAIL = 160  # characters of a response that an example shows


class Response(NamedTuple):
    problem: Problem
    text: str


def read_responses(run: Path, limit: int) -> list[Response]:
    """Return distinct responses of the policy in a run's rollouts, evenly spaced over its steps."""
    import pyarrow.parquet as parquet

    from postgrad.config.stored import read_stored_config
    from postgrad.data.problems import load_problems

    config = read_stored_config(run)
    problems = {one.uid: one for one in load_problems(str(config["data"]["train"]))}
    found: dict[tuple[str, str], None] = {}
    for file in sorted((run / "rollouts").glob("step-*.parquet")):
        if "text" not in parquet.read_schema(file).names:
            raise SystemExit(f"{file} has no texts: the run scored no responses; leave it out")
        for row in parquet.read_table(file, columns=["uid", "text", "source"]).to_pylist():
            if row["source"] == "policy":
                found[row["uid"], row["text"]] = None
    return spaced([Response(problems[uid], text) for uid, text in found], limit)


def read_generated(file: Path, limit: int) -> list[Response]:
    """Return the responses of a file that `postgrad generate` or `postgrad eval` wrote."""
    found: list[Response] = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        problem = Problem(row["uid"], (), row["ground_truth"], row["data_source"])
        found.append(Response(problem, row["response"]))
    return spaced(found, limit)


def spaced(responses: list[Response], limit: int) -> list[Response]:
    """Return at most `limit` of the responses, evenly spaced; 0: all."""
    num_found = len(responses)
    if not limit or num_found <= limit:
        return responses
    return [responses[i * num_found // limit] for i in range(limit)]


def distinct(responses: Iterable[Response]) -> list[Response]:
    """Return the responses without repetitions: runs of one seed start with the same ones."""
    found = {(one.problem.uid, one.text): one for one in responses}
    return list(found.values())


def final_answer(text: str) -> str:
    """Return the text in the last box, else after the last ####, else the last number.

    A #### that no digit follows on its line is no answer.
    """
    from postgrad.data.prepare.converters import last_box

    box = last_box(text)
    if box:
        return box.strip()
    after = text.rsplit("####", 1)[1].strip() if "####" in text else ""
    line = after.splitlines()[0].strip() if after else ""
    if any(map(str.isdigit, line)):
        return line
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1] if found else ""


def verdicts(responses: Sequence[Response], rewritten: bool) -> dict[str, list[float | None]]:
    """Return grader -> score per response, None where it failed; `reference` is the first."""
    from postgrad.verifiers.scorer import Scorer

    scores: dict[str, list[float | None]] = {}
    for name, verifier, form in (("reference", "auto", ""), *GRADERS):
        texts = [one.text for one in responses]
        if rewritten and form:
            texts = [form.format(answer=final_answer(text)) for text in texts]
        with Scorer(verifier) as scorer:
            found = scorer.score([one.problem for one in responses], texts)
        scores[name] = [one.value if isinstance(one, Score) else None for one in found]
    return scores


def confusion(scores: dict[str, list[float | None]]) -> str:
    """Return a Markdown table of each grader against the reference."""
    heads = ["grader", "both right", "only reference", "only grader", "both wrong", "failures"]
    rows = [heads, ["---"] * len(heads)]
    reference = scores["reference"]
    for name, values in scores.items():
        if name == "reference":
            continue
        counts: Counter[str] = Counter()
        for ours, theirs in zip(reference, values, strict=True):
            counts[agreement(ours, theirs)] += 1
        rows.append([name, *(str(counts[head]) for head in heads[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def agreement(ours: float | None, theirs: float | None) -> str:
    if ours is None or theirs is None:
        return "failures"
    if (ours >= 1) == (theirs >= 1):
        return "both right" if ours >= 1 else "both wrong"
    return "only reference" if ours >= 1 else "only grader"


def disagreements(
    responses: Sequence[Response], scores: dict[str, list[float | None]]
) -> dict[tuple[str, ...], list[int]]:
    """Return, by the graders that accept a response, the responses that some accept, not all."""
    classes: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(responses)):
        accepting = tuple(name for name, values in scores.items() if (values[i] or 0) >= 1)
        if 0 < len(accepting) < len(scores):
            classes.setdefault(accepting, []).append(i)
    return dict(sorted(classes.items(), key=lambda item: -len(item[1])))


def report(responses: Sequence[Response]) -> str:
    """Return both tables and examples of each class of disagreement as Markdown."""
    parts = [f"{len(responses)} distinct responses."]
    titles = {False: "Responses as they are", True: "Final answers in each grader's form"}
    for rewritten, title in titles.items():
        scores = verdicts(responses, rewritten)
        parts += [f"## {title}", confusion(scores)]
        for accepting, members in disagreements(responses, scores).items():
            parts.append(f"### {len(members)} accepted only by: {', '.join(accepting)}")
            for i in members[:EXAMPLES]:
                tail = json.dumps(responses[i].text[-TAIL:], ensure_ascii=False)
                parts.append(f"- truth `{responses[i].problem.ground_truth}`, ends in `{tail}`")
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or files of responses")
    parser.add_argument("--limit", type=int, default=2000, help="responses per run; 0: all")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found: list[Response] = []
    for source in options.runs:
        read = read_responses if source.is_dir() else read_generated
        found += read(source, options.limit)
    responses = distinct(found)
    if not responses:
        raise SystemExit("no responses of a policy found")
    text = report(responses)
    options.out.write_text(text)
    print(text, flush=True)
    return 0
