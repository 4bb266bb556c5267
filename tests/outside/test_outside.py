"""A method in the user's own file, `method=my_bupo:Mine`, trains exactly like the built-in one."""

from pathlib import Path

import pytest
from tiny_runs import metrics_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.methods import bupo
from postgrad.training.log import is_timing

HERE = Path(__file__).parent
SETTINGS = (
    *toy_run(steps=3, response_tokens=5),
    "training.updates_per_step=2",
    "training.validate_every=0",
    "optimizer.lr=1e-2",
    "method.num_blocks=1",
    "method.phase_one_steps=2",
    f"reward.verifier={HERE / 'odd.py'}:odd",
)


def write_user_method(folder: Path) -> None:
    """Write my_bupo.py: the source of the installed BuPO with its two classes renamed."""
    source = Path(bupo.__file__).read_text()
    for old, new in (("BupoSettings", "MineSettings"), ("class Bupo(", "class Mine(")):
        assert old in source
        source = source.replace(old, new)
    (folder / "my_bupo.py").write_text(source)


def train(model: Path, runs: Path, *overrides: str) -> Path:
    """Train three steps and return the run folder."""
    arguments = overrides_of(model, *SETTINGS, f"runs={runs}", *overrides)
    assert main(["train", "bupo", *arguments]) == 0
    return runs / "test"


def metrics_without_clock(folder: Path) -> list[dict]:
    """Return the metrics of each step without those that measure time or memory."""
    return [
        {name: value for name, value in line.items() if not is_timing(name)}
        for line in metrics_of(folder)
    ]


@pytest.mark.slow
def test_method_outside_the_package_gives_the_same_bits(tiny_untied, tmp_path, monkeypatch):
    write_user_method(tmp_path)
    monkeypatch.chdir(tmp_path)
    inside = train(tiny_untied, tmp_path / "inside")
    outside = train(tiny_untied, tmp_path / "outside", "method=my_bupo:Mine")
    assert [line["phase"] for line in metrics_of(outside)] == [1, 1, 2]
    assert metrics_without_clock(inside) == metrics_without_clock(outside)
    for name in ("policy/model.safetensors", "optimizer.safetensors", "method.bin"):
        file = Path("checkpoints", "step-3", name)
        assert (inside / file).read_bytes() == (outside / file).read_bytes(), name
