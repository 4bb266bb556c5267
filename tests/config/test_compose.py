"""From a recipe and key=value words to a checked configuration, or one clear line and nothing written."""

import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world import postgrad, tree

from postgrad.cli.main import main
from postgrad.config.compose import (
    ELSEWHERE,
    _keys,
    compose,
    differences,
    fingerprint,
    recipe_names,
    to_yaml,
)
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.methods import find_method

NEEDED = ["model.path=tiny", "data.train=arithmetic:1"]


def find_settings(name: str) -> type:
    return find_method(name).Settings


def made(recipe: str = "grpo", *overrides: str) -> Config:
    return compose(recipe, [*NEEDED, *overrides], find_settings)


def refusal(*overrides: str, recipe: str = "grpo") -> str:
    """The one line of a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        compose(recipe, [*NEEDED, *overrides], find_settings)
    message = str(caught.value)
    assert "\n" not in message and 0 < len(message) < 400
    return message


def test_values_come_from_schema_recipe_and_words_in_this_order():
    config = made("grpo", "optimizer.lr=3e-4", "seed=7")
    assert config.optimizer.lr == 3e-4 and config.seed == 7  # words
    assert config.training.problems_per_step == 16 and config.method.name == "grpo"  # recipe
    assert config.training.checkpoint_every == 50 and config.method.kl_coef == 0.001  # schema
    assert config.optimizer.betas == [0.9, 0.999]


def test_later_words_win_and_a_plus_is_only_decoration():
    assert (
        made("grpo", "training.steps=3", "+training.steps=4", "++training.steps=5").training.steps
        == 5
    )


def test_two_configurations_do_not_share_their_lists():
    one, two = made(), made()
    one.optimizer.betas[0] = 0.5
    assert two.optimizer.betas == [0.9, 0.999]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("optimizer.lrr=1", ("unknown key optimizer.lrr", "did you mean optimizer.lr?")),
        ("training.lr=1", ("unknown key training.lr", "did you mean optimizer.lr?")),
        ("trainning.steps=1", ("unknown key trainning.steps", "did you mean training.steps?")),
        ("method.clip_hi=0.3", ("unknown key method.clip_hi", "did you mean method.clip_high?")),
        ("nonsense=1", ("unknown key nonsense",)),
        ("hydra.run.dir=x", ("unknown key hydra.run.dir",)),
        ("training.steps.extra=3", ("training.steps",)),
        ("training.steps=many", ("training.steps", "many")),
        ("training.steps=1.5", ("training.steps", "1.5")),
        ("training.steps=null", ("training.steps",)),
        ("data.shuffle=perhaps", ("data.shuffle", "perhaps")),
        ("optimizer.betas=0.9", ("optimizer.betas",)),
        ("method.clip_low=wide", ("method.clip_low", "wide")),
        (
            "method.aggregation=token-meen",
            ("method.aggregation=token-meen", "did you mean token-mean?"),
        ),
        ("training.steps=0", ("training.steps=0", "at least 1")),
        ("optimizer.lr=0", ("optimizer.lr=0", "above 0")),
        ("optimizer.lr=nan", ("optimizer.lr=nan", "above 0")),
        ("rollout.top_p=1.5", ("rollout.top_p=1.5", "at most 1")),
        ("method.dual_clip=1", ("method.dual_clip=1", "above 1")),
        ("training.stop_at=2", ("training.stop_at=2", "at most 1")),
        ("training=5", ("training is a section", "training.steps=")),
        ("optimizer.lr=1e-5,1e-6", ("optimizer.lr=1e-5,1e-6", "sweep")),
        ("training.steps=range(1,5)", ("training.steps", "sweep")),
        ("fast", ("expected key=value", "'fast'")),
        ("=5", ("expected key=value",)),
        ("~optimizer.lr=1", ("expected key=value", "null")),
        ("optimizer.lr=[1", ("optimizer.lr=[1",)),
        ("method=grpoo", ("method=grpoo", "did you mean grpo?")),
        ("method=no_such_package.module:Class", ("no_such_package",)),
        ("method=postgrad.methods.grpo:Grppo", ("Grppo", "did you mean Grpo?")),
        ("method=postgrad.types:Batch", ("Batch",)),
    ],
)
def test_a_wrong_word_is_refused_in_one_line_that_names_it(word, parts):
    message = refusal(word)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    "word",
    ["optimizer.betas=[0.9]", "optimizer.betas=[0.9,0.99,0.999]", "optimizer.betas=[0.9,1.5]"],
)
def test_betas_that_adam_cannot_use_are_refused(word):
    """By compose or by the method's check: both run before anything is written."""
    with pytest.raises(ConfigError, match=r"optimizer\.betas"):
        config = made("grpo", word)
        find_method("grpo")(config).check()


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.top_k=5", "rollout.top_k"),
        ("rollout.min_p=0.1", "rollout.min_p"),
        ("rollout.samples=1", "rollout.samples=1"),
        ("training.updates_per_step=17", "training.updates_per_step=17"),
        (
            "reward.judge.monitor=http://a/v1#m",
            "reward.judge.monitor=http://a/v1#m foretells scores from thoughts, and grpo knows none",
        ),
    ],
)
def test_impossible_combinations_are_refused_by_the_methods_check(word, part):
    with pytest.raises(ConfigError, match=part):
        find_method("grpo")(made("grpo", word)).check()


@pytest.mark.parametrize(
    ("recipe", "overrides", "part"),
    [
        (
            "grpo",
            "method.kl_coef=0.1",
            r"method\.kl_coef=0\.1 has no effect with method\.kl=none; add method\.kl=loss",
        ),
        (
            "grpo",
            "method.gamma=0.9",
            r"method\.gamma=0\.9: grpo gives a whole response one advantage",
        ),
        (
            "grpo",
            "method.reward_weights.answer=1.0",
            r"method\.reward_weights are read by gdpo alone",
        ),
        ("grpo", "method.rejection.token_k1=0.5_2.0", r"method\.rejection has no effect"),
        ("grpo", "method.correction_bound=3.0", r"method\.correction_bound has no effect"),
        ("grpo", "model.lora.alpha=16", r"model\.lora\.\* has no effect with model\.lora\.rank=0"),
        ("sft", "model.lora.dropout=0.1", r"model\.lora\.\* has no effect"),
        ("grpo", "optimizer.final_lr_ratio=0.1", r"optimizer\.final_lr_ratio=0\.1 has no effect"),
        ("grpo", "warmup.overrides=[training.steps=3]", r"warmup\.recipe"),
        ("grpo", "training.stop_at=0.5", r"training\.stop_at=0\.5 .* add data\.validation=FILE"),
        ("grpo", "training.stop_at=0.5 data.validation=a.jsonl", r"add training\.validate_every=N"),
        (
            "sft",
            "training.stop_at=0.5 data.validation=a.jsonl training.validate_every=1",
            r"add method\.validate_accuracy=true",
        ),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(recipe, overrides, part):
    with pytest.raises(ConfigError, match=part):
        find_method(recipe)(made(recipe, *overrides.split())).check()


@pytest.mark.parametrize(
    "overrides",
    [
        "method.kl_coef=0.1 method.kl=loss",
        "method.gamma=0.9 method.advantage=reinforce_pp",
        "method.rejection.token_k1=0.5_2.0 method.correction=token",
        "method.rejection.token_k1=0.5_2.0 cluster.backend=process cluster.engine_apart=true",
        "method.correction_bound=3.0 rollout.engine=http rollout.url=http://host:1/v1#m",
        "model.lora.alpha=16 model.lora.rank=8",
        "optimizer.final_lr_ratio=0.1 optimizer.schedule=cosine",
        "training.stop_at=0.5 data.validation=a.jsonl training.validate_every=1",
    ],
)
def test_the_same_settings_pass_where_they_are_read(overrides):
    find_method("grpo")(made("grpo", *overrides.split())).check()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("reward.verifier=my_rewards.py:brief(limit=100)", "my_rewards.py:brief(limit=100)"),
        (
            "reward.verifier=auto - 0.2*overlong(limit=8000, buffer=2000)",
            "auto - 0.2*overlong(limit=8000, buffer=2000)",
        ),
        ("reward.judge.model=servers.json#mate", "servers.json#mate"),
        ("data.validation=easy=a.jsonl,hard=b.jsonl", "easy=a.jsonl,hard=b.jsonl"),
        (
            "warmup.overrides=[training.steps=32,data.train=warmup.parquet]",
            ["training.steps=32", "data.train=warmup.parquet"],
        ),
        ("rollout.stop=[a#b, c]", ["a#b", "c"]),
    ],
)
def test_texts_that_hydra_cannot_read_need_no_quotes(word, value):
    section, key = word.partition("=")[0].rsplit(".", 1)
    config = made("grpo", word)
    for part in section.split("."):
        config = getattr(config, part)
    assert getattr(config, key) == value


def test_a_text_is_no_number_without_quotes_either():
    assert "training.steps" in refusal("training.steps=brief(limit=100)")
    assert "put the value into quotes" in refusal("warmup.overrides=[optimizer.betas=[1,2]]")


def test_sft_lets_filters_pass_because_it_does_not_price_samples():
    find_method("sft")(made("sft", "rollout.top_p=0.9", "rollout.samples=1")).check()


@pytest.mark.parametrize("key", ["model.path", "data.train"])
def test_a_setting_without_a_default_must_be_given(key):
    overrides = [word for word in NEEDED if not word.startswith(key)]
    with pytest.raises(ConfigError, match=f"{key} is not set; add {key}=VALUE"):
        compose("grpo", overrides, find_settings)


def test_an_unknown_recipe_names_the_nearest():
    assert "did you mean grpo?" in refusal(recipe="grppo")
    assert "no recipe file" in refusal(recipe="missing.yaml")
    assert "names no method" in refusal(recipe="base")


def test_another_method_may_be_put_into_a_recipe():
    config = made("sft", "method=grpo", "method.clip_high=0.28")
    assert config.method.name == "grpo" and config.method.clip_high == 0.28
    assert config.training.problems_per_step == 32  # of the sft recipe


def test_a_recipe_of_the_users_own_builds_on_a_built_in_one(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [grpo, _self_]\noptimizer:\n  lr: 5.0e-5\nmethod:\n  clip_high: 0.28\n"
    )
    config = made(str(file), "training.steps=9")
    assert (
        config.optimizer.lr == 5e-5
        and config.method.clip_high == 0.28
        and config.training.steps == 9
    )
    assert config.method.name == "grpo" and config.rollout.samples == 8  # of grpo
    assert config.name.startswith("mine-")


@pytest.mark.parametrize(
    "text",
    [
        "optimizer: {lrr: 1}",
        "training: 5",
        "method: {name: grpo, clip: 1}",
        "a: [1",
        "defaults: [no_such, _self_]",
    ],
)
def test_a_broken_recipe_file_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(("" if "defaults" in text else "defaults: [grpo, _self_]\n") + text + "\n")
    refusal(recipe=str(file))


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "base"])
def test_every_recipe_composes_passes_its_check_runs_again_and_is_shown_with_every_setting(
    name, capsys, tmp_path
):
    config = made(name, "optimizer.lr=1.5e-7", "optimizer.skip_grad_norm=0.5", "name=x")
    find_method(config.method.name)(config).check()
    assert again(config, tmp_path) == config, "the resolved configuration must compose to itself"
    assert main(["recipes", name]) == 0
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


def again(config: Config, folder: Path) -> Config:
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    return compose(str(file), [], find_settings)


PLAIN = made("grpo")


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
    st.floats(1e-12, 1e3),
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
def test_any_value_survives_the_way_through_config_yaml(tmp_path, name, lr, stop_at, train):
    config = copy.deepcopy(PLAIN)
    config.name, config.optimizer.lr, config.training.stop_at, config.data.train = (
        name,
        lr,
        stop_at,
        train,
    )
    assert again(config, tmp_path) == config


def test_the_name_follows_from_the_settings_but_not_from_the_place():
    assert made().name == made("grpo", "runs=elsewhere").name
    assert made().name != made("grpo", "seed=1").name
    assert made().name.startswith("grpo-") and made().name.endswith(fingerprint(made())[:8])


def test_differences_are_dotted_keys():
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert differences(old, {"a": {"b": 1, "c": 5}, "e": 1}) == ["a.c", "d", "e"]


# ---- through the command line


@pytest.mark.parametrize(
    "overrides",
    [
        ["train", "grpo", *NEEDED, "optimizer.lrr=1"],
        ["train", "grpo", "data.train=arithmetic:1"],
        ["train", "grpo", *NEEDED, "rollout.top_p=0.9"],
        ["train", "grpo", *NEEDED, "rollout.top_k=3"],
        ["train", "grpo", *NEEDED, "rollout.min_p=0.1"],
        ["train", "grppo", *NEEDED],
        ["train", "seed=1"],
        ["trian", "grpo"],
        ["recipes", "grppo"],
    ],
)
def test_wrong_input_is_one_line_exit_code_2_and_nothing_written(
    overrides, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    assert main(overrides) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("postgrad: ")
    assert tree(tmp_path) == {} and list(tmp_path.iterdir()) == []


def test_show_prints_the_resolved_configuration_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "grpo", *NEEDED, "seed=3", "--show"]) == 0
    assert "seed: 3" in capsys.readouterr().out and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_input_through_the_real_command(tmp_path):
    done = postgrad("train", "grpo", *NEEDED, "optimizer.lrr=1", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "postgrad: unknown key optimizer.lrr; did you mean optimizer.lr?\n"
    assert list(tmp_path.iterdir()) == []


def test_help_imports_few_modules_and_no_torch(tmp_path):
    """The time to print the help is the time of its imports, so the imports are counted."""
    script = """
import sys
before = set(sys.modules)
from postgrad.cli.main import main
assert main(["--help"]) == 0
imported = set(sys.modules) - before
assert not imported & {"torch", "transformers", "hydra", "numpy"}, imported
assert len(imported) < 100, imported
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "usage: postgrad COMMAND" in done.stdout


def test_composing_imports_no_torch():
    script = "import sys, postgrad.config.compose, postgrad.config.schema; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_names_of_your_own_in_a_setting_that_is_a_dictionary():
    config = made(
        "grpo", "data.template_options.enable_thinking=false", "data.template_options.effort=low"
    )
    assert config.data.template_options == {"enable_thinking": False, "effort": "low"}
    assert made().data.template_options == {}  # the default is not shared
    assert "unknown key data.templat_options.x" in refusal("data.templat_options.x=1")
    assert "data.template_options" in refusal("data.template_options=3")


def test_an_address_needs_no_quotes():
    for word in (
        "rollout.url=http://host:8000/v1#org/model",
        "rollout.url='http://host:8000/v1#org/model'",
    ):
        config = compose(
            "grpo",
            ["model.path=tiny", "data.train=arithmetic:1", word],
            lambda name: find_method(name).Settings,
        )
        assert config.rollout.url == "http://host:8000/v1#org/model"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("rollout.n=4", "unknown key rollout.n; the nearest here is rollout.samples"),
        ("num_generations=4", "unknown key num_generations; the nearest here is rollout.samples"),
        (
            "actor.optim.learning_rate=1",
            "unknown key actor.optim.learning_rate; the nearest here is optimizer.lr",
        ),
        ("epsilon=0.2", "unknown key epsilon; the nearest here is method.clip_low"),
        (
            "method.beta=0.1",
            "unknown key method.beta; the nearest here is method.kl_coef (of dpo: method.beta)",
        ),
        ("rollout.sampels=4", "unknown key rollout.sampels; did you mean rollout.samples?"),
        ("sed=4", "unknown key sed; did you mean seed?"),
        ("optimizer.zzz=1", "unknown key optimizer.zzz; known in optimizer: kind, lr, betas"),
        (
            "model=gpt2",
            "model is a section, not a value; set one of its keys, e.g. model.path=gpt2",
        ),
        ("--lr", "expected key=value, got '--lr'; settings have no dashes"),
    ],
)
def test_words_from_elsewhere_are_told_their_names_here(word, hint):
    assert hint in (refusal(word) if word != "model=gpt2" else refusal_alone(word))


def refusal_alone(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose("grpo", list(overrides), find_settings)
    return str(caught.value)


def test_every_name_that_a_hint_gives_is_a_setting():
    known = {*_keys(Config), *(f"method.{key}" for key in _keys(find_settings("grpo")))}
    assert {ours.split()[0] for ours in ELSEWHERE.values()} <= known
    assert not {
        name for name in ELSEWHERE if name in {key.rpartition(".")[2] for key in _keys(Config)}
    }, "our own word needs no entry"


def test_all_that_is_missing_is_said_at_once():
    message = refusal_alone()
    assert (
        message.startswith("model.path is not set; add model.path=VALUE (")
        and "; data.train is not set; add data.train=VALUE (" in message
    )


def test_the_list_of_recipes_keeps_names_and_texts_apart(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    starts = {len(line) - len(line[2:].partition("  ")[2].lstrip()) for line in lines}
    assert len(starts) == 1, "the texts stand in one column"


def test_help_takes_a_command(capsys):
    assert main(["help", "train"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: postgrad train RECIPE") and "optimal_token_baseline" in out
    assert max(map(len, out.splitlines())) <= 132
