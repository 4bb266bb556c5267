"""`postgrad eval` from the command line: what it writes, that it writes the same again, and what it refuses."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from world import config_of, run_words, tree

from postgrad.cli.main import main
from postgrad.data.problems import load_problems
from postgrad.data.render import Prompts
from postgrad.evaluation.folder import opened, stored_settings
from postgrad.evaluation.model import find_model, weights_fingerprint
from postgrad.evaluation.settings import EvalConfig, full_key, read_settings
from postgrad.model.load import load_tokenizer
from postgrad.rollout.engine import trajectory_seed
from postgrad.training.driver import train
from postgrad.training.report import Reporter

SETS = "data=one=arithmetic:1:digits:train,two=arithmetic:2:digits:test"
SMALL = ("n=4", "limit=10", "max_response_tokens=5", "threads=1", "device=cpu")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    """Right for about half of what the tiny model writes; the pause lets a test kill a process between two batches."""
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text(
        "import time\n\n\ndef odd(response, problem):\n    time.sleep(0.003)\n    last = response[-1:]\n"
        "    return {'score': float(last in '13579+-'), 'format': float(response[:1] in '02468')}\n\n\n"
        "def broken(response, problem):\n    raise ValueError('no')\n"
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
    """An evaluation that nobody disturbed, three problems a batch."""
    out = tmp_path_factory.mktemp("eval") / "reference"
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 0
    return out


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steady(folder: Path) -> dict:
    """The summary without what the clock says."""
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary.pop("speed")) == {"tokens", "seconds", "tokens_per_second"}
    return summary


def test_one_line_a_response(reference, tiny):
    rows = lines(reference / "one.jsonl")
    problems = load_problems("arithmetic:1:digits:train")[:10]
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (p.uid, i) for p in problems for i in range(4)
    ]
    tokenizer = load_tokenizer(config_of("grpo", tiny).model)
    for row, problem in zip(rows[::4], problems, strict=True):
        assert (
            row["prompt"] == problem.messages[0]["content"]
            and row["ground_truth"] == problem.ground_truth
        )
        assert (
            row["seed"] == trajectory_seed(0, 0, problem.uid, 0)
            and row["length"] == len(row["tokens"]) <= 5
        )
        assert row["response"] == tokenizer.decode(row["tokens"], skip_special_tokens=True)
        assert row["finish"] == (
            "stop" if row["tokens"][-1] == tokenizer.eos_token_id else "length"
        )
        assert (
            row["right"] == (row["score"] == 1.0)
            and set(row["parts"]) == {"format"}
            and row["failure"] is None
        )
    assert len({json.dumps(row["tokens"]) for row in rows}) > 20, "samples must differ"


def test_the_summary_says_what_the_lines_say(reference):
    summary = steady(reference)
    assert set(summary["sets"]) == {"one", "two"} and "Wilson" in summary["interval"]
    for name, result in summary["sets"].items():
        rows = lines(reference / f"{name}.jsonl")
        share = sum(row["right"] for row in rows) / len(rows)
        assert 0.1 < share < 0.9 and result["avg"]["value"] == pytest.approx(share)
        solved = {row["uid"] for row in rows if row["right"]}
        assert result["pass"]["4"]["value"] == len(solved) / 10 and list(result["pass"]) == [
            "1",
            "2",
            "4",
        ]
        assert sum(result["classes"].values()) == 40 and result["maj"] is None, (
            "a verifier of one's own names no answers"
        )
        assert result["truncated"] == sum(row["finish"] == "length" for row in rows) / 40
    report = (reference / "report.md").read_text()
    assert "| one | 10 |" in report and "temperature 1" in report and "tok/s" not in report


@pytest.mark.parametrize("more", [("batch=1",), ("batch=7", "max_rows=3"), ("max_rows=64",)])
def test_the_same_bytes_whatever_the_batch(reference, tiny, verifier, tmp_path, more):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", *more)) == 0
    for name in ("one.jsonl", "two.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (reference / name).read_bytes()
    assert steady(tmp_path / "out")["sets"] == steady(reference)["sets"]


def test_another_seed_gives_other_answers(reference, tiny, verifier, tmp_path):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", "seed=1")) == 0
    assert (tmp_path / "out" / "one.jsonl").read_bytes() != (reference / "one.jsonl").read_bytes()


@pytest.mark.slow
def test_in_a_process_of_its_own_it_is_the_same(reference, tiny, verifier, tmp_path):
    assert main(overrides_for(tiny, verifier, tmp_path / "out", "cluster.backend=process")) == 0
    assert (tmp_path / "out" / "one.jsonl").read_bytes() == (reference / "one.jsonl").read_bytes()


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "world",
            "postgrad.evaluation.run",
            "postgrad.cluster.host",
            "hydra",
            "transformers.models.qwen3",
        ]
    )
    return context


@pytest.mark.slow
def test_kill_9_and_the_same_command(server, reference, tiny, verifier, tmp_path):
    """Killed in the first set, in the second, and while it loads: in the end every byte is as if nothing had happened."""
    out = tmp_path / "out"
    overrides = overrides_for(tiny, verifier, out, "batch=3")
    size = {name: (reference / f"{name}.jsonl").stat().st_size for name in ("one", "two")}

    def written(name: str) -> int:
        file = out / f"{name}.jsonl"
        return file.stat().st_size if file.is_file() else 0

    moments = (
        lambda: (out / "settings.json").is_file(),
        lambda: written("one") > size["one"] // 3,
        lambda: written("two") > 0,
    )
    killed = 0
    for moment in moments:
        process = server.Process(target=run_words, args=(overrides, str(tmp_path / "output.txt")))
        process.start()
        limit = time.monotonic() + 60
        while process.is_alive() and not moment():
            assert time.monotonic() < limit, "the evaluation hangs"
        killed += process.is_alive()
        for kill in (lambda pid=process.pid: os.killpg(pid, signal.SIGKILL), process.kill):
            try:
                kill()
            except ProcessLookupError:
                continue
        process.join(60)
        assert not (out / "summary.json").is_file()
    assert killed == 3, (tmp_path / "output.txt").read_text()
    assert main(overrides) == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in reference.iterdir()}
    for name in ("one.jsonl", "two.jsonl", "report.md", "settings.json"):
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert steady(out) == steady(reference)


@pytest.mark.parametrize(("cut", "left"), [(1, 0), (200, 0), (0.84, 6), (-40, 9)])
def test_a_file_cut_anywhere_is_mended(reference, tiny, verifier, tmp_path, cut, left, capsys):
    """Of three problems a batch only whole batches stay: 0.84 of the file are eight problems and a bit."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("settings.json", "one.jsonl", "two.jsonl"):
        (out / name).write_bytes((reference / name).read_bytes())
    whole = (reference / "two.jsonl").read_bytes()
    (out / "two.jsonl").write_bytes(
        whole[: round(cut * len(whole)) if isinstance(cut, float) else cut]
    )
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 0
    assert (out / "two.jsonl").read_bytes() == whole and steady(out) == steady(reference)
    said = capsys.readouterr().out
    assert (
        (f"two: {left} of 10 problems are answered already" in said)
        if left
        else "two: 0 of" not in said
    )


def test_a_folder_that_a_kill_left_before_its_settings_were_there_is_taken(tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / ".settings.json.partial").write_text('{"half')
    assert stored_settings(tmp_path) is None
    with opened(tmp_path, {"seed": 1}):
        assert stored_settings(tmp_path) == {"seed": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "settings.json"]


def test_a_finished_evaluation_is_only_summed_up_again(
    reference, tiny, verifier, capsys, monkeypatch
):
    before = tree(reference)
    monkeypatch.setattr(
        "postgrad.evaluation.run.place_engine",
        lambda config: pytest.fail("the model is not needed"),
    )
    assert main(overrides_for(tiny, verifier, reference, "batch=3")) == 0
    assert tree(reference) == before and "avg@4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["temperature=0.5"],
            "holds an evaluation with other settings (rollout.temperature was 1.0, now 0.5); choose another out=",
        ),
        (["batch=3", "seed=2", "top_p=0.9"], "(rollout.top_p was 1.0, now 0.9, and 1 more)"),
        (["limit=9"], "data.limit was 10, now 9"),
    ],
)
def test_settings_do_not_mix(reference, tiny, verifier, capsys, more, said):
    before = tree(reference)
    assert main(overrides_for(tiny, verifier, reference, *more)) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and tree(reference) == before


def test_weights_that_changed_do_not_mix(reference, tiny, verifier, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    model = tmp_path / "model"
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    same = weights_fingerprint(str(model), 0)
    assert same == weights_fingerprint(str(tiny), 0)
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: weight * 1.001 for name, weight in weights.items()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    assert weights_fingerprint(str(model), 0) != same


def test_workers_and_place_may_change(reference, tiny, verifier, tmp_path):
    assert (
        main(overrides_for(tiny, verifier, reference, "batch=3", "workers=2", "cluster.wait_s=99"))
        == 0
    )


def test_a_file_of_other_answers_is_refused(reference, tiny, verifier, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_bytes((reference / "settings.json").read_bytes())
    (out / "one.jsonl").write_bytes((reference / "two.jsonl").read_bytes())
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 2
    assert "one.jsonl: line 1 is not the answer that belongs there" in capsys.readouterr().err
    (out / "one.jsonl").write_text("{broken\n" + (reference / "one.jsonl").read_text())
    assert main(overrides_for(tiny, verifier, out, "batch=3")) == 2
    assert "one.jsonl: line 1 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=missing.jsonl"], "missing.jsonl: no such file"),
        (
            ["data=arithmetic:1", "tempreture=1"],
            "unknown key tempreture; did you mean rollout.temperature?",
        ),
        (
            ["data=arithmetic:1", "rollout.temprature=1"],
            "unknown key rollout.temprature; did you mean rollout.temperature?",
        ),
        (["data=arithmetic:1", "temperature=-1"], "rollout.temperature=-1.0 is out of range"),
        (["data=arithmetic:1", "n=4", "greedy=true"], "n=4 with temperature=0"),
        (["data=arithmetic:1", "n=many"], "rollout.samples"),
        (["data=arithmetic:1", "engine=magic"], "rollout.engine=magic"),
        (
            ["data=arithmetic:1", "max_response_tokens=600"],
            "leaves no room for a prompt in the context of 512",
        ),
        (["data=arithmetic:1", "max_prompt_tokens=2"], "set data.max_prompt_tokens="),
        (
            ["data=arithmetic:1", "verifier=gsm9k"],
            "reward.verifier=gsm9k is not a verifier; did you mean gsm8k?",
        ),
        (["data=arithmetic:1", "template=chat"], "has no chat template"),
        (["data=arithmetic:1", "model.path=x"], "the model is the first word"),
        (
            ["data=arithmetic:1", "out=plain.txt"],
            "out=plain.txt is there already and is no evaluation",
        ),
        (["data=arithmetic:1,arithmetic:1"], "two data sets are called arithmetic-1"),
        (["data=arithmetic:1", "cluster.workers=4"], "cluster.workers is a setting of Ray"),
        (["data=arithmetic:1", "model.lora.rank=4"], "model.lora.rank=4 is for training runs"),
        (["data=arithmetic:1", "rollout.staleness=2"], "rollout.staleness=2 is for training runs"),
        (
            ["data=arithmetic:1", "reward.judge.monitor=tiny"],
            "reward.judge.monitor=tiny is for training runs",
        ),
        (
            ["data=arithmetic:1", "reward.judge.model=tiny"],
            "is asked by reward.verifier=llm_judge only",
        ),
        (["n=4"], "which problems? postgrad eval MODEL data=FILE"),
        (["data"], "expected key=value, got 'data.sets'"),
    ],
)
def test_wrong_input_is_said_in_one_line(overrides, said, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("mine")
    before = tree(tmp_path)
    assert main(["eval", str(tiny), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("postgrad: ") and error.count("\n") == 1 and said in error, error
    assert tree(tmp_path) == before and len(list(tmp_path.iterdir())) == 1, "nothing is written"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nothing", "no such folder"),
        ("no/such-model", "cannot be loaded"),
        ("x.gguf", "no such file"),
        ("data=y", "which model?"),
    ],
)
def test_an_unknown_model_is_said_in_one_line(model, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", model, "data=arithmetic:1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and not list(tmp_path.iterdir())


def test_a_verifier_that_fails_stops_the_evaluation(tiny, verifier, tmp_path, capsys):
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
    assert "100% of the responses could not be judged" in error and "error: ValueError: no" in error
    assert main([*overrides, "max_failure_rate=1"]) == 2, "other settings, so another folder"
    assert (
        main([*overrides[:-2], f"out={tmp_path}/all", *overrides[-2:], "max_failure_rate=1"]) == 0
    )
    result = steady(tmp_path / "all")["sets"]["arithmetic-1"]
    assert result["failures"] == {"error": 40} and result["avg"]["value"] == 0.0
    assert lines(tmp_path / "all" / "arithmetic-1.jsonl")[0]["failure"] == {
        "kind": "error",
        "reason": "ValueError: no",
    }


def test_one_evaluation_at_a_time_in_a_folder(reference, tiny, verifier, capsys):
    import fcntl

    with (reference / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(overrides_for(tiny, verifier, reference, "batch=3")) == 2
    assert "in use by another process" in capsys.readouterr().err


# ---- models


@pytest.fixture(scope="module")
def run_folder(tiny, tmp_path_factory) -> Path:
    """A short run with a template and a length of its own, and a validation."""
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


def test_a_run_folder_means_its_newest_checkpoint(run_folder, capsys):
    target = find_model(str(run_folder))
    assert (
        target.path == f"{run_folder}/checkpoints/step-4/policy" and target.label == "test-step-4"
    )
    for name in ("checkpoints/step-4", "checkpoints/step-4/policy", "checkpoints/latest"):
        assert find_model(f"{run_folder}/{name}") == target
    assert find_model(f"{run_folder}/checkpoints/step-2").label == "test-step-2"
    config = read_settings(target.path, ["data=arithmetic:1"], target.config)
    assert (config.rollout.max_response_tokens, config.data.template) == (6, "plain"), (
        "as it was trained"
    )
    assert (
        read_settings(
            target.path, ["data=x", "max_response_tokens=9"], target.config
        ).rollout.max_response_tokens
        == 9
    )
    assert (
        main(
            ["eval", str(run_folder), "data=arithmetic:1:digits:validation", "limit=2", "threads=1"]
        )
        == 0
    )
    (result,) = (run_folder / "eval").iterdir()
    assert result.name.startswith("test-step-4-") and (result / "report.md").is_file()


def test_a_run_without_a_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "checkpoints").mkdir()
    assert main(["eval", str(tmp_path), "data=arithmetic:1"]) == 2
    assert "is a run without a checkpoint" in capsys.readouterr().err


def test_validation_in_training_is_the_same_evaluation(run_folder, tmp_path):
    """The last validation's numbers are those of `postgrad eval` on the checkpoint, greedy and sampled."""
    last = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][
        -1
    ]
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
        assert (
            steady(tmp_path / name)["sets"]["arithmetic-1-digits-validation"]["score"]
            == last[f"validation/{name}"]
        )


def test_prompts_are_those_of_training(tiny, tmp_path):
    """Chat and plain: the tokens the engine gets are the ones Prompts gives the trainer."""
    from transformers import AutoTokenizer

    from postgrad.evaluation.plan import make_plan

    model = tmp_path / "chat"
    model.mkdir()
    for file in tiny.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}({{ m.content }}){% endfor %}{% if add_generation_prompt %}={% endif %}"
    tokenizer.save_pretrained(model)
    problems = load_problems("arithmetic:1")[:3]
    seen = {}
    for template in ("auto", "chat", "plain"):
        config = config_of("grpo", model, f"data.template={template}")
        training = Prompts(load_tokenizer(config.model), template)
        plan = make_plan(
            read_settings(str(model), ["data=arithmetic:1", f"template={template}"]),
            find_model(str(model)),
        )
        assert [plan.prompts.encode(p) for p in problems] == [training.encode(p) for p in problems]
        seen[template] = plan.prompts.decode(plan.prompts.encode(problems[0]))
    question = problems[0].messages[0]["content"]
    assert seen == {"auto": f"({question})=", "chat": f"({question})=", "plain": question}


# ---- settings


def test_keys_may_be_written_without_their_section():
    assert [
        full_key(key)
        for key in (
            "n",
            "data",
            "temperature",
            "verifier",
            "dtype",
            "limit",
            "out",
            "rollout.top_p",
            "odd",
        )
    ] == [
        *(
            "rollout.samples",
            "data.sets",
            "rollout.temperature",
            "reward.verifier",
            "model.dtype",
            "data.limit",
            "out",
        ),
        *("rollout.top_p", "odd"),
    ]


def test_temperature_follows_the_number_of_samples():
    def temperature(*overrides):
        return read_settings("m", ["data=x", *overrides]).rollout.temperature

    assert (
        temperature(),
        temperature("n=2"),
        temperature("temperature=0.6"),
        temperature("greedy=true"),
    ) == (0.0, 1.0, 0.6, 0.0)
    assert read_settings("m", ["data=a,b c=d,e"]).data.sets == "a,b c=d,e", (
        "paths are taken as they are"
    )


def test_every_key_of_its_own_is_read():
    """Sections are training's, whose keys have a test of their own; these are the ones that evaluation adds."""
    import postgrad.evaluation as room
    from postgrad.config.schema import ModelConfig, RewardConfig, RolloutConfig

    source = "".join(
        p.read_text() for p in Path(room.__file__).parent.glob("*.py") if p.name != "settings.py"
    )
    for section, base in (
        ("model", ModelConfig),
        ("rollout", RolloutConfig),
        ("reward", RewardConfig),
        ("data", None),
    ):
        kind = EvalConfig.__dataclass_fields__[section].type
        own = {f.name for f in dataclasses.fields(kind)} - (
            {f.name for f in dataclasses.fields(base)} if base else set()
        )
        for key in own:
            assert f"{section}.{key}" in source, f"nobody reads {section}.{key}"
        assert all(f.metadata.get("help") for f in dataclasses.fields(kind))
    assert "config.out" in source and "config.seed" in source
