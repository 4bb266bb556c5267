"""How close `postgrad doctor --fit` is: estimated and measured seconds per step of a short run.

    python benchmarks/fit.py [model.path=FOLDER key=value ...]

The estimate is made before and after the run, because the load of the machine changes.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = [
    "grpo",
    "model.path=smollm2",
    "data.train=arithmetic:2",
    "data.template=plain",
    "rollout.max_response_tokens=24",
    "training.problems_per_step=16",
    "training.steps=5",
    "training.max_flat_steps=99",
    "name=fit",
]


def postgrad(*words: str) -> str:
    """Run the command and return what it prints."""
    command = [sys.executable, "-m", "postgrad.cli.main", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def estimated_step(words: list[str]) -> float:
    """Return the seconds per step that `postgrad doctor --fit` prints."""
    text = postgrad("doctor", "--fit", *words)
    found = re.search(r"time per step +([\d.]+) s", text)
    if found is None:
        raise SystemExit(f"no time in:\n{text}")
    return float(found[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [*SETTINGS, *sys.argv[1:], f"runs={folder}"]
        before = estimated_step(words)
        postgrad("train", *words)
        after = estimated_step(words)
        text = (Path(folder) / "fit" / "metrics.jsonl").read_text()
    steps = [json.loads(line) for line in text.splitlines()]
    measured = statistics.median(line["step_s"] for line in steps[1:] if "step_s" in line)
    print(f"estimated {before:.2f} s before and {after:.2f} s after, measured {measured:.2f} s")


if __name__ == "__main__":
    main()
