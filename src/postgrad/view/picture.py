"""The picture of `postgrad demo`: curves of a run, and answers of its first and last step."""

from pathlib import Path
from typing import Any

from postgrad.data.rollout_folder import rollout_files
from postgrad.errors import Unwritable, first_line
from postgrad.view.metrics import Metrics

CURVES = (
    ("reward/mean", "reward of samples"),
    ("sft/loss", "SFT loss"),
    ("validation/accuracy", "validation accuracy, greedy"),
    ("validation/sampled_accuracy", "validation accuracy, sampled"),
    ("validation/loss", "validation loss"),
)
SIDE = (
    ("entropy", "entropy (nats)"),
    ("response/length", "response length (tokens)"),
    ("grad_norm", "gradient norm"),
)
# The colors of curves on the page.
COLORS = ("#3356c4", "#d9762b", "#2a8f6a", "#b0418f", "#7a6a1e")

# (heading, [(question and answer, reward)])
Answers = list[tuple[str, list[tuple[str, float | None]]]]


def draw_poster(folder: Path, file: Path, title: str) -> Path:
    """Draw one image of a run: rewards, three small curves, answers of its first and last step.

    The figure is not one of pyplot's, so no global state of it changes.
    """
    from matplotlib.figure import Figure

    metrics = Metrics(folder / "metrics.jsonl").refresh()
    figure = Figure(figsize=(10, 8.4), layout="constrained")
    rows: Any = [["main"] * 3, ["side0", "side1", "side2"], ["text"] * 3]
    axes = figure.subplot_mosaic(rows, height_ratios=[3, 1.4, 1.9])
    for (name, text), color in zip(CURVES, COLORS, strict=True):
        steps, values = metrics.series(name)
        if steps:
            axes["main"].plot(steps, values, "o-", color=color, label=text, markersize=3)
    axes["main"].set(title=title, xlabel="step")
    axes["main"].legend(frameon=False)
    axes["main"].grid(alpha=0.3)
    for i, (name, text) in enumerate(SIDE):
        axes[f"side{i}"].plot(*metrics.series(name), color="tab:gray")
        axes[f"side{i}"].set_title(text, fontsize=9)
        axes[f"side{i}"].grid(alpha=0.3)
    _draw_answers(axes["text"], read_sample_answers(folder))
    try:
        figure.savefig(file, dpi=110)
    except OSError as error:
        raise Unwritable(f"{file} cannot be written: {first_line(error)}") from error
    return file


def read_sample_answers(folder: Path, count: int = 6) -> Answers:
    """Return sampled answers of the first and the last step: [(heading, [(text, reward)])]."""
    import pyarrow.parquet as pq

    files = rollout_files(folder / "rollouts")
    if not files:
        return []
    answers: Answers = []
    for step in dict.fromkeys([min(files), max(files)]):
        table = pq.read_table(files[step])
        if "text" not in table.column_names:
            return []
        rows = table.select(["group", "question", "text", "reward"]).to_pylist()
        first_of_group = {row["group"]: row for row in reversed(rows)}
        picked = [first_of_group[group] for group in sorted(first_of_group)][:count]
        texts: list[tuple[str, float | None]] = []
        for row in picked:
            question = one_line(row["question"], 30)
            answer = one_line(row["text"], 34)
            texts.append((f"{question} {answer}", row["reward"]))
        answers.append((f"sampled at step {step}", texts))
    return answers


def _draw_answers(axis: Any, answers: Answers) -> None:
    axis.axis("off")
    for column, (heading, rows) in enumerate(answers):
        x = 0.02 + 0.5 * column
        place = {"va": "top", "transform": axis.transAxes}
        axis.text(x, 0.97, heading, fontsize=10, fontweight="bold", **place)
        for i, (text, reward) in enumerate(rows):
            is_correct = reward is not None and reward > 0
            verdict = "correct" if is_correct else "wrong  "
            line = f"{verdict}   {text}".replace("$", r"\$")
            color = "tab:green" if is_correct else "tab:red"
            y = 0.82 - 0.14 * i
            axis.text(x, y, line, fontsize=9, family="monospace", color=color, **place)


def one_line(text: str, width: int) -> str:
    """Return the text in one line of at most `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
