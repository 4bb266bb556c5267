"""`postgrad generate`: a model's responses to problems, without scores, in one data file."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postgrad.cluster.backends import open_engine
from postgrad.data.rows.files import read_rows
from postgrad.data.rows.values import Row
from postgrad.data.tables import write_rows
from postgrad.errors import ConfigError, Unreadable, Unwritable, WrongValue
from postgrad.evaluation import folder as files
from postgrad.evaluation.model import Target
from postgrad.evaluation.plan import Plan, engine_config, make_plan
from postgrad.evaluation.progress import Progress
from postgrad.evaluation.run import TimedEngine, continue_job, run_set
from postgrad.evaluation.settings import EvalConfig, EvalReward
from postgrad.pictures import text_of_content
from postgrad.problem import Problem

FORMATS = (".parquet", ".jsonl")


def make_generate_plan(config: EvalConfig, target: Target) -> Plan:
    """Return the checked plan of `postgrad generate`; `config.out` is the file to write.

    Raises: ConfigError for a setting or a problem that cannot be used, or a file that exists.
    """
    out = Path(config.out).expanduser()
    if not config.out or out.suffix not in FORMATS:
        raise WrongValue(
            f"out={config.out or '(none)'} must be a file that ends in {' or '.join(FORMATS)}"
        )
    if out.exists() and not _partial_folder(out).is_dir():
        raise _exists_error(out)
    if not out.absolute().parent.is_dir():
        raise Unreadable(f"out={out}: no folder {out.parent}; make it first")
    config.reward = EvalReward()  # a run's verifier is not used here
    return make_plan(config, target, is_scored=False)


def generate_file(plan: Plan, progress: Progress) -> int:
    """Generate the responses of a plan and write its file; return the number of responses.

    Finished batches are kept in FILE.partial/ until the file is complete, so the same command
    continues after a kill. A kill after the file was written leaves FILE.partial/ behind; then the
    same command removes it and writes nothing.

    Raises:
        ConfigError: FILE.partial/ has responses of other settings, or is in use, or the file is not
            the one of this command.
        RunError: a file could not be written.
    """
    out = Path(plan.config.out).expanduser()
    partial = _partial_folder(out)
    is_stored = continue_job(plan, partial)
    if out.exists():
        if not is_stored:  # the folder is empty: a kill came right before its removal
            _remove(partial)
        if not is_stored or not _has_all_responses(out, plan):
            raise _exists_error(out)
        with files.locked_folder(partial, plan.identity):  # refused if another process removes it
            _remove(partial)
        return num_responses(plan)
    with ExitStack() as stack:
        progress.loading(plan)
        engine = TimedEngine(stack.enter_context(open_engine(engine_config(plan.config))))
        stack.enter_context(files.locked_folder(partial, plan.identity))
        stack.enter_context(progress)
        for name in plan.sets:
            run_set(plan, name, partial, engine, progress, is_scored=False)
        rows = list(_output_rows(plan, partial))
        names = dict.fromkeys(name for row in rows for name in row)  # sets may differ
        write_rows(out, ({name: row.get(name) for name in names} for row in rows))
    _remove(partial)
    return num_responses(plan)


def num_responses(plan: Plan) -> int:
    """Return how many responses the file of a plan has."""
    return sum(len(problems) for problems in plan.sets.values()) * plan.config.rollout.samples


def _partial_folder(out: Path) -> Path:
    """Return the folder that holds the finished batches until the file is complete."""
    return out.with_name(f"{out.name}.partial")


def _exists_error(out: Path) -> ConfigError:
    return Unwritable(f"out={out} exists; remove it, or choose another out=FILE")


def _has_all_responses(out: Path, plan: Plan) -> bool:
    """Return whether a file has the plan's problems, each with all its responses."""
    expected: list[tuple[str, int]] = []
    for problems in plan.sets.values():
        expected += [(problem.uid, plan.config.rollout.samples) for problem in problems]
    found: list[tuple[Any, int]] = []
    for _, row in read_rows(out):
        responses = row.get("responses")
        found.append((row.get("uid"), len(responses) if isinstance(responses, list) else 0))
    return found == expected


def _remove(partial: Path) -> None:
    """Remove the folder; its settings last, so that a kill leaves a folder that is recognized."""
    settings = partial / "settings.json"
    for file in partial.iterdir():
        if file != settings:
            file.unlink()
    settings.unlink(missing_ok=True)
    partial.rmdir()


def _output_rows(plan: Plan, partial: Path) -> Iterator[Row]:
    """Yield one row per problem: the problem in verl's schema, and its responses."""
    samples = plan.config.rollout.samples
    for name, problems in plan.sets.items():
        lines = [line for _, line in files.read_rows(partial / f"{name}.jsonl")]
        for i, problem in enumerate(problems):
            yield output_row(problem, lines[i * samples : (i + 1) * samples])


def output_row(problem: Problem, responses: Sequence[dict[str, Any]]) -> Row:
    """Return a row that training, `postgrad score` and verl read.

    `responses` are objects with `response`, `finish` and `length`.
    """
    extra = dict(problem.extra)
    reward_model = dict(extra.pop("reward_model", None) or {})
    reward_model.setdefault("style", "rule" if problem.ground_truth else "model")
    prompt = [
        {**message, "content": text_of_content(message["content"])} for message in problem.messages
    ]
    images = [picture.data_url() for picture in problem.prompt_images]
    return {
        "uid": problem.uid,
        "data_source": problem.data_source,
        "prompt": prompt,
        **({"images": images} if images else {}),
        "reward_model": {**reward_model, "ground_truth": problem.ground_truth or None},
        "responses": [line["response"] for line in responses],
        "finishes": [line["finish"] for line in responses],
        "lengths": [line["length"] for line in responses],
        **extra,
    }
