"""`postgrad eval` from the command line: its files, continuation after a kill, refused input."""

import dataclasses
import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from jsonl import read_jsonl
from refused import refused
from tables import tabled
from tiny_runs import config_of, forkserver, run_words, tree

from postgrad.cli.main import main
from postgrad.data.encode.encoder import Encoder
from postgrad.data.problems import load_problems
from postgrad.evaluation import report, run
from postgrad.evaluation.folder import locked_folder, stored_settings
from postgrad.evaluation.model import find_model, weights_fingerprint
from postgrad.evaluation.settings import EvalConfig, full_key, read_settings
from postgrad.model.load.load import load_tokenizer
from postgrad.rollout.engine import trajectory_seed
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SETS = "data=one=arithmetic:1:digits:train,two=arithmetic:2:digits:test"
SMALL = ("n=4", "limit=10", "max_response_tokens=5", "threads=1", "device=cpu")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    """Returns a file with two verifiers; `odd` accepts about half of the tiny model's responses.

    Its pause lets a test kill the process between two batches.
    """
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text(
        """
import time


def odd(response, problem):
    time.sleep(0.003)
    has_format = response[:1] in '02468'
    return {'score': float(response[-1:] in '13579+-'), 'format': float(has_format)}


def broken(response, problem):
    raise ValueError('no')
"""
    )
    return str(file)


def overrides_for(model: Path, verifier: str, out: Path, *more: str) -> list[str]:
    return [
        "eval",
        str(model),
        SETS,
        *SMALL,
        f"verifier={verifier}:odd",
        f"out={out}",
        "workers=1",
        *more,
    ]


@pytest.fixture(scope="module")
def reference(tiny, verifier, tmp_path_factory) -> Path:
    """Returns the folder of an undisturbed evaluation with three problems per batch."""
    out = tmp_path_factory.mktemp("eval") / "reference"
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 0
    return out


def summary_without_speed(folder: Path) -> dict:
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary.pop("speed")) == {"tokens", "seconds", "tokens_per_second"}
    return summary


def test_result_file_has_one_line_per_response(reference, tiny):
    rows = read_jsonl(reference / "one.jsonl")
    problems = load_problems("arithmetic:1:digits:train")[:10]
    expected = [(p.uid, i) for p in problems for i in range(4)]
    assert [(row["uid"], row["sample"]) for row in rows] == expected
    tokenizer = load_tokenizer(config_of("grpo", tiny).model)
    for row, problem in zip(rows[::4], problems, strict=True):
        assert row["prompt"] == problem.messages[0]["content"]
        assert row["ground_truth"] == problem.ground_truth
        assert row["seed"] == trajectory_seed(0, 0, problem.uid, 0)
        assert row["length"] == len(row["tokens"]) <= 5
        assert row["response"] == tokenizer.decode(row["tokens"], skip_special_tokens=True)
        is_ended = row["tokens"][-1] == tokenizer.eos_token_id
        assert row["finish"] == ("stop" if is_ended else "length")
        assert row["right"] == (row["score"] == 1.0)
        assert set(row["parts"]) == {"format"}
        assert row["failure"] is None
    assert len({json.dumps(row["tokens"]) for row in rows}) > 20, "samples must differ"


def test_summary_agrees_with_the_result_files(reference):
    summary = summary_without_speed(reference)
    assert set(summary["sets"]) == {"one", "two"} and "Wilson" in summary["interval"]
    for name, result in summary["sets"].items():
        rows = read_jsonl(reference / f"{name}.jsonl")
        accuracy = sum(row["right"] for row in rows) / len(rows)
        assert 0.1 < accuracy < 0.9
        assert result["avg"]["value"] == pytest.approx(accuracy)
        solved = {row["uid"] for row in rows if row["right"]}
        assert result["pass"]["4"]["value"] == len(solved) / 10
        assert list(result["pass"]) == ["1", "2", "4"]
        assert sum(result["classes"].values()) == 40
        assert result["maj"] is None, "answers of a user's verifier cannot vote"
        assert result["truncated"] == sum(row["finish"] == "length" for row in rows) / 40
    text = (reference / "report.md").read_text()
    assert "| one | 10 |" in text and "temperature 1" in text and "tok/s" not in text
    assert "| score |" not in text, "it equals avg@4 where scores are 0 or 1"


def test_report_has_the_mean_score_where_scores_are_not_0_or_1(reference):
    summary = json.loads((reference / "summary.json").read_text())
    summary["sets"]["two"]["score"] = 0.25
    text = report.markdown(summary)
    assert "| avg@4 | score |" in text and "| 0.250 |" in text
    assert "score is at least 1 (pass_score)" in text
    assert " 0.250 " in report.table(summary)


@pytest.mark.slow
@pytest.mark.parametrize("more", [("batch=1",), ("batch=7", "max_rows=3"), ("max_rows=64",)])
def test_results_do_not_depend_on_the_batch_size(reference, tiny, verifier, tmp_path, more):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", *more)) == 0
    for name in ("one.jsonl", "two.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (reference / name).read_bytes()
    sets = summary_without_speed(tmp_path / "out")["sets"]
    assert sets == summary_without_speed(reference)["sets"]


@pytest.mark.slow
def test_another_seed_gives_other_responses(reference, tiny, verifier, tmp_path):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", "seed=1")) == 0
    assert (tmp_path / "out" / "one.jsonl").read_bytes() != (reference / "one.jsonl").read_bytes()


@pytest.mark.slow
def test_child_process_gives_the_same_results(reference, tiny, verifier, tmp_path):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", "cluster.backend=process")) == 0
    assert (tmp_path / "out" / "one.jsonl").read_bytes() == (reference / "one.jsonl").read_bytes()


def run_without_summary(overrides: list[str], output: str) -> None:
    """Runs the command in a forked process, which waits for its end before the summary."""
    run._write_summary = lambda *_: time.sleep(600)
    run_words(overrides, output)


@pytest.mark.slow
def test_evaluation_continues_after_kill_9(reference, tiny, verifier, tmp_path):
    """Killed after loading, in the first set and in the second; the files are equal in the end."""
    out = tmp_path / "out"
    overrides = overrides_for(tiny, verifier, out, "batch=3")
    sizes = {name: (reference / f"{name}.jsonl").stat().st_size for name in ("one", "two")}

    def written_bytes(name: str) -> int:
        file = out / f"{name}.jsonl"
        return file.stat().st_size if file.is_file() else 0

    kill_conditions = (
        lambda: (out / "settings.json").is_file(),
        lambda: written_bytes("one") > sizes["one"] // 3,
        lambda: written_bytes("two") > 0,
    )
    num_killed = 0
    for should_kill in kill_conditions:
        process = forkserver().Process(
            target=run_without_summary, args=(overrides, str(tmp_path / "output.txt"))
        )
        process.start()
        limit = time.monotonic() + 300
        while process.is_alive() and not should_kill():
            assert time.monotonic() < limit, "the evaluation hangs"
            time.sleep(0.001)
        num_killed += process.is_alive()
        for kill in (lambda pid=process.pid: os.killpg(pid, signal.SIGKILL), process.kill):
            with suppress(ProcessLookupError):
                kill()
        process.join(60)
        assert not (out / "summary.json").is_file()
    assert num_killed == 3, (tmp_path / "output.txt").read_text()
    assert main(overrides) == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in reference.iterdir()}
    for name in ("one.jsonl", "two.jsonl", "report.md", "settings.json"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert summary_without_speed(out) == summary_without_speed(reference)


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "num_kept"), [(1, 0), (200, 0), (0.84, 6), (-40, 9)])
def test_truncated_result_file_is_completed(
    reference, tiny, verifier, tmp_path, cut, num_kept, capsys
):
    """Only complete batches of three problems are kept; 0.84 of the file is eight problems."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("settings.json", "one.jsonl", "two.jsonl"):
        (out / name).write_bytes((reference / name).read_bytes())
    complete = (reference / "two.jsonl").read_bytes()
    end = round(cut * len(complete)) if isinstance(cut, float) else cut
    (out / "two.jsonl").write_bytes(complete[:end])
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 0
    assert (out / "two.jsonl").read_bytes() == complete
    assert summary_without_speed(out) == summary_without_speed(reference)
    assert (f"two: {num_kept} of 10" in capsys.readouterr().out) == (num_kept > 0)


def test_folder_without_settings_after_a_kill_is_used(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".settings.json.partial").write_text('{"half')
    assert stored_settings(tmp_path) is None
    with locked_folder(tmp_path, {"seed": 1}):
        assert stored_settings(tmp_path) == {"seed": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "settings.json"]


def test_finished_evaluation_loads_no_model(reference, tiny, verifier, capsys, monkeypatch):
    before = tree(reference)
    monkeypatch.setattr(
        "postgrad.evaluation.run.open_engine", lambda config: pytest.fail("the model is not needed")
    )
    assert main(overrides_for(tiny, verifier, reference, "batch=3")) == 0
    assert tree(reference) == before and "avg@4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["temperature=0.5"], "rollout.temperature was 1.0, now 0.5"),
        (["batch=3", "seed=2", "top_p=0.9"], "rollout.top_p was 1.0, now 0.9, and 1 more"),
        (["limit=9"], "data.limit was 10, now 9"),
    ],
)
def test_other_settings_are_refused(reference, tiny, verifier, capsys, more, message):
    before = tree(reference)
    assert main(overrides_for(tiny, verifier, reference, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and tree(reference) == before


def test_fingerprint_changes_with_the_weights(reference, tiny, verifier, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny, tmp_path / "model")
    same = weights_fingerprint(str(model), 0)
    assert same == weights_fingerprint(str(tiny), 0)
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: weight * 1.001 for name, weight in weights.items()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    assert weights_fingerprint(str(model), 0) != same


def test_fingerprint_is_that_of_earlier_evaluations(tmp_path):
    """Another value would start finished evaluations again; notes.md is no part of the model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.md").write_text("a model")
    (tmp_path / "model.safetensors").write_bytes(bytes(i % 251 for i in range(3 << 20)))
    assert weights_fingerprint(str(tmp_path), 0) == "f0bc7afeb3f04d94"


def test_fingerprint_changes_with_the_chat_template(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "model")
    same = weights_fingerprint(str(model), 0)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert weights_fingerprint(str(model), 0) != same


def test_workers_and_cluster_settings_may_change(reference, tiny, verifier, tmp_path):
    more = ("batch=3", "workers=2", "cluster.wait_s=99")
    assert main(overrides_for(tiny, verifier, reference, *more)) == 0


def test_result_file_of_another_set_is_refused(reference, tiny, verifier, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_bytes((reference / "settings.json").read_bytes())
    (out / "one.jsonl").write_bytes((reference / "two.jsonl").read_bytes())
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 2
    assert "one.jsonl: line 1" in capsys.readouterr().err
    (out / "one.jsonl").write_text("{broken\n" + (reference / "one.jsonl").read_text())
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 2
    assert "one.jsonl: line 1" in capsys.readouterr().err


@pytest.mark.slow
def test_failing_verifier_stops_the_evaluation(tiny, verifier, tmp_path, capsys):
    overrides = [
        "eval",
        str(tiny),
        "data=arithmetic:1",
        *SMALL,
        f"out={tmp_path}/out",
        f"verifier={verifier}:broken",
        "workers=1",
    ]
    assert main(overrides) == 1
    error = capsys.readouterr().err
    assert "reward.max_failure_rate" in error
    assert "ValueError: no" in error
    assert main([*overrides, "max_failure_rate=1"]) == 2, "other settings need another folder"
    everything = [f"out={tmp_path}/all", "max_failure_rate=1"]
    assert main([*overrides[:-3], *overrides[-2:], *everything]) == 0
    result = summary_without_speed(tmp_path / "all")["sets"]["arithmetic-1"]
    assert result["failures"] == {"error": 40} and result["avg"]["value"] == 0.0
    failure = read_jsonl(tmp_path / "all" / "arithmetic-1.jsonl")[0]["failure"]
    assert failure["kind"] == "error"
    assert re.fullmatch(r"ValueError: no \(\w+\.py, line \d+\)", failure["reason"])


@pytest.mark.slow
def test_data_without_truths_is_refused_before_the_model_is_loaded(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "postgrad.evaluation.run.open_engine", lambda config: pytest.fail("the model is not needed")
    )
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "2+2=", "data_source": "gsm8k"}\n')
    out = tmp_path / "out"
    assert main(["eval", str(tiny), f"data={data}", f"out={out}", "max_response_tokens=2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "gsm8k can score none of the 1 rows of rows" in line and not out.exists()


def test_locked_folder_is_refused(reference, tiny, verifier, capsys):
    import fcntl

    with (reference / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(overrides_for(tiny, verifier, reference, "batch=3")) == 2
    assert str(reference) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "code"), [(0, 0), (1, 2)])
def test_responses_that_another_process_wrote_while_the_model_loaded_are_kept(
    tiny, verifier, tmp_path, monkeypatch, seed, code
):
    out = tmp_path / "out"
    overrides = overrides_for(tiny, verifier, out, "limit=2")
    open_engine = run.open_engine

    def evaluate_first(config):
        monkeypatch.setattr(run, "open_engine", open_engine)
        assert main([*overrides, f"seed={seed}"]) == 0
        return open_engine(config)

    monkeypatch.setattr(run, "open_engine", evaluate_first)
    assert main(overrides) == code
    rows = read_jsonl(out / "one.jsonl")
    assert len(rows) == 2 * 4
    assert json.loads((out / "settings.json").read_text())["seed"] == seed


# ---- models


@pytest.fixture(scope="module")
def run_folder(tiny, tmp_path_factory) -> Path:
    """Returns a short run with its own template and response length, and a validation set."""
    runs = tmp_path_factory.mktemp("runs")
    overrides = (
        "training.steps=4",
        "training.checkpoint_every=2",
        "training.problems_per_step=4",
        "rollout.samples=2",
        f"runs={runs}",
    )
    more = (
        "data.validation=arithmetic:1:digits:validation",
        "rollout.max_response_tokens=6",
        "optimizer.lr=1e-2",
        "seed=3",
    )
    train(config_of("grpo", tiny, *overrides, *more, "training.max_flat_steps=99"), Reporter())
    return runs / "test"


@pytest.mark.slow
def test_run_folder_means_its_latest_checkpoint(run_folder, capsys):
    target = find_model(str(run_folder))
    assert target.path == f"{run_folder}/checkpoints/step-4/policy"
    assert target.label == "test-step-4"
    for name in ("checkpoints/step-4", "checkpoints/step-4/policy", "checkpoints/latest"):
        assert find_model(f"{run_folder}/{name}") == target
    assert find_model(f"{run_folder}/checkpoints/step-2").label == "test-step-2"
    config = read_settings(target.path, ["data=arithmetic:1"], target.config)
    assert config.rollout.max_response_tokens == 6, "the run's own setting"
    assert config.data.template == "plain"
    config = read_settings(target.path, ["data=x", "max_response_tokens=9"], target.config)
    assert config.rollout.max_response_tokens == 9
    overrides = ("data=arithmetic:1:digits:validation", "limit=2", "threads=1")
    assert main(["eval", str(run_folder), *overrides]) == 0
    (result,) = (run_folder / "eval").glob("test-step-4-*")
    assert (result / "report.md").is_file()


@pytest.mark.slow
def test_validation_in_training_equals_the_evaluation(run_folder, tmp_path):
    """`postgrad eval` on the last checkpoint gives the last validation's numbers."""
    last = read_jsonl(run_folder / "metrics.jsonl")[-1]
    common = [
        "eval",
        str(run_folder),
        "data=arithmetic:1:digits:validation",
        "threads=1",
        "seed=3",
        "dtype=float32",
    ]
    for name, more in (("accuracy", "greedy=true"), ("sampled_accuracy", "temperature=1")):
        assert main([*common, more, f"out={tmp_path}/{name}"]) == 0
        (result,) = summary_without_speed(tmp_path / name)["sets"].values()
        assert result["score"] == last[f"validation/{name}"]


@pytest.mark.slow
def test_prompts_equal_those_of_training(tiny, tmp_path):
    """For each template, the engine gets the tokens that training uses."""
    from transformers import AutoTokenizer

    from postgrad.evaluation.plan import make_plan

    model = shutil.copytree(tiny, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content }}){% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(model)
    problems = load_problems("arithmetic:1")[:3]
    texts = {}
    for template in ("auto", "chat", "plain"):
        config = config_of("grpo", model, f"data.template={template}")
        training = Encoder(load_tokenizer(config.model), template)
        plan = make_plan(
            read_settings(str(model), ["data=arithmetic:1", f"template={template}"]),
            find_model(str(model)),
        )
        assert [plan.encoder.prompt(p) for p in problems] == [training.prompt(p) for p in problems]
        texts[template] = plan.encoder.decode(plan.encoder.prompt(problems[0]))
    question = problems[0].messages[0]["content"]
    assert texts == {"auto": f"({question})=", "chat": f"({question})=", "plain": question}


# ---- settings


@tabled("key, expected")
def test_keys_without_section_are_completed(key, expected):
    assert full_key(key) == expected


@pytest.mark.parametrize(("overrides", "dtype"), [([], "bfloat16"), (["dtype=float32"], "float32")])
def test_a_run_is_evaluated_in_the_dtype_of_its_training(overrides, dtype):
    config = read_settings("policy", ["data=a.jsonl", *overrides], {"model": {"dtype": "bfloat16"}})
    assert config.model.dtype == dtype


@pytest.mark.slow
def test_default_temperature_depends_on_the_number_of_samples():
    def temperature(*overrides):
        return read_settings("m", ["data=x", *overrides]).rollout.temperature

    assert temperature() == 0.0
    assert temperature("n=2") == 1.0
    assert temperature("temperature=0.6") == 0.6
    assert temperature("greedy=true") == 0.0


def test_data_paths_are_not_parsed():
    assert read_settings("m", ["data=a,b c=d,e"]).data.sets == "a,b c=d,e"


def test_every_key_of_evaluation_is_read():
    """Checks the keys that evaluation adds to the sections of training."""
    import postgrad.evaluation
    from postgrad.config.schema import ModelConfig, RewardConfig, RolloutConfig
    from postgrad.data.encode import encoder  # reads the section data

    own = Path(postgrad.evaluation.__file__).parent.glob("*.py")
    files = [Path(encoder.__file__), *(file for file in own if file.name != "settings.py")]
    source = "".join(file.read_text() for file in files)
    for section, base in (
        ("model", ModelConfig),
        ("rollout", RolloutConfig),
        ("reward", RewardConfig),
        ("data", None),
    ):
        kind = EvalConfig.__dataclass_fields__[section].type
        inherited = {f.name for f in dataclasses.fields(base)} if base else set()
        for key in {f.name for f in dataclasses.fields(kind)} - inherited:
            assert f"{section}.{key}" in source, f"no code reads {section}.{key}"
        assert all(f.metadata.get("help") for f in dataclasses.fields(kind))
    assert "config.out" in source and "config.seed" in source


def test_a_data_file_without_its_key_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.touch()
    with refused("missing", "data"):
        read_settings("tiny", [str(file)])
