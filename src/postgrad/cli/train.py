"""`postgrad train RECIPE key=value ...`"""

import sys
import textwrap

from postgrad.config.compose import compose, recipe_names, to_yaml
from postgrad.config.schema import Config
from postgrad.errors import ConfigError

HELP = """usage: postgrad train RECIPE [key=value ...] [--show]

Runs a recipe. The same command continues its run: after Ctrl-C, after a crash, after kill -9.

  RECIPE      a recipe, or a YAML file (also the config.yaml of a run); postgrad recipes says what each is:
{recipes}
  key=value   any setting, e.g. model.path=Qwen/Qwen3-0.6B data.train=gsm8k.jsonl optimizer.lr=1e-6
  method=package.module:Class   a method of your own
  --show      print the resolved configuration and stop

postgrad recipes NAME shows every setting of a recipe."""


def compose_words(overrides: list[str]) -> Config:
    """RECIPE key=value ... as a checked configuration."""
    from postgrad.methods import find_method

    if not overrides or "=" in overrides[0]:
        raise ConfigError(
            f"which recipe? write it before key=value, e.g. grpo; known: {', '.join(recipe_names())}"
        )
    return compose(overrides[0], overrides[1:], lambda name: find_method(name).Settings)


def run(overrides: list[str]) -> int:
    if not overrides or "--help" in overrides or "-h" in overrides:
        indent = " " * 14
        names = textwrap.fill(
            ", ".join(recipe_names()), 132, initial_indent=indent, subsequent_indent=indent
        )
        print(HELP.format(recipes=names))
        return 0
    show = "--show" in overrides
    config = compose_words([word for word in overrides if word != "--show"])
    if show:
        print(to_yaml(config), end="")
        return 0
    from postgrad.training import checkpoint
    from postgrad.training.report import make_reporter, print_line
    from postgrad.training.warmup import train_with_warmup

    result = train_with_warmup(config, make_reporter())
    if result.interrupted and result.step < config.training.steps:
        print(
            f"saved at step {result.step} of {config.training.steps} in {result.folder}; the same command continues",
            file=sys.stderr,
        )
        return 130
    if result.step == 0:
        print_line(
            f"done: the model reached training.stop_at={config.training.stop_at:g} before the first step; nothing was trained"
        )
        return 0
    print_line(
        f"done: {result.step} steps in {result.folder}; the trained model is {result.folder}/checkpoints/step-{result.step}/policy"
    )
    if best := checkpoint.best(result.folder):
        print_line(f"best by {config.training.keep_best}: {best}/policy")
    return 0
