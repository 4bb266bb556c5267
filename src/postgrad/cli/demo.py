"""`postgrad demo`: a model learns in front of your eyes. SFT leaves it poor at a task, GRPO makes it good at it."""

import json
import time
from pathlib import Path

from postgrad.config.compose import compose
from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad demo [model=tiny|smollm2] [seed=N] [runs=FOLDER]

tiny     a 0.3M-parameter transformer made in code learns two-digit addition: two to three minutes on a CPU, no download
smollm2  a real language model, SmolLM2-135M-Instruct, learns two-digit addition with a boxed answer: see the README for times

An interrupted demo goes on with the same command."""

# model -> the two recipes it runs
MODELS = {"tiny": ("demo_sft", "demo_grpo"), "smollm2": ("demo_smollm2_sft", "demo_smollm2_grpo")}


def run(overrides: list[str]) -> int:
    if overrides and overrides[0] in ("-h", "--help"):
        print(HELP)
        return 0
    options = {"model": "tiny", "seed": "0", "runs": "runs"}
    for word in overrides:
        key, equals, value = word.partition("=")
        if key not in options or not equals:
            raise ConfigError(f"unknown demo setting {word!r}; {did_you_mean(key, options)}")
        options[key] = value
    if options["model"] not in MODELS:
        raise ConfigError(
            f"model={options['model']} is no demo; {did_you_mean(options['model'], MODELS)}"
        )
    if not options["seed"].isdigit():
        raise ConfigError(f"seed={options['seed']} is not a whole number")
    return _demo(options["model"], options["seed"], options["runs"])


def _demo(model: str, seed: str, runs: str) -> int:
    print("loading torch and transformers ...", flush=True)
    from postgrad.methods import find_method
    from postgrad.training import checkpoint
    from postgrad.training.driver import train
    from postgrad.training.report import make_reporter
    from postgrad.view.picture import draw_poster

    began = time.monotonic()
    name = _fresh_name(Path(runs), f"demo-{model}-{seed}")
    sft, grpo = MODELS[model]
    common = [f"seed={seed}", f"runs={runs}"]
    first = compose(sft, [*common, f"name={name}/1-sft"], lambda m: find_method(m).Settings)
    result = train(first, make_reporter("1 of 2: SFT, until the model is a poor pupil"))
    if result.interrupted:
        return _interrupted(name)
    poor = checkpoint.latest(result.folder)
    overrides = [*common, f"name={name}/2-grpo", f"model.path={poor}/policy"]
    second = compose(grpo, overrides, lambda m: find_method(m).Settings)
    result = train(second, make_reporter("2 of 2: GRPO, rewarded for right answers only"))
    if result.interrupted:
        return _interrupted(name)
    picture = draw_poster(
        result.folder,
        result.folder.parent / "demo.png",
        "postgrad demo: GRPO on two-digit addition",
    )
    _finish(model, result.folder, picture, time.monotonic() - began)
    return 0


def _interrupted(name: str) -> int:
    print(f"saved in {name}; the same command goes on")
    return 130


def _fresh_name(runs: Path, name: str) -> str:
    """The demo's folder: the last one if it was interrupted, a new one if it was finished."""
    for number in range(1, 1000):
        candidate = name if number == 1 else f"{name}-{number}"
        if not (runs / candidate / "demo.png").is_file():
            return candidate
    raise ConfigError(f"{runs} holds a thousand demos; remove some")


def _finish(model: str, folder: Path, picture: Path, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [line for line in lines if "validation/accuracy" in line]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    table = Table(title=f"held-out problems, {seconds:.0f} s in all")
    for heading in ("", "before GRPO", "after GRPO"):
        table.add_column(heading, justify="left" if not heading else "right")
    for label, key in (
        ("right, greedy", "validation/accuracy"),
        ("right, sampled", "validation/sampled_accuracy"),
    ):
        table.add_row(label, f"{held_out[0][key]:.1%}", f"{held_out[-1][key]:.1%}")
    table.add_row("reward of training samples", f"{rewards[0]:.3f}", f"{rewards[-1]:.3f}")
    console = Console()
    console.print(table)
    from postgrad.view.picture import read_sample_answers

    for heading, rows in read_sample_answers(folder):
        console.print(heading, style="bold")
        for text, reward in rows:
            style = "green" if reward > 0 else "red"
            console.print(
                f"  {'right' if reward > 0 else 'wrong'}  {text}",
                style=style,
                markup=False,
                highlight=False,
            )
    print(
        f"\npicture: {picture}\nmodel:   {folder}/checkpoints/latest names the newest checkpoint, a stock Hugging Face folder\n\ntry next:"
    )
    print(
        f"  postgrad view {folder.parent.parent}                 see it in a browser: curves, every answer token by token"
    )
    if model == "tiny":
        print(
            "  postgrad demo model=smollm2                      the same with a real language model"
        )
    else:
        print(f"  postgrad serve {folder}    ask it yourself, through any OpenAI client")
    print(
        "  postgrad train demo_grpo warmup.recipe=demo_sft rollout.samples=16 name=mine    change a setting, keep the rest"
    )
    print(
        "  postgrad doctor --fit grpo model.path=smollm2 data.train=arithmetic:2:boxed    will it fit, how long"
    )
