"""Load on `postgrad serve`: tokens per second and latencies with 1, 16 and 200 clients.

    python benchmarks/serve.py MODEL [--clients 1,16,200] [--seconds 10] [--tokens 32]
                               [-- options of postgrad serve]

Each client sends its next request when the last one is answered.
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


def start_server(model: str, server_options: list[str]) -> tuple["subprocess.Popen[str]", int]:
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
        *server_options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            return process, int(line.split(":")[2].split("/")[0])
    raise SystemExit("the server did not start")


def run_client(
    port: int, number: int, tokens: int, deadline: float, results: list[dict[str, Any]]
) -> None:
    """Stream completions until the deadline; a request that is running then is finished."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    num_requests = 0
    while time.monotonic() < deadline:
        body = {
            "model": "bench",
            "prompt": "12+34=",
            "max_tokens": tokens,
            "seed": number * 10_000 + num_requests,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"}
        start = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        first_token_s = 0.0
        count = 0
        for line in response:
            if line.startswith(b"data: {"):
                first_token_s = first_token_s or time.monotonic() - start
                usage = json.loads(line[6:]).get("usage")
                count = usage["completion_tokens"] if usage else count
        results.append(
            {
                "status": response.status,
                "first_token_s": first_token_s,
                "total_s": time.monotonic() - start,
                "tokens": count,
            }
        )
        num_requests += 1
    connection.close()


def measure(port: int, clients: int, seconds: float, tokens: int) -> str:
    results: list[dict[str, Any]] = []
    start = time.monotonic()
    threads = [
        threading.Thread(target=run_client, args=(port, i, tokens, start + seconds, results))
        for i in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - start
    failed = sum(result["status"] != 200 for result in results)
    tokens_per_second = sum(result["tokens"] for result in results) / elapsed_s
    cells = [f"{clients}", f"{len(results)}", f"{failed}", f"{tokens_per_second:.0f}"]
    for key in ("first_token_s", "total_s"):
        values = sorted(result[key] * 1000 for result in results)
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
    own_options = sys.argv[1:]
    server_options: list[str] = []
    if "--" in own_options:
        separator = own_options.index("--")
        server_options = own_options[separator + 1 :]
        own_options = own_options[:separator]
    options = parser.parse_args(own_options)
    process, port = start_server(options.model, server_options)
    try:
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(
            "| clients | responses | failed | tokens/s | first token ms p50 | p95 | p99 "
            "| total ms p50 | p95 | p99 |"
        )
        print("|" + "---|" * 10)
        measure(port, 4, 1.0, options.tokens)
        for clients in options.clients.split(","):
            print(measure(port, int(clients), options.seconds, options.tokens), flush=True)
    finally:
        process.send_signal(signal.SIGINT)
        print(f"the server ended with code {process.wait(60)}")


if __name__ == "__main__":
    main()
