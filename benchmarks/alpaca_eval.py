"""How far our win rates are from the published ones of AlpacaEval 2's leaderboard.

    git clone https://github.com/tatsu-lab/alpaca_eval
    python benchmarks/alpaca_eval.py alpaca_eval

The repository has the judge's preferences of each model (results/MODEL/...) and the leaderboard.
Models whose preferences are not there are counted and left out.
"""

import csv
import json
import subprocess
import sys
from typing import Any

import numpy as np

from postgrad.evaluation.winrate import length_controlled

JUDGE = "weighted_alpaca_eval_gpt4_turbo"
LEADERBOARD = f"src/alpaca_eval/leaderboards/data_AlpacaEval_2/{JUDGE}_leaderboard.csv"


def read(repository: str, path: str) -> str:
    """Return a file of the last commit, also of a repository without a work tree; "" if absent."""
    command = ["git", "-C", repository, "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True).stdout


def our_rates(rows: list[dict[str, Any]]) -> tuple[float, float, float] | None:
    """Return win rate and length-controlled rate in percent, and the mean length difference.

    The difference is in standard deviations. None if the second rate is undetermined.
    """
    rows = [row for row in rows if row["preference"] is not None]
    wins = [0.5 if row["preference"] == 0 else row["preference"] - 1 for row in rows]
    lengths = [len(row["output_2"]) - len(row["output_1"]) for row in rows]
    controlled = length_controlled(wins, lengths)
    if controlled is None or not any(lengths):
        return None
    shift = abs(float(np.mean(lengths))) / float(np.std(lengths, ddof=1))
    return 100 * float(np.mean(wins)), 100 * controlled["value"], shift


def main(repository: str) -> None:
    distances: list[tuple[float, float, float]] = []
    num_absent = 0
    for model in csv.DictReader(read(repository, LEADERBOARD).splitlines()):
        text = read(repository, f"results/{model['']}/{JUDGE}/annotations.json")
        ours = our_rates(json.loads(text)) if text else None
        if ours is None or not model["length_controlled_winrate"]:
            num_absent += 1
            continue
        raw, controlled, shift = ours
        published = float(model["length_controlled_winrate"])
        distances.append((abs(raw - float(model["win_rate"])), abs(controlled - published), shift))
    table = np.array(distances)
    print(f"{len(table)} models, {num_absent} without preferences")
    print(f"win rate: largest distance {table[:, 0].max():.1e} points")
    for name, low, high in (
        ("all", 0, np.inf),
        ("below 1 std", 0, 1),
        ("1 std or more", 1, np.inf),
    ):
        some = table[(table[:, 2] >= low) & (table[:, 2] < high), 1]
        print(
            f"length-controlled, mean length difference {name}: {len(some)} models, "
            f"mean distance {some.mean():.2f} points, largest {some.max():.2f}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
