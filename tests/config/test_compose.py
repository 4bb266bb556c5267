"""Recipes and overrides become a checked configuration, or one clear line and nothing written."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core_recipes import recipe_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import tabled
from tiny_runs import postgrad

from postgrad.cli.main import COMMANDS, main
from postgrad.config.compose import (
    _all_keys,
    compose,
    differences,
    fingerprint,
    from_yaml,
    recipe_names,
    to_yaml,
)
from postgrad.config.schema import Config
from postgrad.config.stored import read_stored_config
from postgrad.config.suggestions import foreign_names
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.version import __version__

REQUIRED = ["model.path=tiny", "data.train=arithmetic:1"]
LOADING = "loading torch and transformers\n"  # what a person reads while it does


def find_settings(name: str) -> type:
    return find_method(name).Settings


def compose_with(recipe: str = "grpo", *overrides: Any) -> Config:
    return compose(recipe, [*REQUIRED, *overrides], find_settings)


def error_of(*overrides: str, recipe: str = "grpo") -> str:
    """Returns the one-line error of a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        compose(recipe, [*REQUIRED, *overrides], find_settings)
    message = str(caught.value)
    assert "\n" not in message and 0 < len(message) < 400
    return message


def test_overrides_win_over_the_recipe_and_the_recipe_over_the_schema():
    config = compose_with("grpo", "optimizer.lr=3e-4", "seed=7")
    assert config.optimizer.lr == 3e-4 and config.seed == 7  # override
    assert config.training.problems_per_step == 16 and config.method.name == "grpo"  # recipe
    assert config.training.checkpoint_every == 50 and config.method.kl_coef == 0.001  # schema
    assert config.optimizer.betas == [0.9, 0.999]


def test_later_overrides_win_and_a_plus_has_no_effect():
    assert (
        compose_with(
            "grpo", "training.steps=3", "+training.steps=4", "++training.steps=5"
        ).training.steps
        == 5
    )


def test_two_configurations_do_not_share_their_lists():
    one, two = compose_with(), compose_with()
    one.optimizer.betas[0] = 0.5
    assert two.optimizer.betas == [0.9, 0.999]


@tabled("override, parts")
def test_a_wrong_override_is_refused_in_one_line_that_names_it(override, parts):
    message = error_of(override)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "files", ["a.jsonl,b.jsonl", "easy=a.jsonl,hard=b.parquet:x=prompt", "'a.jsonl,b.jsonl'"]
)
def test_files_with_commas_need_no_quotes(files):
    config = compose_with("grpo", f"data.train={files}", f"data.validation={files}")
    assert config.data.train == config.data.validation == files.strip("'")


@tabled("override, value")
def test_texts_need_no_quotes(override, value):
    section, key = override.partition("=")[0].rsplit(".", 1)
    config = compose_with("grpo", override)
    for part in section.split("."):
        config = getattr(config, part)
    assert getattr(config, key) == value


def test_a_string_is_refused_where_a_number_is_needed():
    assert "training.steps" in error_of("training.steps=brief(limit=100)")
    assert "put the value into quotes" in error_of("warmup.overrides=[optimizer.betas=[1,2]]")


def test_sft_allows_top_p_because_its_loss_uses_no_samples():
    find_method("sft")(compose_with("sft", "rollout.top_p=0.9", "rollout.samples=1")).check()


@pytest.mark.parametrize("key", ["model.path", "data.train"])
def test_a_setting_without_a_default_must_be_given(key):
    overrides = [override for override in REQUIRED if not override.startswith(key)]
    with pytest.raises(ConfigError, match=f"add {key}=VALUE"):
        compose("grpo", overrides, find_settings)


def test_a_recipe_may_run_with_another_method():
    config = compose_with("sft", "method=grpo", "method.clip_high=0.28")
    assert config.method.name == "grpo" and config.method.clip_high == 0.28
    assert config.training.problems_per_step == 32  # of the sft recipe


def test_a_recipe_file_may_build_on_a_built_in_recipe(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [grpo, _self_]\noptimizer:\n  lr: 5.0e-5\nmethod:\n  clip_high: 0.28\n"
    )
    config = compose_with(str(file), "training.steps=9")
    assert config.optimizer.lr == 5e-5
    assert config.method.clip_high == 0.28
    assert config.training.steps == 9
    assert config.method.name == "grpo" and config.rollout.samples == 8  # of grpo
    assert config.name.startswith("mine-")


def test_a_recipe_file_whose_method_is_a_text_is_told_to_make_it_a_section(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [grpo, _self_]\nmethod: mine.py:Mine\n")
    assert "method: {name: mine.py:Mine}" in error_of(recipe=str(file))
    file.write_text("optimizer: {lr: 1}\n")
    assert "defaults: [grpo, _self_]" in error_of(recipe=str(file))


def test_recipes_shows_the_settings_of_a_file(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("# Mine.\ndefaults: [grpo, _self_]\nmethod: {clip_high: 0.28}\n")
    assert main(["recipes", str(file), "--all"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# Mine.\n") and "method.clip_high=0.28 " in printed
    assert main(["recipes", str(tmp_path / "other.yaml")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_params(recipe_names()))
def test_every_recipe_composes_passes_its_check_and_is_shown_with_every_setting(
    name, capsys, tmp_path
):
    config = compose_with(name, "optimizer.lr=1.5e-7", "optimizer.skip_grad_norm=0.5", "name=x")
    find_method(config.method.name)(config).check()
    assert read_back(config, tmp_path) == config, (
        "the resolved configuration must compose to itself"
    )
    assert main(["recipes", name, "--all"]) == 0
    shown = capsys.readouterr().out
    for key in keys_of(config):
        assert f"{key}=" in shown, key


def keys_of(section, prefix=""):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def read_back(config: Config, folder: Path) -> Config:
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    return compose(str(file), [], find_settings)


PLAIN = compose_with("grpo")


@pytest.mark.slow
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.text(
        st.characters(
            codec="utf-8", exclude_characters="$?", exclude_categories=["Cc", "Cs", "Zl", "Zp"]
        ),
        min_size=1,
        max_size=12,
    ),
    st.floats(1e-12, 1.0),
    st.none() | st.floats(0, 1),
    st.sampled_from(
        [
            "null",
            "1e3",
            "true",
            "0x1F",
            "01",
            "2001-01-01",
            "a: b",
            "- x",
            "#",
            "~",
            " pad ",
            "ä\nb",
        ]
    ),
)
def test_any_value_survives_config_yaml(tmp_path, name, lr, stop_at, train):
    config = copy.deepcopy(PLAIN)
    config.name = name
    config.optimizer.lr = lr
    config.training.stop_at = stop_at
    config.data.train = train
    assert read_back(config, tmp_path) == config


@pytest.mark.slow
def test_the_default_name_depends_on_the_settings_but_not_on_the_folder():
    assert compose_with().name == compose_with("grpo", "runs=elsewhere").name
    assert compose_with().name != compose_with("grpo", "seed=1").name
    assert compose_with().name.startswith("grpo-")
    assert compose_with().name.endswith(fingerprint(compose_with())[:8])


def test_differences_are_dotted_keys():
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert differences(old, {"a": {"b": 1, "c": 5}, "e": 1}) == ["a.c", "d", "e"]


# ---- the command line


def test_show_prints_the_resolved_configuration_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "grpo", *REQUIRED, "seed=3", "--show"]) == 0
    assert "seed: 3" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_input_through_the_real_command(tmp_path):
    done = postgrad("train", "grpo", *REQUIRED, "optimizer.lrr=1", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == LOADING
    assert done.stderr == "postgrad: unknown key optimizer.lrr; did you mean optimizer.lr?\n"
    assert list(tmp_path.iterdir()) == []


def test_help_imports_few_modules_and_no_torch(tmp_path):
    """The time to print the help is the time of its imports, so the imports are counted."""
    script = """
import sys
before = set(sys.modules)
from postgrad.cli.main import COMMANDS, main
assert main(["--help"]) == 0
imported = set(sys.modules) - before
assert not imported & {"torch", "transformers", "yaml", "numpy"}, imported
assert len(imported) < 100, imported
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "usage: postgrad COMMAND" in done.stdout


@pytest.mark.slow
def test_composing_imports_no_torch():
    script = "import sys, postgrad.config.compose; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=600).returncode == 0


@pytest.mark.slow
def test_a_setting_that_is_a_dictionary_takes_any_names():
    config = compose_with(
        "grpo", "data.template_options.enable_thinking=false", "data.template_options.effort=low"
    )
    assert config.data.template_options == {"enable_thinking": False, "effort": "low"}
    assert compose_with().data.template_options == {}  # the default is not shared
    large = compose_with("grpo", "data.template_options.budget=5e6")  # a user's own number
    assert large.data.template_options == {"budget": 5e6}
    assert "unknown key data.templat_options.x" in error_of("data.templat_options.x=1")
    assert "data.template_options" in error_of("data.template_options=3")


@pytest.mark.slow
def test_a_dict_replaces_the_dict_of_the_recipe_and_a_section_is_merged():
    weights = compose_with("gdpo", "method.reward_weights={a: 1.0, b: 0.5}").method.reward_weights
    assert weights == {"a": 1.0, "b": 0.5}
    one_more = compose_with("gdpo", "method.reward_weights.a=1.0").method.reward_weights
    assert one_more == {"answer": 1.0, "format": 1.0, "a": 1.0}
    section = compose_with("grpo", "optimizer.lr=0.5", "optimizer={weight_decay: 0.25}").optimizer
    assert (section.lr, section.weight_decay) == (0.5, 0.25)


def test_an_address_needs_no_quotes():
    for override in (
        "rollout.url=http://host:8000/v1#org/model",
        "rollout.url='http://host:8000/v1#org/model'",
    ):
        config = compose_with("grpo", "rollout.engine=http", override)
        assert config.rollout.url == "http://host:8000/v1#org/model"


@tabled("text, trackers")
def test_track_is_one_tracker_or_several(text, trackers):
    config = compose("grpo", [*REQUIRED, f"track={text}"], find_settings)
    assert config.track == trackers
    assert from_yaml(to_yaml(config), find_settings).track == trackers


@pytest.mark.parametrize(("text", "trackers"), [("''", []), ("wandb", ["wandb"])])
def test_config_yaml_with_a_text_as_tracker_is_read(text, trackers):
    """Versions that knew one tracker only stored a text."""
    old = to_yaml(compose("grpo", REQUIRED, find_settings)).replace("track: []", f"track: {text}")
    assert f"track: {text}\n" in old
    assert from_yaml(old, find_settings).track == trackers


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("name=${oc.env:HOME}", "${oc.env:HOME}"),
        ("data.train=${env:X}/a.jsonl", "${env:X}/a.jsonl"),
        ("data.train='a, b'", "a, b"),
        ('data.train="null"', "null"),
        ("data.train=010", "010"),
        ("data.train=it's", "it's"),
        ("agent='python a.py' --n='3'", "'python a.py' --n='3'"),
        ("rollout.stop=a,b", ["a", "b"]),
        ("rollout.stop=", []),
        ("rollout.stop=null", None),
        ("rollout.stop=[1, true]", ["1", "true"]),
        ('rollout.stop=["a,b", "]"]', ["a,b", "]"]),
        ("optimizer.betas=0.8, 1e-1", [0.8, 0.1]),
        ("training.validation_temperature=null", None),
        ("method.dual_clip=inf", float("inf")),
        ("training.steps=1_000", 1000),
        ("method.loss_options={critic: 2}", {"critic": 2.0}),
        ("method.loss_options={critic:2,verifier:1}", {"critic": 2.0, "verifier": 1.0}),
        (
            "data.template_options={a: yes, b: [1, x], c: 1e-3}",
            {"a": "yes", "b": [1, "x"], "c": 1e-3},
        ),
        ("data.template_options.a=[1,x]", [1, "x"]),
        ("data.template_options.a.b=1.0", 1.0),
    ],
)
def test_the_type_of_a_setting_decides_how_its_text_is_read(override, value):
    config: Any = compose_with("grpo", override)
    key = override.partition("=")[0].replace("agent", "agent.command")
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    assert config == value and type(config) is type(value)
    assert compose_with("grpo", (key, value)) == compose_with("grpo", override)


def test_nothing_of_the_environment_is_read(tmp_path, monkeypatch, capsys):
    """In an override, a stranger's recipe, a stored configuration and what import prints."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = "${oc.env:SECRET}", "${env:SECRET}"
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(f"defaults: [grpo, _self_]\nruns: {texts[0]}\ndata:\n  train: {texts[1]}\n")
    config = compose(str(recipe), ["model.path=tiny", f"reward.verifier={texts[0]}"], find_settings)
    assert (config.runs, config.data.train, config.reward.verifier) == (*texts, texts[0])
    stored = to_yaml(config)
    assert from_yaml(stored, find_settings) == config
    assert read_back(config, tmp_path) == config
    (tmp_path / "config.yaml").write_text(stored)
    assert read_stored_config(tmp_path)["data"]["train"] == texts[1]
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a "
        f"actor_rollout_ref.rollout.n=4 trainer.default_local_dir={texts[0]}"
    )
    assert main(["import", str(script)]) == 0
    printed = capsys.readouterr().out
    assert f"runs='{texts[0]}'" in printed and "needs a change" not in printed
    assert "hunter2" not in stored + printed


@tabled("text, part")
def test_a_recipe_file_that_would_be_misread_is_refused(text, part, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(str(file), ["model.path=tiny"], find_settings)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"3", b"\xff\xfe", b"[" * 3000, b"a: &a [*a]", b"a: [1"])
def test_a_recipe_file_without_settings_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    assert "mine.yaml" in error_of(recipe=str(file))


def test_recipes_may_build_on_files_beside_them(tmp_path):
    (tmp_path / "base.yaml").write_text("defaults: [sft, _self_]\nseed: 5\noptimizer: {lr: 0.5}\n")
    (tmp_path / "sft.yaml").write_text("defaults: [sft, _self_]\ntraining: {keep_checkpoints: 9}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [base]\noptimizer: {weight_decay: 1e-3}\n")
    config = compose_with(str(mine))
    assert (config.seed, config.optimizer.lr, config.optimizer.weight_decay) == (5, 0.5, 1e-3)
    assert config.training.keep_checkpoints == 9 and config.method.name == "sft"
    (tmp_path / "base.yaml").write_text("defaults: [mine, _self_]\n")
    assert "builds on itself" in error_of(recipe=str(mine))


def test_every_hint_of_a_value_or_a_recipe_exists():
    assert {hint.split()[0] for hint in foreign_names().recipes.values()} <= set(recipe_names())
    schemas = [(Config, ""), *((find_settings(name), "method.") for name in ("grpo", "ppo", "dpo"))]
    choices: dict[str, set[str]] = {}
    for schema, prefix in schemas:
        sections = [(schema, prefix)]
        for section, start in sections:
            for field in dataclasses.fields(section):
                if dataclasses.is_dataclass(field.type):
                    sections.append((field.type, f"{start}{field.name}."))  # type: ignore[arg-type]
                known = choices.setdefault(f"{start}{field.name}", set())
                known |= set(field.metadata.get("choices") or ())
    for key, hints in foreign_names().values.items():
        for foreign, hint in hints.items():
            assert hint.split()[0].rstrip(",") in choices[key], (key, foreign)


def error_without_defaults(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose("grpo", list(overrides), find_settings)
    return str(caught.value)


def test_every_hint_names_an_existing_setting():
    known = {*_all_keys(Config), "data.template_options.enable_thinking"}
    for method in ("grpo", "ppo", "dpo", "kto", "sft", "distill", "exgrpo", "classmate"):
        known |= {f"method.{key}" for key in _all_keys(find_settings(method))}
    hints = [*foreign_names().names.values(), *foreign_names().keys.values()]
    assert {hint.split()[0] for hint in hints} <= known
    own_names = {key.rpartition(".")[2] for key in _all_keys(Config)}
    assert not foreign_names().names.keys() & own_names, "a name that exists here needs no hint"


def test_all_missing_settings_are_named_in_one_error():
    assert "model.path=gpt2" in error_without_defaults("model=gpt2")
    message = error_without_defaults()
    assert "add model.path=VALUE" in message
    assert "add data.train=VALUE" in message


def test_help_of_a_command(capsys):
    assert main(["help", "train"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: postgrad train RECIPE") and "optimal_token_baseline" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_names_of_all_commands_stand_apart_from_their_descriptions(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in COMMANDS:
        assert any(line.startswith(f"  {name} ") for line in lines), name


def test_the_package_is_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "postgrad", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


@pytest.mark.slow
def test_the_settings_of_a_recipe_are_listed_without_transformers():
    """It takes seconds to import, and a list of settings needs no model."""
    code = (
        "import sys; from postgrad.cli.main import main; main(['recipes', 'grpo']); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
