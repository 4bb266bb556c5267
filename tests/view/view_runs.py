"""A folder of runs that ended in every way, with evaluations and an analysis; a server for it."""

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from postgrad.pictures import Picture
from postgrad.results.metrics import summarize
from postgrad.training.log import RunLog
from postgrad.training.report import Events
from postgrad.types import Batch, Trajectory

# Text of a model that would run as a script if the page parsed it as markup.
HOSTILE = (
    "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'>"
    "\"';--><svg onload=window.pwned=3>"
)
WORDS = ["<end>", "so", " the", " answer", " is", " 7", " 8", "\n"]
WORDS += [HOSTILE, " ünïcode", " <b>bold</b>", " javascript:window.pwned=4"]
CONFIG = """name: {name}
seed: 0
model: {{path: tiny}}
data: {{train: arithmetic:1}}
training: {{steps: {steps}, stop_at: null}}
optimizer: {{lr: {lr}}}
method: {{name: grpo}}
"""


def make_tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(file))


def trajectory(step: int, group: int, index: int, response: list[int]) -> Trajectory:
    length = len(response)
    columns = {
        "advantages": [(-1.0) ** index * (0.5 + 0.1 * i) for i in range(length)],
        "entropy": [0.3 * (i + 1) for i in range(length)],
    }
    return Trajectory(
        f"problem-{(step + group) % 5}",
        [1, 2, 3, 4],
        response,
        group,
        index,
        source=1 if index == 2 else 0,
        finish="given" if index == 2 else "length" if index == 1 else "stop",
        behavior_logprobs=[-0.2 * (i + 1) for i in range(length)],
        loss_mask=[i != 1 for i in range(length)],
        token_source=[1 if index == 2 else i % 2 * 4 for i in range(length)],
        tokens=columns,
    )


def drawn(color: str) -> Picture:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(file, "PNG")
    return Picture(file.getvalue())


def batch_of(
    step: int, hostile: bool = False, pictures: tuple[tuple[Picture, ...], ...] = ()
) -> Batch:
    """Three groups of three rows; one row could not be scored; hostile text on request.

    `pictures` are those of each group.
    """
    rows = [
        trajectory(
            step,
            group,
            index,
            [1, 2, 3, 4, 5 + (index == 0), 7, 8 if hostile else 9, 10, 11, 0][: 6 + index + group],
        )
        for group in range(3)
        for index in range(3)
    ]
    batch = Batch.of(rows)
    batch.rows["text"] = ["".join(WORDS[i] for i in ids.tolist()) for ids in batch.response.split()]
    batch.rows["question"] = [
        f"What is {group} + {step}? {HOSTILE if hostile else ''}"
        for group in batch.rows["group"].tolist()
    ]
    batch.rows["reward"] = torch.tensor(
        [float("nan") if i == 4 else float(i % 3 == 0) for i in range(9)]
    )
    batch.rows["failure"] = ["timeout: 5 s were not enough" if i == 4 else "" for i in range(9)]
    batch.rows["reward/answer"] = batch.rows["reward"].clone()
    batch.rows["reward/format"] = torch.tensor([0.5] * 9)
    if pictures:
        batch.rows["images"] = [pictures[group] for group in batch.rows["group"].tolist()]
    batch.rows["classmate_continuations"] = [
        ["then 7 it is", HOSTILE if hostile else "or 8"] for _ in range(9)
    ]
    return batch


def metrics_of(step: int, lift: float = 0.0) -> dict[str, float]:
    return {
        "reward/mean": 0.1 + step * 0.02 + lift,
        "reward/answer": 0.1 + step * 0.02 + lift,
        "reward/format": 0.5,
        "response/length": 30.0 + step,
        "entropy": 2.0 / step,
        "loss": -0.01 * step,
        "grad_norm": 1.0 + (step % 3) * 0.1,
        "stage/sample_s": 0.2,
        "stage/update_s": 0.3,
        "step_s": 0.5,
        "tokens_per_second": 1000.0,
        "memory_gib": 1.0,
        "odd/thing": float(step),
    }


class WrittenRun:
    """A run folder that the product's own writers extend step by step."""

    def __init__(self, folder: Path, steps: int = 20, lr: float = 1e-3) -> None:
        self.folder = folder
        for name in ("rollouts", "checkpoints", "eval"):
            (folder / name).mkdir(parents=True)
        (folder / "config.yaml").write_text(CONFIG.format(name=folder.name, steps=steps, lr=lr))
        make_tokenizer(folder / "tokenizer.json")
        self.log, self.events, self.number = RunLog(folder, 0), Events(folder), 0
        self.events.total, self.events.first_event = steps, ("started", 0)

    def step(self, lift: float = 0.0, hostile: bool = False) -> None:
        self.number += 1
        self.log.write_rollouts(self.number, [batch_of(self.number, hostile)])
        line = self.log.write(self.number, metrics_of(self.number, lift))
        if self.number % 5 == 0:
            self.log.write(
                self.number,
                {
                    "validation/accuracy": 0.03 * self.number,
                    "validation/sampled_accuracy": 0.02 * self.number,
                },
            )
            self.events.number = self.number
            self.events.saved(self.folder / "checkpoints" / f"step-{self.number}")
        self.events.step(line, batch_of(self.number))

    def steps(self, count: int, **options: Any) -> "WrittenRun":
        for _ in range(count):
            self.step(**options)
        return self


def write_evaluation(folder: Path, num_correct: int) -> None:
    """Two samples per problem, 8 problems; the first `num_correct` problems are correct."""
    folder.mkdir(parents=True)
    lines = [
        {
            "uid": f"q{number}",
            "sample": sample,
            "data_source": "sums",
            "prompt": f"Question {number}?",
            "response": f"I say {number if number < num_correct else 'nothing'}. {HOSTILE}",
            "tokens": [1, 2, 3],
            "ground_truth": str(number),
            "verifier": "exact",
            "score": 1.0 if number < num_correct else 0.0,
            "right": number < num_correct,
            "parts": {"format": 1.0, "answer": 1.0 if number < num_correct else 0.0},
            "failure": {"kind": "timeout", "reason": "too slow"}
            if number == 7 and sample
            else None,
            "answer": None,
            "can_vote": False,
            "finish": "length" if number == 6 else "stop",
            "length": 3 + number,
        }
        for number in range(8)
        for sample in range(2)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "settings.json").write_text("{}")
    row = summarize(lines)
    (folder / "summary.json").write_text(
        json.dumps({"model": folder.name, "interval": "Wilson", "sets": {"sums": row}})
    )


def write_entropy(folder: Path, lift: float) -> None:
    """The entropy.json of `postgrad analyze entropy` for four layers."""

    def stats(value: float) -> dict[str, float]:
        return dict.fromkeys(("mean", "std", "min", "max", "median"), value)

    def module(number: int, by: float) -> dict[str, Any]:
        return {
            "input": stats(2.8 - number / 2),
            "output": stats(2.8 - number / 2 + by),
            "change": stats(by + lift),
        }

    layers = [
        {
            "number": n,
            "attention": module(n, 0.2),
            "ffn": module(n, 0.3 - n / 8),
            "layer": module(n, -0.5),
        }
        for n in range(1, 5)
    ]
    report = {
        "model": HOSTILE,
        "rows": 8,
        "tokens": 40,
        "num_layers": 4,
        "boundary_layer": 2,
        "ceiling": 2.9,
    }
    folder.mkdir(parents=True)
    (folder / "entropy.json").write_text(
        json.dumps({**report, "full_policy": stats(0.7), "layers": layers})
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    done = WrittenRun(root / "finished").steps(20)
    done.events.ended(reached=False, interrupted=False)
    failed = WrittenRun(root / "group" / "failed", lr=3e-3).steps(7, lift=0.2)
    failed.events.number = 7
    failed.events.write("failed", f"step 8, stage score: 90% could not be judged {HOSTILE}")
    WrittenRun(root / "hostile", steps=3).steps(3, hostile=True)
    (root / "killed").mkdir()
    WrittenRun(root / "killed" / "run").steps(2)
    write_evaluation(root / "finished" / "eval" / "before", num_correct=2)
    write_evaluation(root / "finished" / "eval" / "after", num_correct=6)
    write_entropy(root / "finished" / "eval" / "entropy", 0.0)
    write_entropy(root / "group" / "failed" / "eval" / "entropy", 0.1)
    (root / "broken").mkdir()
    lines = [
        b'{"step": 1, "loss": NaN}',
        b"not json",
        b"[1]",
        b'{"step": "x"}',
        b'{"step": 2, "loss": 1e400}',
        b"\xff",
        b'{"step": 3',
    ]
    (root / "broken" / "metrics.jsonl").write_bytes(b"\n".join(lines))
    (root / "broken" / "config.yaml").write_text("{ not: [yaml")
    (root / "broken" / "rollouts").mkdir()
    (root / "broken" / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1 not really")
    return root


@dataclass
class Server:
    """The page's server, running in a thread."""

    root: Path
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            named = {key.replace("_", "-"): value for key, value in headers.items()}
            connection.putrequest(
                method, path, skip_host="Host" in named, skip_accept_encoding=True
            )
            for key, value in named.items():
                connection.putheader(key, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, (status, body[:300])
        return json.loads(body)


@contextmanager
def serving(root: Path, host: str = "127.0.0.1", token: str = "") -> Iterator[Server]:
    from postgrad.view.folder import Folder
    from postgrad.view.server import make_server

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(32)
    server = make_server(Folder(root), host, token)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Server(root, listener.getsockname()[1])
    server.should_exit = True
    thread.join(5)


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[Server]:
    with serving(runs) as server:
        yield server
