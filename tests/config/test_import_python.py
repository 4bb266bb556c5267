"""`postgrad import` of Python scripts: dicts, constants and later assignments are read."""

import pytest

from postgrad.cli.main import main
from postgrad.config.import_script import read_settings, translate
from postgrad.errors import ConfigError


def _keys(lines):
    return [line.split(":")[0] for line in lines]


@pytest.mark.parametrize(
    "script",
    [
        "base = dict(learning_rate=5e-6, num_generations=16)\nGRPOConfig(**base)",
        "base = {'learning_rate': 5e-6, 'num_generations': 16}\nGRPOConfig(**base)",
        "GRPOConfig(**{'learning_rate': 5e-6, **dict(num_generations=16)})",
        "a = {'learning_rate': 5e-6}\nGRPOConfig(**(a | {'num_generations': 16}))",
        "a = {'learning_rate': 1.0}\na['learning_rate'] = 5e-6\na.update(num_generations=16)\n"
        "GRPOConfig(**a)",
        "a = {'num_generations': 16}\nb = {**a, 'learning_rate': 5e-6}\nc = b.copy()\n"
        "def main():\n    return GRPOConfig(**c)",
        "cfg = GRPOConfig(learning_rate=1.0)\ncfg.learning_rate = 5e-6\n"
        "setattr(cfg, 'num_generations', 16)",
        "class A:\n  def __init__(self):\n    self.cfg = GRPOConfig(num_generations=8)\n"
        "  def run(self):\n    self.cfg.learning_rate = 5e-6\n    self.cfg.num_generations *= 2",
        "LR = 5e-6\nN: int = 2 * 8\nGRPOConfig(learning_rate=LR, num_generations=N)",
        "values = dict(lr=5e-6)\nif __name__ == '__main__':\n    n = 16\n"
        "    GRPOConfig(learning_rate=values['lr'], num_generations=n)",
    ],
)
def test_settings_are_found_where_the_script_has_them(script):
    result = translate(*read_settings(script))
    assert result.overrides == {"optimizer.lr": "5e-06", "rollout.samples": "16"}
    assert result.missing == []


def test_names_of_texts_are_followed():
    script = (
        "MODEL = 'org/m'\nNAME = f'{MODEL}-grpo'\n"
        "trainer = GRPOTrainer(MODEL, args=GRPOConfig('out', run_name=NAME))"
    )
    overrides = translate(*read_settings(script)).overrides
    assert overrides == {"runs": "out", "name": "org/m-grpo", "model.path": "org/m"}


def test_settings_that_cannot_be_read_are_listed():
    script = (
        "base = load()\nmore = {'beta': 0.1, **base}\n"
        "def main(options, lr):\n"
        "    lr = lr * 2\n"
        "    GRPOConfig(learning_rate=lr, **more, **options)"
    )
    result = translate(*read_settings(script))
    assert result.overrides["method.kl_coef"] == "0.1"
    assert _keys(result.missing) == ["**base", "**options"]
    script = "def tune(args):\n    args.learning_rate = 1e-5\ntune(GRPOConfig(beta=0.1))"
    assert _keys(translate(*read_settings(script)).missing) == ["args.learning_rate=1e-05"]


def test_values_under_a_condition_are_listed():
    script = (
        "device = 'cpu'\nlr = 1e-6\nbase = {}\n"
        "if big:\n    lr = 2e-6\n    device = 'cuda'\n    base['beta'] = 0.1\n"
        "values = dict(learning_rate=lr)\n"
        "cfg = GRPOConfig(**values, **base)\n"
        "if big:\n    cfg.max_steps = 5"
    )
    result = translate(*read_settings(script))
    assert result.overrides["optimizer.lr"] == "2e-06"
    assert result.overrides["training.steps"] == "5"
    assert _keys(result.missing) == ["max_steps=5", "lr", "base"]


def test_a_name_that_gets_another_value_is_no_config():
    script = (
        "config = GRPOConfig(learning_rate=1e-6)\n"
        "def load(config):\n    config.seed = 3\n"
        "config = object()\nconfig.top_k = 5"
    )
    result = translate(*read_settings(script))
    assert result.overrides == {"optimizer.lr": "1e-06"}
    assert _keys(result.missing) == ["config.top_k=5", "config.seed=3"]


def test_python_that_cannot_be_parsed_is_refused_with_its_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="line 2"):
        read_settings("from trl import GRPOConfig\nGRPOConfig(beta=)\n")
    script = tmp_path / "run.py"
    script.write_text("import trl\n\n!pip install trl\n")
    assert main(["import", str(script)]) == 2
    assert "line 3" in capsys.readouterr().err
