"""`postgrad train RECIPE key=value ...`"""

import sys
import textwrap
from typing import TYPE_CHECKING

from postgrad import phases
from postgrad.cli.arguments import Parser
from postgrad.config.compose import compose, recipe_names, to_yaml
from postgrad.config.schema import Config
from postgrad.errors import Missing

if TYPE_CHECKING:
    from postgrad.training.result import Result

MORE = """postgrad recipes says what each recipe is; postgrad recipes NAME --all shows its settings.
method=package.module:Class uses a method of your own."""


def compose_arguments(argv: list[str]) -> Config:
    """Return the checked configuration of `RECIPE key=value ...`. Raises ConfigError."""
    from postgrad.methods import find_method

    if not argv or "=" in argv[0]:
        raise Missing(
            "the recipe is missing; write it before key=value, e.g. postgrad train grpo; "
            f"known: {', '.join(recipe_names())}",
            at="RECIPE",
        )
    return compose(argv[0], argv[1:], lambda name: find_method(name).Settings)


def run(argv: list[str]) -> int:
    names = textwrap.fill(
        ", ".join(recipe_names()), 90, initial_indent="  ", subsequent_indent="  "
    )
    return Parser(train, "train", f"recipes:\n{names}\n\n{MORE}").call(argv)


def train(recipe: str, *overrides: str, show: bool = False) -> int:
    """Run a recipe. The same command continues an interrupted run: after Ctrl-C, a crash or
    kill -9.

    Args:
        recipe: name of a recipe, or a YAML file, e.g. the config.yaml of a run
        overrides: any setting, e.g. model.path=Qwen/Qwen3-0.6B data.train=gsm8k.jsonl
            optimizer.lr=1e-6
        --show: print the resolved configuration and stop
    """
    if not show:
        phases.begin("loading torch and transformers")
    config = compose_arguments([recipe, *overrides])
    if show:
        print(to_yaml(config), end="")
        return 0
    from postgrad.training.display import make_reporter
    from postgrad.training.run import run_folder
    from postgrad.training.warmup import train_with_warmup

    result = train_with_warmup(config, make_reporter())
    is_warmup = result.folder != run_folder(config)
    if result.interrupted and (is_warmup or result.step < result.num_steps):
        print(
            f"saved at step {result.step} of {result.num_steps} in {result.folder}; "
            "the same command continues",
            file=sys.stderr,
        )
        return 130
    _print_result(config, result)
    return 0


def _print_result(config: Config, result: "Result") -> None:
    from postgrad.phases import format_count, print_line
    from postgrad.training import checkpoint, run

    if result.step == 0:
        print_line(
            f"done: validation accuracy reached training.stop_at={config.training.stop_at:g} "
            "before the first step; nothing was trained"
        )
        return
    model = result.folder / "checkpoints" / f"step-{result.step}" / "policy"
    steps = format_count(result.step, "step")
    print_line(f"done: {steps} in {result.folder}; the trained model is {model}")
    if result.start == result.step:
        print_line(run.untrained_note(config, result))
    if best := checkpoint.best(result.folder):
        print_line(f"best by {config.training.keep_best}: {best}/policy")
