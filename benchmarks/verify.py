"""Answers judged per second through the pool, as the score stage does it: plain maths, algebra, and programs in the sandbox.

    python benchmarks/verify.py [--workers 2] [--answers 20000]

Plain maths are final answers as models write them (numbers, fractions, LaTeX, units), right and wrong, inside a worked solution of
some hundred words; algebra are pairs that only a computer algebra system can compare. On a machine that is busy with other things
the second rate, answers by second of processor time, says more; times the number of workers it is what a quiet machine does.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

from postgrad.problem import Problem, Score
from postgrad.verifiers.scorer import Scorer

STEP = "We first note that the sum of the two terms is $3x + 4$, so that $x = {n}$ gives a value of {n}.5 after division by two. "


def plain(num: int, rng: random.Random) -> list[tuple[str, Problem]]:
    """Answers that text and numbers decide; a third of them wrong."""
    items = []
    for i in range(num):
        n, d = rng.randrange(2, 2000), rng.randrange(2, 60)
        truth, given = rng.choice(
            [
                (str(n), str(n)),
                (str(n), f"{n:,}.0"),
                (f"\\frac{{{n}}}{{{d}}}", f"\\dfrac{{{n}}}{{{d}}}"),
                (f"{n}", f"{n}\\text{{ cm}}"),
                (f"({n}, {d})", f"({n},{d})"),
                (f"x={n}", str(n)),
                (f"\\sqrt{{{n}}}", f"\\sqrt{{{n}}}"),
            ]
        )
        wrong = rng.random() < 1 / 3
        given = given.replace(str(n), str(n + 1)) if wrong and "," not in given else given
        solution = "".join(STEP.format(n=rng.randrange(100)) for _ in range(12))
        items.append(
            (
                f"{solution}Therefore the answer is $\\boxed{{{given}}}$.",
                Problem(f"p{i}", (), truth, "math"),
            )
        )
    return items


def algebra(num: int, rng: random.Random) -> list[tuple[str, Problem]]:
    pairs = [
        (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a + wrong}") for a in range(1, 40) for wrong in (0, 1)
    ]
    return [
        (f"\\boxed{{{given}}}", Problem(f"p{i}", (), truth, "math"))
        for i, (truth, given) in enumerate(rng.choices(pairs, k=num))
    ]


def programs(num: int, rng: random.Random) -> list[tuple[str, Problem]]:
    tests = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 5) == 5"])
    answers = [
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a - b\n```",
    ]
    return [(rng.choice(answers), Problem(f"p{i}", (), tests, "code")) for i in range(num)]


def measure(name: str, items: list[tuple[str, Problem]], workers: int) -> None:
    with Scorer("auto", timeout_s=30, workers=workers) as scorer:
        responses, problems = [item[0] for item in items], [item[1] for item in items]
        scorer.score(
            problems[: 8 * workers], responses[: 8 * workers]
        )  # the children start and import
        start, busy = time.perf_counter(), cpu_seconds()
        results = scorer.score(problems, responses)
        seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    right = sum(result.value for result in results if isinstance(result, Score))
    failed = sum(not isinstance(result, Score) for result in results)
    rates = f"{len(items) / seconds:9,.0f} a second"
    if name != "programs":  # what the kernel ends inside a sandbox is on nobody's account
        rates += f", {len(items) / busy:9,.0f} a second of processor time"
    print(
        f"{name:<14}{len(items):>7} answers in {seconds:7.2f} s: {rates}; {right:.0f} right, {failed} failed"
    )


def cpu_seconds() -> float:
    """Processor time of this process and of the children it has now, with what they have waited for."""
    used = time.process_time()
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=20_000)
    given = parser.parse_args()
    rng = random.Random(0)
    print(
        f"{given.workers} workers on {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} before the start"
    )
    measure("plain maths", plain(given.answers, rng), given.workers)
    measure("algebra", algebra(max(16, given.answers // 50), rng), given.workers)
    measure("programs", programs(max(16, given.answers // 500), rng), given.workers)


if __name__ == "__main__":
    main()
