"""Responses scored per second by the Scorer: plain math, algebra, and programs in the sandbox.

    python benchmarks/verify.py [--workers 2] [--answers 20000]

Plain math is final answers as models write them (numbers, fractions, LaTeX, units), right and
wrong, in a worked solution of about 200 words. Algebra is pairs that only a computer algebra
system can compare. On a busy machine the second rate, responses per second of processor time, is
more useful: times the number of workers, it is the rate of an idle machine.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path

from postgrad.problem import Problem, Score
from postgrad.verifiers.scorer import Scorer

STEP = (
    "We first note that the sum of the two terms is $3x + 4$, so that $x = {n}$ gives a value of "
    "{n}.5 after division by two. "
)


def plain(num: int, rng: random.Random) -> list[tuple[str, Problem]]:
    """Return responses that text and numbers decide; a third of them is wrong."""
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
    """Return responses that need algebra; half of them is wrong."""
    pairs = [
        (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a + wrong}") for a in range(1, 40) for wrong in (0, 1)
    ]
    return [
        (f"\\boxed{{{given}}}", Problem(f"p{i}", (), truth, "math"))
        for i, (truth, given) in enumerate(rng.choices(pairs, k=num))
    ]


def programs(num: int, rng: random.Random) -> list[tuple[str, Problem]]:
    """Return programs with three tests each; half of them is wrong."""
    tests = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 5) == 5"])
    answers = [
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a - b\n```",
    ]
    return [(rng.choice(answers), Problem(f"p{i}", (), tests, "code")) for i in range(num)]


def measure(name: str, items: list[tuple[str, Problem]], workers: int) -> None:
    """Score the items and print the rates."""
    responses = [response for response, _ in items]
    problems = [problem for _, problem in items]
    num_warmup = 8 * workers  # the child processes start and import
    with Scorer("auto", timeout_s=30, workers=workers) as scorer:
        scorer.score(problems[:num_warmup], responses[:num_warmup])
        start = time.perf_counter()
        cpu_start = cpu_seconds()
        results = scorer.score(problems, responses)
        seconds = time.perf_counter() - start
        cpu_s = cpu_seconds() - cpu_start
    num_right = sum(result.value for result in results if isinstance(result, Score))
    num_failed = sum(not isinstance(result, Score) for result in results)
    rates = f"{len(items) / seconds:9,.0f} per second"
    if name != "programs":  # the processor time of killed sandboxes is not counted
        rates += f", {len(items) / cpu_s:9,.0f} per second of processor time"
    print(
        f"{name:<14}{len(items):>7} responses in {seconds:7.2f} s: {rates}; "
        f"{num_right:.0f} right, {num_failed} failed"
    )


def cpu_seconds() -> float:
    """Return the processor time of this process and of its present children, in seconds."""
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
    options = parser.parse_args()
    rng = random.Random(0)
    num_cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(f"{options.workers} workers on {num_cores} cores, load {load:.1f} before the start")
    measure("plain math", plain(options.answers, rng), options.workers)
    measure("algebra", algebra(max(16, options.answers // 50), rng), options.workers)
    measure("programs", programs(max(16, options.answers // 500), rng), options.workers)


if __name__ == "__main__":
    main()
