"""The model card (README.md) of a published model, written from its run folder."""

import json
import re
from pathlib import Path
from typing import Any

from postgrad.config.stored import CONFIG_FILE, read_stored_config, value_at
from postgrad.training.log import read_metrics

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# The end of a class's name in config.json, and the auto class that loads it.
AUTO_CLASSES = {
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
}
SHOWN_METRICS = (  # (metric, label)
    ("reward/mean", "mean reward"),
    ("validation/accuracy", "held-out accuracy, greedy"),
    ("validation/sampled_accuracy", "held-out accuracy, sampled"),
    ("response/length", "response length, tokens"),
    ("entropy", "entropy, nats"),
    ("loss", "loss"),
)
SHOWN_SETTINGS = (  # (setting, label)
    ("optimizer.lr", "learning rate"),
    ("training.problems_per_step", "problems per step"),
    ("rollout.samples", "samples per problem"),
    ("rollout.max_response_tokens", "longest response, tokens"),
    ("rollout.temperature", "temperature"),
    ("model.lora.rank", "LoRA rank"),
    ("model.dtype", "compute type"),
    ("seed", "seed"),
)


def model_card(name: str, folder: Path, run: Path | None, step: int | None) -> str:
    """Return the card of the model `name`, as Markdown.

    Args:
        name: user/name on the hub.
        folder: the files of the model.
        run: the run folder; None if the model is not from a run, then the card is short.
        step: the checkpoint's step, if known.
    """
    config = _read_config(run)
    method = value_at(config, "method.name")
    base = str(value_at(config, "model.path") or "")
    lines = [*_front_matter(method, base), f"# {name.split('/')[-1]}", ""]
    if run is None:
        return "\n".join([*lines, "A model folder published with Postgrad.", ""])
    origin = f"method **{method or 'unknown'}** from `{base or 'an unknown model'}`"
    checkpoint = f" (checkpoint of step {step})" if step is not None else ""
    lines += [
        f"Trained with Postgrad's {origin}{checkpoint}.",
        "",
        *_usage(name, _auto_class(folder)),
    ]
    lines += ["## Data", "", f"- training: `{value_at(config, 'data.train')}`"]
    if value_at(config, "data.validation"):
        lines.append(f"- held out: `{value_at(config, 'data.validation')}`")
    lines += ["", "## Training", ""]
    for key, label in SHOWN_SETTINGS:
        value = value_at(config, key)
        if value not in (None, "", 0):
            lines.append(f"- {label}: {value}")
    lines += ["", *_metrics(run, step), *_how_to_repeat(run)]
    return "\n".join(lines)


def _front_matter(method: Any, base: str) -> list[str]:
    """Return the YAML block that the hub reads; it names the base model if a hub has it."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if HUB_ID.fullmatch(base) and not Path(base).exists():
        lines.append(f"base_model: {base}")
    lines += ["tags:", "- postgrad"]
    if method:
        lines.append(f"- {method}")
    return [*lines, "---", ""]


def _auto_class(folder: Path) -> str:
    """Return the name of the auto class that loads the model; a language model's by default."""
    try:
        declared = json.loads((folder / "config.json").read_text()).get("architectures")
    except (OSError, ValueError):  # an adapter has no config.json
        declared = None
    for ending, auto_class in AUTO_CLASSES.items():
        if declared and str(declared[0]).endswith(ending):
            return auto_class
    return "AutoModelForCausalLM"


def _usage(name: str, auto_class: str) -> list[str]:
    return [
        "```python",
        f"from transformers import {auto_class}, AutoTokenizer",
        "",
        f'model = {auto_class}.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
        "",
    ]


def _metrics(run: Path, step: int | None) -> list[str]:
    """Return a table of the first and last values up to `step`; empty if there are none."""
    values = _read_values(run, step)
    rows = []
    for name, label in SHOWN_METRICS:
        if name in values:
            first_step, first = values[name][0]
            last_step, last = values[name][-1]
            rows.append(
                f"| {label} | {first:.4g} (step {first_step}) | {last:.4g} (step {last_step}) |"
            )
    if not rows:
        return []
    return ["## Metrics", "", "| | first | last |", "|---|---|---|", *rows, ""]


def _read_values(run: Path, step: int | None) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs of the shown metrics up to `step`."""
    values: dict[str, list[tuple[int, float]]] = {}
    for line in read_metrics(run):
        if step is not None and line["step"] > step:
            continue
        for name, _ in SHOWN_METRICS:
            if name in line:
                values.setdefault(name, []).append((int(line["step"]), float(line[name])))
    return values


def _how_to_repeat(run: Path) -> list[str]:
    """Return the command and the configuration that repeat the run."""
    file = run / CONFIG_FILE
    text = file.read_text() if file.is_file() else ""
    if not text:
        return []
    return [
        "## Repeat it",
        "",
        "```",
        "postgrad train config.yaml",
        "```",
        "",
        "<details><summary>config.yaml</summary>",
        "",
        "```yaml",
        *text.strip().splitlines(),
        "```",
        "",
        "</details>",
        "",
    ]


def _read_config(run: Path | None) -> dict[str, Any]:
    """Return the configuration of a run; empty if there is none. Raises ConfigError."""
    if run is None or not (run / CONFIG_FILE).is_file():
        return {}
    return read_stored_config(run)
