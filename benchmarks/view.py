"""Measures the page on a synthetic run with many trajectories: response times and memory.

Every request is timed over HTTP. If Chromium is installed, every page is also timed in the browser,
from the start of the navigation until its main content is drawn.

    python benchmarks/view.py --steps 1000 --rows 500 [--folder FOLDER]

The run is made once; 1,000 steps of 500 rows take about 2 GB.
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

GROUP = 8
LENGTH = 256
ADDRESS = "http://127.0.0.1:8899"


def make_run(folder: Path, steps: int, rows: int) -> None:
    """Writes rollouts as a run does: 256 tokens per response, groups of 8, 1,000 characters."""
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
    """(current, highest) resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    current = int(fields["VmRSS"].split()[0]) / 1024
    highest = int(fields["VmHWM"].split()[0]) / 1024
    return current, highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.folder or Path(scratch)
        if not (root / "big" / "metrics.jsonl").is_file():
            make_run(root / "big", arguments.steps, arguments.rows)
        measure(root, arguments.steps, arguments.rows)


def measure(root: Path, steps: int, rows: int) -> None:
    """Starts the server, times the requests and the pages, and prints the results."""
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
        idle_mib = memory_mib(server.pid)[0]
        print(
            f"{steps:,} steps, {steps * rows:,} trajectories of {LENGTH} tokens; "
            f"idle server {idle_mib:.0f} MiB"
        )
        requests = [
            ("list of runs", "runs"),
            ("a run opens: overview", "run?run=big"),
            ("a run opens: all metrics", "metrics?run=big"),
            ("a step's groups", f"groups?run=big&step={steps // 2}"),
            (
                "the same step, filtered",
                f"groups?run=big&step={steps // 2}&filter=correct&sort=longest",
            ),
            ("a group with its tokens", f"group?run=big&step={steps // 2}&group=3"),
            ("one problem, first response", "problem?run=big&uid=00000000000003d1"),
            ("search, first response", "search?run=big&search=nowhere"),
        ]
        for label, path in requests:
            began = time.perf_counter()
            with urllib.request.urlopen(f"{ADDRESS}/api/{path}") as answer:
                size = len(answer.read())
            elapsed_ms = (time.perf_counter() - began) * 1000
            print(f"{label:<34}{elapsed_ms:8.0f} ms {size / 1024:10.0f} KiB")
        began = time.perf_counter()
        while True:
            path = "problem?run=big&uid=00000000000003d1"
            with urllib.request.urlopen(f"{ADDRESS}/api/{path}") as response:
                problem = json.load(response)
            if problem["indexed"] >= problem["steps"]:
                break
        elapsed_ms = (time.perf_counter() - began) * 1000
        num_visits = len(problem["visits"])
        print(f"{'one problem, run indexed':<34}{elapsed_ms:8.0f} ms more, {num_visits} visits")
        measure_in_browser(steps)
        current, highest = memory_mib(server.pid)
        print(f"memory now {current:.0f} MiB, highest {highest:.0f} MiB")
    finally:
        server.terminate()
        server.wait(10)


# Sets window.drawn to the time of the second frame after the selector first matches.
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


def measure_in_browser(steps: int) -> None:
    """Prints milliseconds from the start of the navigation; a running browser opens each page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        print("no Chromium with chromedriver: the pages were not timed in a browser")
        return
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(argument)
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
        for label, page, selector in pages:
            times = [_time_page(browser, page, selector) for _ in range(3)]
            painted, drawn = (sorted(column)[1] for column in zip(*times, strict=True))
            print(
                f"{'browser, ' + label:<42}first paint {painted:5.0f} ms, "
                f"content after {drawn:5.0f} ms (median of 3)"
            )
    finally:
        browser.quit()


def _time_page(browser: Any, page: str, selector: str) -> tuple[float, float]:
    """(first paint, content drawn) of one page, in milliseconds."""
    script = WATCH.replace("SELECTOR", json.dumps(selector))
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    browser.get("about:blank")
    browser.get(f"{ADDRESS}/{page}")
    end = time.monotonic() + 30
    while not (drawn := browser.execute_script("return window.drawn")):
        assert time.monotonic() < end, f"{selector} did not appear within 30 s"
        time.sleep(0.02)
    browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    return float(browser.execute_script(PAINT) or 0.0), float(drawn)


if __name__ == "__main__":
    main()
