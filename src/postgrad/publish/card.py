"""The README.md of a model that is published: what it was made from, how, on what, and how well, from the run folder alone."""

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SHOWN = (  # metrics of the table, with how they read for people
    ("reward/mean", "mean reward"),
    ("validation/accuracy", "held-out accuracy, greedy"),
    ("validation/sampled_accuracy", "held-out accuracy, sampled"),
    ("response/length", "response length, tokens"),
    ("entropy", "entropy, nats"),
    ("loss", "loss"),
)
TOLD = (  # settings worth a line
    ("optimizer.lr", "learning rate"),
    ("training.problems_per_step", "problems a step"),
    ("rollout.samples", "samples a problem"),
    ("rollout.max_response_tokens", "longest response, tokens"),
    ("rollout.temperature", "temperature"),
    ("model.lora.rank", "LoRA rank"),
    ("model.dtype", "compute type"),
    ("seed", "seed"),
)


def model_card(name: str, run: Path | None, step: int | None) -> str:
    """The card of `name`. Without a run it says only what is known: that the weights are a stock folder."""
    config = _config(run)
    method, base = _at(config, "method.name"), str(_at(config, "model.path") or "")
    lines = [*_front(method, base), f"# {name.split('/')[-1]}", ""]
    if run is None:
        return "\n".join([*lines, "A model folder published with Postgrad.", ""])
    at = f" (checkpoint of step {step})" if step is not None else ""
    lines += [
        f"Trained with Postgrad's method **{method or 'unknown'}** from `{base or 'an unknown model'}`{at}.",
        "",
    ]
    lines += ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
        "",
    ]
    lines += ["## Data", "", f"- training: `{_at(config, 'data.train')}`"]
    lines += (
        [f"- held out: `{_at(config, 'data.validation')}`"]
        if _at(config, "data.validation")
        else []
    )
    lines += ["", "## Training", ""]
    lines += [
        f"- {words}: {value}"
        for key, words in TOLD
        if (value := _at(config, key)) not in (None, "", 0)
    ]
    lines += ["", *_metrics(run, step), *_repeat(run)]
    return "\n".join(lines)


def _front(method: Any, base: str) -> list[str]:
    """What the hub reads: a base model only where it is one of a hub."""
    tags = ["postgrad", *([str(method)] if method else [])]
    known = [f"base_model: {base}"] if HUB_ID.fullmatch(base) and not Path(base).exists() else []
    return [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *known,
        "tags:",
        *(f"- {t}" for t in tags),
        "---",
        "",
    ]


def _metrics(run: Path, step: int | None) -> list[str]:
    """First and last values up to the step."""
    found: dict[str, list[tuple[int, float]]] = {}
    file = run / "metrics.jsonl"
    for text in file.read_text().splitlines() if file.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:  # a last line that a kill cut short
            break
        for key, _ in SHOWN:
            if key in line and (step is None or line["step"] <= step):
                found.setdefault(key, []).append((int(line["step"]), float(line[key])))
    rows = [
        f"| {words} | {seen[0][1]:.4g} (step {seen[0][0]}) | {seen[-1][1]:.4g} (step {seen[-1][0]}) |"
        for key, words in SHOWN
        if (seen := found.get(key))
    ]
    return ["## Metrics", "", "| | first | last |", "|---|---|---|", *rows, ""] if rows else []


def _repeat(run: Path) -> list[str]:
    text = (run / "config.yaml").read_text() if (run / "config.yaml").is_file() else ""
    lines = [
        "## Repeat it",
        "",
        "```",
        "postgrad train config.yaml",
        "```",
        "",
        "<details><summary>config.yaml</summary>",
        "",
    ]
    return (
        [*lines, "```yaml", *text.strip().splitlines(), "```", "", "</details>", ""] if text else []
    )


def _config(run: Path | None) -> dict[str, Any]:
    if run is None or not (run / "config.yaml").is_file():
        return {}
    try:
        found: Any = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    except (OmegaConfBaseException, YAMLError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _at(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
