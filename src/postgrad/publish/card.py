"""The model card (README.md) of a published model, written from its run folder."""

import json
import re
from functools import partial
from pathlib import Path

import jinja2

from postgrad.config.stored import CONFIG_FILE, read_stored_config, value_at
from postgrad.training.log import read_metrics

TEMPLATE = Path(__file__).parent / "card.md"
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
    file = run / CONFIG_FILE if run else None
    config = read_stored_config(file.parent) if file and file.is_file() else {}
    base = str(value_at(config, "model.path") or "")
    is_on_hub = HUB_ID.fullmatch(base) and not Path(base).exists()
    template = jinja2.Template(TEMPLATE.read_text(), trim_blocks=True, keep_trailing_newline=True)
    return template.render(
        name=name,
        is_of_run=run is not None,
        method=value_at(config, "method.name"),
        base=base,
        base_model=base if is_on_hub else "",
        step=step,
        auto_class=_auto_class(folder),
        value=partial(value_at, config),
        settings=SHOWN_SETTINGS,
        metrics=_metrics(run, step) if run else [],
        config_text=file.read_text().strip() if file and file.is_file() else "",
    )


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


def _metrics(run: Path, step: int | None) -> list[tuple[str, str, str]]:
    """Return (label, first value, last value) of the shown metrics of a run up to `step`."""
    lines = [line for line in read_metrics(run) if step is None or line["step"] <= step]
    rows: list[tuple[str, str, str]] = []
    for name, label in SHOWN_METRICS:
        shown = [f"{line[name]:.4g} (step {int(line['step'])})" for line in lines if name in line]
        if shown:
            rows.append((label, shown[0], shown[-1]))
    return rows
