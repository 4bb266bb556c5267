"""Internal entropies of models, the analysis behind BuPO's depth, in a small form.

    python benchmarks/research.py entropy OUT/entropy --name qwen2.5-coder-1.5b

OUT is the folder of `research.py bupo`, or of `postgrad analyze entropy`. `entropy` writes
docs/research/entropy/NAME.json with the mean entropies; `draw` draws its figures again.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from claims.keep import DOCS, rounded

FIGURES = ("changes", "entropy_flow")
MODULES = ("attention", "ffn", "layer")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with entropy.json")
    parser.add_argument("--name", required=True, help="of the model")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    report = json.loads((options.folder / "entropy.json").read_text())
    file = options.docs / "research" / "entropy" / f"{options.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(means(report) | {"model": options.name}) + "\n")
    draw(options.docs)
    return 0


def means(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report with means alone, and without its settings."""
    names = ("rows", "tokens", "ceiling", "num_layers", "boundary_layer", "boundary_threshold")
    small = {name: report[name] for name in names}
    layers: list[dict[str, Any]] = []
    for layer in report["layers"]:
        values = {
            module: {key: mean(layer[module][key]) for key in layer[module]} for module in MODULES
        }
        layers.append({"number": layer["number"], **values})
    return small | {"full_policy": mean(report["full_policy"]), "layers": layers}


def mean(stats: dict[str, float]) -> dict[str, float]:
    return {"mean": rounded(stats["mean"])}


def draw(docs: Path) -> None:
    """Draw the figures of all models in docs/research/entropy."""
    from postgrad.analysis import figures

    for file in sorted((docs / "research" / "entropy").glob("*.json")):
        with tempfile.TemporaryDirectory() as folder:
            figures.draw(json.loads(file.read_text()), Path(folder))
            for name in FIGURES:
                target = file.with_name(f"{file.stem}-{name}.png")
                shutil.copyfile(Path(folder) / f"{name}.png", target)
