"""A method outside the package, given as `method=my_bupo:Mine`, gives the numbers of the built-in one, to the bit."""

from pathlib import Path

from world import metrics_of, overrides_of

from postgrad.cli.main import main
from postgrad.methods import bupo
from postgrad.training.log import is_clock

HERE = Path(__file__).parent


def train(model: Path, runs: Path, *overrides: str) -> Path:
    small = (
        *(
            "rollout.samples=4",
            "rollout.max_response_tokens=5",
            "training.problems_per_step=4",
            "training.steps=3",
            "reward.workers=1",
        ),
        *(
            "optimizer.lr=1e-2",
            "training.updates_per_step=2",
            "method.num_blocks=1",
            "method.phase_one_steps=2",
        ),
        *(f"reward.verifier={HERE / 'odd.py'}:odd", f"runs={runs}", "training.validate_every=0"),
    )
    assert main(["train", "bupo", *overrides_of(model, *small, *overrides)]) == 0
    return runs / "test"


def steady(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not is_clock(k)} for line in metrics_of(folder)]


def test_it_is_the_same_code_under_other_names():
    """A change of the built-in that is not made here would make the comparison below say little."""
    inside = Path(bupo.__file__).read_text().split('"""', 2)[2]
    outside = (HERE / "my_bupo.py").read_text().split('"""', 2)[2]
    assert outside == inside.replace("BupoSettings", "MineSettings").replace(
        "class Bupo(", "class Mine("
    )


def test_a_copy_outside_the_package_gives_the_same_numbers(tiny_untied, tmp_path, monkeypatch):
    monkeypatch.chdir(HERE)
    inside = train(tiny_untied, tmp_path / "inside")
    outside = train(tiny_untied, tmp_path / "outside", "method=my_bupo:Mine")
    assert [line["phase"] for line in metrics_of(outside)] == [1, 1, 2]
    assert steady(inside) == steady(outside)
    for name in ("policy/model.safetensors", "optimizer.safetensors", "method.bin"):
        one, two = (folder / "checkpoints" / "step-3" / name for folder in (inside, outside))
        assert one.read_bytes() == two.read_bytes(), name
