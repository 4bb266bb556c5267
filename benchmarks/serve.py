"""Load on `postgrad serve`: tokens a second and latencies with 1, 16 and 200 clients at once, each asking again when it was answered.

python benchmarks/serve.py MODEL [--clients 1,16,200] [--seconds 10] [--tokens 32] [-- words for postgrad serve]
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from typing import Any


def start(model: str, overrides: list[str]) -> tuple["subprocess.Popen[str]", int]:
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "serve",
        model,
        "--port",
        "0",
        "--name",
        "bench",
        *overrides,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            return process, int(line.split(":")[2].split("/")[0])
    raise SystemExit("the server did not start")


def client(port: int, number: int, tokens: int, until: float, found: list[dict[str, Any]]) -> None:
    """Ask by streaming until the time is over; what was begun is finished and counted."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    asked = 0
    while time.monotonic() < until:
        body = {
            "model": "bench",
            "prompt": "12+34=",
            "max_tokens": tokens,
            "seed": number * 10_000 + asked,
            "stream": True,
        }
        began = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(body | {"stream_options": {"include_usage": True}}), {"Content-Type": "application/json"}
        )  # fmt: skip
        answer = connection.getresponse()
        first, count = 0.0, 0
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
                usage = json.loads(line[6:]).get("usage")
                count = usage["completion_tokens"] if usage else count
        found.append(
            {
                "status": answer.status,
                "first_s": first,
                "whole_s": time.monotonic() - began,
                "tokens": count,
            }
        )
        asked += 1
    connection.close()


def measure(port: int, clients: int, seconds: float, tokens: int) -> str:
    found: list[dict[str, Any]] = []
    began = time.monotonic()
    threads = [
        threading.Thread(target=client, args=(port, i, tokens, began + seconds, found))
        for i in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    lost = sum(one["status"] != 200 for one in found)
    cells = [
        f"{clients}",
        f"{len(found)}",
        f"{lost}",
        f"{sum(one['tokens'] for one in found) / took:.0f}",
    ]
    for key in ("first_s", "whole_s"):
        values = sorted(one[key] * 1000 for one in found)
        cells += [
            f"{statistics.median(values):.0f}",
            f"{values[int(0.95 * (len(values) - 1))]:.0f}",
            f"{values[int(0.99 * (len(values) - 1))]:.0f}",
        ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--clients", default="1,16,200")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32)
    overrides = sys.argv[1:]
    own, more = (
        (overrides[: overrides.index("--")], overrides[overrides.index("--") + 1 :])
        if "--" in overrides
        else (overrides, [])
    )
    options = parser.parse_args(own)
    process, port = start(options.model, more)
    try:
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(
            "| clients | answers | lost | tokens/s | first token ms p50 | p95 | p99 | whole ms p50 | p95 | p99 |\n|"
            + "---|" * 10
        )
        measure(port, 4, 1.0, options.tokens)
        for clients in options.clients.split(","):
            print(measure(port, int(clients), options.seconds, options.tokens), flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        print(f"the server ended with code {process.wait(60)}")


if __name__ == "__main__":
    main()
