"""`postgrad recipes` and `postgrad runs`: what they list."""

import json
import os
import time

import pytest

from postgrad.cli.main import main
from postgrad.cli.recipes import COMMON, MOST_USED
from postgrad.config.compose import recipe_names


def test_recipes_are_grouped_and_small_variants_share_a_line(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("  ")]
    assert lines[0] == "most used" and len(MOST_USED) == 10
    assert [row.split()[0].rstrip(",") for row in rows[:10]] == list(MOST_USED)
    named = [name for row in rows for name in row[2:].split("  ")[0].split(", ")]
    assert sorted(named) == sorted(recipe_names()), "each recipe once"
    assert any(row.startswith("  luffy, luffy_small ") for row in rows)
    assert max(map(len, lines)) <= 112
    groups = "\n".join(lines).split("\n\n")
    assert any(group.startswith("classmate\n") and "classmate_self" in group for group in groups)


@pytest.mark.parametrize("name", ["grpo", "sft", "classmate"])
def test_a_recipe_shows_the_common_settings_and_all_on_request(capsys, name):
    def keys(*arguments: str) -> list[str]:
        assert main(["recipes", name, *arguments]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "=" in line.split(" ")[0]]
        return [line.partition("=")[0] for line in lines]

    common, every = keys(), keys("--all")
    assert len(COMMON) == 20 and common == [key for key in every if key in COMMON]
    assert set(COMMON) - {"method.kl"} <= set(common) and len(every) > 100


def test_runs_are_listed_newest_first(tmp_path, capsys):
    for age_s, name, loss in ((7200, "old", 0.5), (60, "new", 0.25)):
        folder = tmp_path / name
        folder.mkdir()
        model = "/models/Qwen3-4B" if name == "old" else "smollm2"
        settings = {"method": {"name": "sft"}, "model": {"path": model}, "training": {"steps": 9}}
        (folder / "config.yaml").write_text(json.dumps(settings))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "sft/loss": loss}) + "\n")
        changed = time.time() - age_s
        for file in folder.iterdir():
            os.utime(file, (changed, changed))
    (tmp_path / "odd\x1b[2J").mkdir()
    (tmp_path / "odd\x1b[2J" / "metrics.jsonl").write_text("[" * 99_999)
    os.utime(tmp_path / "odd\x1b[2J" / "metrics.jsonl", (0, 0))
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    header, new, old, odd, *_ = out.splitlines()
    assert header.split()[:4] == ["run", "method", "model", "step"]
    assert new.split() == [
        "new",
        "sft",
        "smollm2",
        "3/9",
        "0.25",
        "sft/loss",
        "stopped",
        "1",
        "min",
    ]
    assert old.split()[2:7] == ["Qwen3-4B", "3/9", "0.5", "sft/loss", "stopped"]
    assert "cannot be read" in odd and "\x1b" not in out


def test_no_runs_and_no_folder(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "postgrad train" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "no")]) == 2
    assert "no folder" in capsys.readouterr().err
