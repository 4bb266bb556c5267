"""`postgrad demo`: SFT teaches a small model a task badly, then GRPO makes it good at the task."""

import json
import time
from pathlib import Path
from typing import Literal

from postgrad.cli.arguments import Count, CountFrom1
from postgrad.config.compose import compose
from postgrad.errors import Unwritable
from postgrad.evaluation.report import align

# model -> the two recipes it runs
MODELS = {
    "tiny": ("demo_sft", "demo_grpo"),
    "smollm2": ("demo_smollm2_sft", "demo_smollm2_grpo"),
    "vision": ("demo_vision_sft", "demo_vision_grpo"),
}
MAX_DEMOS = 1000
# label, metric, format
MEASURED = (
    ("accuracy, greedy", "validation/accuracy", "{:.1%}"),
    ("accuracy, sampled", "validation/sampled_accuracy", "{:.1%}"),
    ("reward of training samples", "reward/mean", "{:.3f}"),
)


def demo(
    *,
    model: Literal["tiny", "smollm2", "vision"] = "tiny",
    seed: Count = 0,
    runs: str = "runs",
    steps: CountFrom1 | None = None,
) -> int:
    """Fine-tune a model on two-digit addition with SFT until it is right sometimes, then train it
    with GRPO. The same command continues an interrupted demo.

    Args:
        model: see below
        seed [N]: random seed
        runs [FOLDER]: folder of the runs
        steps [N]: steps of SFT and of GRPO, to try the installation; the model does not learn in
            a few

    models:
      tiny     a 0.3M-parameter transformer made in code; a few minutes on a CPU, no download
      smollm2  SmolLM2-135M-Instruct, which learns to box its answers; the README has times
      vision   a 0.5M-parameter model made in code, which reads the sums from pictures
    """
    print("loading torch and transformers ...", flush=True)
    from postgrad.methods import find_method
    from postgrad.training import checkpoint
    from postgrad.training.display import make_reporter
    from postgrad.training.driver import train
    from postgrad.view.picture import draw_poster

    start = time.monotonic()
    name = _run_name(Path(runs), f"demo-{model}-{seed}")
    sft_recipe, grpo_recipe = MODELS[model]
    common = [f"seed={seed}", f"runs={runs}"]
    if steps is not None:
        common.append(f"training.steps={steps}")
    sft = compose(sft_recipe, [*common, f"name={name}/1-sft"], lambda m: find_method(m).Settings)
    result = train(sft, make_reporter("1 of 2: SFT, until the model is right sometimes"))
    if result.interrupted:
        return _interrupted(name)
    overrides = [
        *common,
        f"name={name}/2-grpo",
        f"model.path={checkpoint.latest(result.folder)}/policy",
    ]
    grpo = compose(grpo_recipe, overrides, lambda m: find_method(m).Settings)
    result = train(grpo, make_reporter("2 of 2: GRPO, with a reward for right answers only"))
    if result.interrupted:
        return _interrupted(name)
    picture = draw_poster(
        result.folder,
        result.folder.parent / "demo.png",
        "postgrad demo: GRPO on two-digit addition",
    )
    _print_accuracy(result.folder, time.monotonic() - start)
    _print_answers(result.folder)
    _print_next_steps(model, result.folder, picture)
    return 0


def _interrupted(name: str) -> int:
    print(f"saved in {name}; the same command continues")
    return 130


def _run_name(runs: Path, name: str) -> str:
    """Return the name of the last demo if it was interrupted, otherwise a new name."""
    for number in range(1, MAX_DEMOS):
        candidate = name if number == 1 else f"{name}-{number}"
        if not (runs / candidate / "demo.png").is_file():
            return candidate
    raise Unwritable(f"{runs} has {MAX_DEMOS - 1} demos with this seed; remove some", at=runs)


def _print_accuracy(folder: Path, seconds: float) -> None:
    """Print accuracy and reward before and after GRPO."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [["", "before GRPO", "after GRPO"]]
    for label, name, template in MEASURED:
        values = [line[name] for line in lines if name in line]
        rows.append([label, template.format(values[0]), template.format(values[-1])])
    print(f"\nheld-out problems, {seconds:.0f} s in total\n{align(rows)}\n")


def _print_answers(folder: Path) -> None:
    """Print sample answers of the first and the last step, wrong ones in red."""
    from rich.console import Console

    from postgrad.view.picture import read_sample_answers

    console = Console()
    for heading, rows in read_sample_answers(folder):
        console.print(heading, style="bold")
        for text, reward, _ in rows:
            is_right = reward is not None and reward > 0
            label = "right" if is_right else "wrong"
            style = "green" if is_right else "red"
            console.print(f"  {label}  {text}", style=style, markup=False, highlight=False)


def _print_next_steps(model: str, folder: Path, picture: Path) -> None:
    print(f"\npicture: {picture}")
    print(f"model:   {folder}/checkpoints/latest names the newest checkpoint")
    print("\ntry next:")
    print(f"  postgrad view {folder.parent.parent}    see the curves and every answer in a browser")
    if model == "tiny":
        print("  postgrad demo model=smollm2    the same with a language model")
        print("  postgrad demo model=vision     the same with sums in pictures")
    else:
        print(f"  postgrad serve {folder}    ask the model through any OpenAI client")
    print(
        "  postgrad train demo_grpo warmup.recipe=demo_sft rollout.samples=16 name=mine"
        "    change a setting"
    )
    print(
        "  postgrad doctor --fit grpo model.path=smollm2 data.train=arithmetic:2:boxed"
        "    estimate memory and time"
    )
