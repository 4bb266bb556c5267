"""Load on an OpenAI-compatible server: requests and tokens per second, and latencies.

Starts `postgrad serve` with the options after `--` and measures it:

    python benchmarks/serve.py Qwen/Qwen3-0.6B --clients 1,16,128 --seconds 20 --tokens 128

Measures a server that runs already, such as vLLM's, with the same load:

    vllm serve Qwen/Qwen3-0.6B --port 8001 --generation-config vllm &
    python benchmarks/serve.py Qwen/Qwen3-0.6B --clients 1,16,128 --seconds 20 --tokens 128 \
        --url http://127.0.0.1:8001/v1

Each client streams completions and sends its next request when the last one is answered. Encoder
are sums of `--numbers` random numbers, different for each request. Clients run in `--processes`
processes beside the server. Each number of clients is measured after two seconds of the same load.
Prints a table; times are in milliseconds. Responses may end early, so compare `tokens each`, too.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

WARM_UP_S = 2.0
SERVED_NAME = "bench"  # of the model of a server that this script starts
COLUMNS = (
    "clients | responses | failed | requests/s | tokens/s | prompt tokens | tokens each "
    "| first token p50 | p95 | p99 | response p50 | p95 | p99"
)


class Load(NamedTuple):
    """What the clients send, and where to."""

    url: str
    model: str
    numbers: int  # of a prompt
    tokens: int  # of a response, at most
    temperature: float
    has_seeds: bool  # a seed per request


class Response(NamedTuple):
    """The measurements of one request; `status` is 0 if the connection failed."""

    status: int
    first_token_s: float = 0.0
    total_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0


def start_server(model: str, server_options: list[str]) -> tuple["subprocess.Popen[str]", str]:
    """Start `postgrad serve`; returns the process and its address."""
    command = [sys.executable, "-m", "postgrad.cli.main", "serve", model]
    command += ["--port", "0", "--name", SERVED_NAME, *server_options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("http://"):
            return process, line.split()[0]
    raise SystemExit("the server did not start")


def send(connection: http.client.HTTPConnection, path: str, body: dict) -> Response:
    """Stream one completion."""
    start = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        first_token_s = 0.0
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        for line in response:
            if line.startswith(b"data: {"):
                first_token_s = first_token_s or time.monotonic() - start
                if b'"completion_tokens"' in line:
                    usage = json.loads(line[6:])["usage"]
    except (OSError, http.client.HTTPException):
        connection.close()
        return Response(0)
    total_s = time.monotonic() - start
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Response(response.status, first_token_s, total_s, *counts)


def run_client(load: Load, number: int, deadline: float, results: list[Response]) -> None:
    """Stream completions until the deadline; a request that is running then is finished."""
    address = urlsplit(load.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    rng = random.Random(number)
    while time.time() < deadline:
        prompt = "+".join(str(rng.randrange(10, 100)) for _ in range(load.numbers))
        body = {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": load.tokens,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.has_seeds:
            body["seed"] = rng.randrange(1 << 30)
        results.append(send(connection, f"{address.path}/completions", body))
    connection.close()


def run_clients(load: Load, numbers: list[int], deadline: float) -> list[Response]:
    """Run one thread per client; returns the measurements of all of them."""
    results: list[Response] = []
    threads = [
        threading.Thread(target=run_client, args=(load, number, deadline, results))
        for number in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def measure(pool: ProcessPoolExecutor, processes: int, load: Load, clients: int, seconds: float):
    """Return the responses of all clients, and the seconds until the last one."""
    start = time.time()
    parts = [list(range(first, clients, processes)) for first in range(min(processes, clients))]
    futures = [pool.submit(run_clients, load, part, start + seconds) for part in parts]
    responses = [response for future in futures for response in future.result()]
    return responses, time.time() - start


def summarize(clients: int, responses: list[Response], elapsed_s: float) -> dict[str, float]:
    """Return the figures of one number of clients by column."""
    answered = [response for response in responses if response.status == 200]
    figures: dict[str, float] = {
        "clients": clients,
        "responses": len(answered),
        "failed": len(responses) - len(answered),
    }
    if not answered:
        return figures
    num_tokens = sum(response.num_tokens for response in answered)
    figures |= {
        "requests/s": len(answered) / elapsed_s,
        "tokens/s": num_tokens / elapsed_s,
        "prompt tokens": statistics.mean(response.num_prompt_tokens for response in answered),
        "tokens each": num_tokens / len(answered),
    }
    for name, values in (
        ("first token", sorted(response.first_token_s * 1000 for response in answered)),
        ("response", sorted(response.total_s * 1000 for response in answered)),
    ):
        for percent in (50, 95, 99):
            figures[f"{name} p{percent}"] = values[round(percent / 100 * (len(values) - 1))]
    return figures


def format_line(figures: dict[str, float]) -> str:
    """Return one line of the table."""
    cells = [f"{v:.1f}" if name == "requests/s" else f"{v:.0f}" for name, v in figures.items()]
    return "| " + " | ".join(cells) + " |"


def write_result(file: str, system: str, load: Load, figures: dict[str, float]) -> None:
    """Append the figures to a file of results as one line."""
    name = f"serve {figures['clients']} clients x {load.tokens} tokens"
    row = {"name": name, "system": system, "figures": figures}
    with Path(file).open("a") as out:
        out.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the model; with --url, its name in requests")
    parser.add_argument("--url", help="of a server that runs already, up to /v1")
    parser.add_argument("--clients", default="1,16,128")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--numbers", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--no-seeds", action="store_true", help="vLLM samples slower with seeds")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--out", default="", help="file of results, one line per number of clients")
    parser.add_argument("--system", default="postgrad", help="name of the server in --out")
    own_options = sys.argv[1:]
    server_options: list[str] = []
    if "--" in own_options:
        separator = own_options.index("--")
        server_options = own_options[separator + 1 :]
        own_options = own_options[:separator]
    options = parser.parse_args(own_options)
    process = None
    url = options.url
    model = options.model
    if url is None:
        process, url = start_server(model, server_options)
        model = SERVED_NAME
    sizes = options.numbers, options.tokens, options.temperature
    load = Load(url.rstrip("/"), model, *sizes, has_seeds=not options.no_seeds)
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
            print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            print(f"| {COLUMNS} |\n|" + "---|" * (COLUMNS.count("|") + 1), flush=True)
            for clients in map(int, options.clients.split(",")):
                measure(pool, options.processes, load, clients, WARM_UP_S)
                figures = measure(pool, options.processes, load, clients, options.seconds)
                summary = summarize(clients, *figures)
                print(format_line(summary), flush=True)
                if options.out:
                    write_result(options.out, options.system, load, summary)
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)
            print(f"the server ended with code {process.wait(60)}")


if __name__ == "__main__":
    main()
