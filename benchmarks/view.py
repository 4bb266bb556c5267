"""How the page holds up: a synthetic run of many steps and trajectories, every answer timed over HTTP, the server's memory watched,
and, where Chromium is installed, every page timed in the browser from the first byte asked for to the thing people came for.

python benchmarks/view.py --steps 1000 --rows 500 [--folder FOLDER]   makes the run once, about 2 GB for 1,000 x 500
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

GROUP, LENGTH = 8, 256


def make_run(folder: Path, steps: int, rows: int) -> None:
    """Rollouts in the form a run writes: 256 tokens a response, groups of 8, texts of about 1,000 characters."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"method: {{name: grpo}}\nmodel: {{path: synthetic}}\ntraining: {{steps: {steps}}}\n"
    )
    random = np.random.default_rng(0)
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * LENGTH)
    tokens = pa.ListArray.from_arrays(offsets, pa.array(random.integers(0, 50_000, rows * LENGTH)))
    floats = pa.ListArray.from_arrays(
        offsets, pa.array(random.normal(size=rows * LENGTH).astype(np.float32))
    )
    text = "the answer to this is therefore surely something " * 20
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            groups = [i // GROUP for i in range(rows)]
            table = pa.table(
                {
                    "prompt": pa.array([[1, 2, 3]] * rows),
                    "response": tokens,
                    "uid": [f"{(step * 977 + g) % 20_000:016x}" for g in groups],
                    "group": groups,
                    "index": [i % GROUP for i in range(rows)],
                    "source": ["policy"] * rows,
                    "finish": ["stop"] * rows,
                    "text": [f"{i} {text}" for i in range(rows)],
                    "question": [f"problem {g}" for g in groups],
                    "failure": [""] * rows,
                    "reward": random.integers(0, 2, rows).astype(float),
                    "behavior_logprobs": floats,
                    "advantages": floats,
                }
            )
            pq.write_table(
                table,
                folder / "rollouts" / f"step-{step:06d}.parquet",
                row_group_size=max(64, rows * 65536 // (rows * LENGTH)),
            )
            line = {"step": step, "time": 1.8e9 + step, "reward/mean": step / steps, "step_s": 1.0}
            metrics.write(
                json.dumps(line | {f"metric/{i}": step * 0.001 * i for i in range(40)}) + "\n"
            )


def memory_mib(pid: int) -> tuple[float, float]:
    """Resident memory now and at its highest."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":" in line
    )
    return tuple(int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = wanted.folder or Path(scratch)
        if not (root / "big" / "metrics.jsonl").is_file():
            make_run(root / "big", wanted.steps, wanted.rows)
        measure(root, wanted.steps, wanted.rows)


def measure(root: Path, steps: int, rows: int) -> None:
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "view",
        str(root),
        "--port",
        "8899",
        "--no-browser",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        while "Ctrl-C" not in server.stdout.readline():
            pass
        time.sleep(1)
        print(
            f"{steps:,} steps, {steps * rows:,} trajectories of {LENGTH} tokens; server at rest {memory_mib(server.pid)[0]:.0f} MiB"
        )
        questions = [
            ("list of runs", "runs"),
            ("a run opens: overview", "run?run=big"),
            ("a run opens: all metrics", "metrics?run=big"),
            ("a step's groups", f"groups?run=big&step={steps // 2}"),
            (
                "the same step, filtered",
                f"groups?run=big&step={steps // 2}&keep=right&sort=longest",
            ),
            ("a group with its tokens", f"group?run=big&step={steps // 2}&group=3"),
            ("follow a problem, first answer", "follow?run=big&uid=00000000000003d1"),
            ("search, first answer", "search?run=big&words=nowhere"),
        ]
        for label, path in questions:
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:8899/api/{path}") as answer:
                size = len(answer.read())
            print(
                f"{label:<34}{(time.perf_counter() - began) * 1000:8.0f} ms {size / 1024:10.0f} KiB"
            )
        began = time.perf_counter()
        while True:
            with urllib.request.urlopen(
                "http://127.0.0.1:8899/api/follow?run=big&uid=00000000000003d1"
            ) as answer:
                found = json.load(answer)
            if found["looked"] >= found["steps"]:
                break
        print(
            f"{'follow, the whole run indexed':<34}{(time.perf_counter() - began) * 1000:8.0f} ms more, {len(found['visits'])} visits"
        )
        in_the_browser(steps)
        print("memory now {:.0f} MiB, highest {:.0f} MiB".format(*memory_mib(server.pid)))
    finally:
        server.terminate()
        server.wait(10)


# Notes when something is first drawn: found by an observer, counted when the frame after it is.
WATCH = """
window.drawn = null;
new MutationObserver(() => {
  if (window.drawn === null && document.querySelector(SELECTOR)) {
    window.drawn = 0;
    requestAnimationFrame(() => requestAnimationFrame(() => { window.drawn = performance.now(); }));
  }
}).observe(document, { childList: true, subtree: true, attributes: true });
"""
PAINT = "return (performance.getEntriesByName('first-contentful-paint')[0] || {}).startTime"


def in_the_browser(steps: int) -> None:
    """Milliseconds from the start of the navigation, each page opened afresh in a new tab of a running browser."""
    chromium, driver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if not (chromium and driver):
        print("no Chromium with chromedriver here: the browser was not measured")
        return
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(word)
    pages = [
        ("runs: the table", "#/runs", "table.runs tbody tr"),
        ("a run: the curves", "#/run/big/curves", "figure.chart svg.plot path.line"),
        (
            "a step: the tokens of a group",
            f"#/run/big/rollouts?step={steps // 2}",
            ".card .tokens .t",
        ),
    ]
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        for label, place, selector in pages:
            times = [_open(browser, place, selector) for _ in range(3)]
            painted, drawn = (sorted(column)[1] for column in zip(*times, strict=True))
            print(
                f"{'browser, ' + label:<42}first paint {painted:5.0f} ms, there after {drawn:5.0f} ms (median of 3)"
            )
    finally:
        browser.quit()


def _open(browser: Any, place: str, selector: str) -> tuple[float, float]:
    script = WATCH.replace("SELECTOR", json.dumps(selector))
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    browser.get("about:blank")
    browser.get(f"http://127.0.0.1:8899/{place}")
    end = time.monotonic() + 30
    while not (drawn := browser.execute_script("return window.drawn")):
        assert time.monotonic() < end, f"{selector} never came"
        time.sleep(0.02)
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    return float(browser.execute_script(PAINT) or 0.0), float(drawn)


if __name__ == "__main__":
    main()
