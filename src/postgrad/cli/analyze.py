"""`postgrad analyze entropy MODEL data=... key=value ...`"""

import sys
import time

from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad analyze entropy MODEL data=DATA [key=value ...]

Entropy of the policies inside a model: after every block, and of what attention and FFN write. Says at which layer the FFN stops exploring,
which is where BuPO trains first (method.num_blocks).

  MODEL       a run folder (its newest checkpoint), a checkpoint, a model folder, a GGUF file, a hub id, smollm2 or tiny
  data=       a run folder (its rollouts), a parquet of rollouts, a folder or .jsonl of postgrad eval,
              or problems as training reads them: then the model answers them first, and the token ids are stored
  rows=64 step=0 tolerance=0.05 token_budget=4096 dtype=float32 device=auto out=FOLDER
  samples=1 temperature=1 max_response_tokens=1024 template=auto template_options.enable_thinking=false prompt_style=own seed=0
              for problems; a run's model takes its run's own

Writes entropy.json and five figures, each as PNG and PDF, into RUN/eval/entropy or entropy-MODEL."""


def run(overrides: list[str]) -> int:
    if not overrides or "--help" in overrides or "-h" in overrides:
        print(HELP)
        return 0
    if overrides[0] != "entropy":
        raise ConfigError(
            f"analyze does not know {overrides[0]}; {did_you_mean(overrides[0], ['entropy'])}"
        )
    if len(overrides) < 2 or "=" in overrides[1]:
        raise ConfigError("which model? postgrad analyze entropy MODEL data=...")
    from postgrad.analysis.settings import read_settings
    from postgrad.evaluation.model import find_model

    target = find_model(overrides[1])
    config = read_settings(target.path, overrides[2:], target.config)
    from postgrad.analysis.run import analyze_entropy

    report, folder, figures = analyze_entropy(config, target, Teller())
    layer, depth = report["boundary_layer"], report["num_layers"]
    print(
        f"{report['tokens']} tokens of {report['rows']} responses; the full policy's entropy is {report['full_policy']['mean']:.3f} nats"
    )
    if layer is None:
        least = report["boundary_threshold"]
        print(
            f"no boundary layer: no FFN raises the entropy by more than {least:.3g} nats (tolerance={config.tolerance:g})"
        )
    else:
        print(
            f"boundary layer: {layer} of {depth}; postgrad train bupo model.path={overrides[1]} method.num_blocks={layer} ..."
        )
    print(
        f"results: {folder}/entropy.json and {', '.join(file.name for file in figures if file.suffix == '.png')} (PDF too)"
    )
    return 0


class Teller:
    """Shows how far it is: one line that grows in a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.last, self.terminal = 0.0, sys.stdout.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        now, finished = time.monotonic(), done == total
        if total and not finished and now - self.last < (0.2 if self.terminal else 10.0):
            return
        self.last = now
        text = f"{what}: {done}/{total} tokens" if total else f"{what} ..."
        end = "\n" if finished or not self.terminal else ""
        print(f"\r{text:<60}" if self.terminal else text, end=end, flush=True)
