"""The slips that people make: one line with what is wrong and what to type, and the exit code.

slips.jsonl has one JSON object per line:

    run      a command without `postgrad`, or arguments of postgrad.train() for the area `python`;
             `tiny` and TINY are the folder of a model
    exit     2: wrong input; 1: the run cannot go on; 0: a note; in Python the exception's name
    says     parts of the line: the key or the file and line, and the suggested name
    files    the user's files
    first    a command that is run before; then `edit` replaces files
"""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import overrides_of, toy_run, tree

import postgrad
from postgrad.cli.main import main
from postgrad.rollout import http_client

SLIPS = [
    json.loads(line) for line in (Path(__file__).parent / "slips.jsonl").read_text().splitlines()
]
ROWS = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(8)]
DATA = {
    "empty.jsonl": "",
    "wrong.jsonl": '{"color": "blue", "size": 3}\n',
    "cut.jsonl": '{"prompt": "1+1="\n',
    "few.jsonl": '{"question": "1+1=", "answer": "#### 2"}\n' * 3,
    "bare.jsonl": '{"prompt": "1+1="}\n' * 9,
    "strange.jsonl": '{"data_source": "no/such", "prompt": "1+1=", "ground_truth": "2"}\n' * 9,
    "noreply.jsonl": '{"messages": [{"role": "user", "content": "1+1="}, '
    '{"role": "assistant", "content": ""}]}\n',
}


def words_of(command: str, model: Path) -> list[str]:
    """Return the words of a command; a run gets a tiny model and small sizes."""
    words = [
        str(model) if word == "tiny" else word.replace("TINY", str(model))
        for word in shlex.split(command)
    ]
    if words[0] != "train" or "=" in words[1]:
        return words
    small = overrides_of(model, *toy_run(response_tokens=3), "runs=runs")
    return [*words[:2], *small, *words[2:]]


def train_in_python(arguments: str, model: Path) -> str:
    """Call postgrad.train() with these arguments; return the name of the exception."""
    given = eval(f"dict({arguments})", {"postgrad": postgrad})
    settings = {
        "training.problems_per_step": 4,
        "model.device": "cpu",
        "model.threads": 1,
        "data.template": "plain",
        "reward.workers": 1,
        "runs": "runs",
    }
    base: dict[str, Any] = {
        "model": str(model),
        "data": ROWS,
        "reward": "exact",
        "name": "test",
        "steps": 2,
        "group_size": 4,
        "max_tokens": 3,
    }
    settings |= given.pop("settings", {})
    try:
        postgrad.train(**base | given, settings=settings)
    except (postgrad.ConfigError, postgrad.RunError) as error:
        print(error, file=sys.stderr)
        return "ConfigError" if isinstance(error, postgrad.ConfigError) else "RunError"
    return "none"


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


def test_there_are_sixty():
    assert len(SLIPS) >= 60 and len({json.dumps(slip) for slip in SLIPS}) == len(SLIPS)


def param(slip: dict[str, Any]) -> Any:
    is_slow = slip["area"] == "python" or slip["run"].split()[0] in ("train", "eval")
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(slip, marks=marks, id=f"{slip['area']} {slip['run']}")


@pytest.mark.parametrize("slip", [param(slip) for slip in SLIPS])
def test_a_slip_is_one_line(slip, tiny, tmp_path, monkeypatch, capsys):
    if "model.device=cuda" in slip["run"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http_client, "START_S", 0.3)
    write(DATA | slip.get("files", {}))
    if "first" in slip:
        assert main(words_of(slip["first"], tiny)) == 0
        write(slip.get("edit", {}))
        capsys.readouterr()
    before = {name: data for name, data in tree(tmp_path).items() if "__pycache__" not in name}
    if slip["area"] == "python":
        code = train_in_python(slip["run"], tiny)
    else:
        with contextlib.suppress(SystemExit):
            code = main(words_of(slip["run"], tiny))
    shown = capsys.readouterr()
    assert code == slip["exit"], shown.err
    lines = shown.out.splitlines() if code == 0 else shown.err.splitlines()
    assert code == 0 or len(lines) == 1, shown.err
    assert any(all(part in line for part in slip["says"]) for line in lines), lines
    if code in (2, "ConfigError"):
        after = {name: data for name, data in tree(tmp_path).items() if "__pycache__" not in name}
        assert after == before, "wrong input changes nothing"
