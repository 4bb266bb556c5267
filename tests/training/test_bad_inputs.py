"""Bad inputs: one clear line, the right exit code, and nothing written or lost."""

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest
from tiny_runs import config_of, metrics_without_timing, overrides_of, toy_run, tree

from postgrad.cli.main import main
from postgrad.errors import ConfigError, RunError
from postgrad.training import checkpoint, run
from postgrad.training import open as run_opening
from postgrad.training.driver import train
from postgrad.training.log import RunLog
from postgrad.training.report import Reporter

SMALL = (
    *toy_run(steps=4, response_tokens=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working folder, with good and bad data files."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "wrong.jsonl").write_text('{"color": "blue", "size": 3}\n')
    (tmp_path / "cut.jsonl").write_text('{"prompt": "1+1="\n')
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "few.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{i}+1=", "answer": f"#### {i + 1}"}) + "\n" for i in range(3)
        )
    )
    (tmp_path / "strange.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "data_source": "no/such",
                    "prompt": [{"role": "user", "content": f"{i}="}],
                    "reward_model": {"ground_truth": "1"},
                }
            )
            + "\n"
            for i in range(9)
        )
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_and_fail(home, capsys, model, *overrides, recipe="grpo") -> tuple[int, str]:
    """Return the exit code and the line of an error; exit code 2 must write nothing."""
    before = tree(home)
    code = main(["train", recipe, *overrides_of(model, *SMALL, "runs=runs", *overrides)])
    err = capsys.readouterr().err
    assert err.startswith("postgrad: ") and err.count("\n") == 1, err
    if code == 2:
        assert tree(home) == before and not (home / "runs").exists(), (
            "exit code 2 means that nothing was written"
        )
    return code, err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.train=empt.jsonl"], ["empt.jsonl: no such file", "did you mean empty.jsonl?"]),
        (["data.train=/no/folder/x.parquet"], ["/no/folder/x.parquet", "no such file"]),
        (["data.train=wrong.jsonl"], ["wrong.jsonl: line 1", "color, size"]),
        (["data.train=cut.jsonl"], ["cut.jsonl: line 1", "not JSON"]),
        (["training.steps=abc"], ["training.steps=abc is not a whole number"]),
        (["optimizer.lr=fast"], ["optimizer.lr=fast is not a number"]),
        (["data.shuffle=perhaps"], ["data.shuffle=perhaps is neither true nor false"]),
        (["training.profile_steps=three"], ["training.profile_steps=three is not a whole number"]),
        (["training.steps=null"], ["training.steps=null: it needs a value"]),
        (["data.train=cut.parquet"], ["cut.parquet", "parquet"]),
        (["data.train=empty.jsonl"], ["empty.jsonl", "no rows"]),
        (["data.train=arithmetic:99"], ["level 99"]),
        (["data.validation=missing.jsonl"], ["missing.jsonl"]),
        (
            ["data.max_prompt_tokens=3"],
            ["longer than data.max_prompt_tokens=3", "data.overlong=drop"],
        ),
        (
            ["data.max_prompt_tokens=3", "data.overlong=drop"],
            ["longer than data.max_prompt_tokens=3"],
        ),
        (["data.train=strange.jsonl"], ["no/such", "reward.verifier"]),
        (["reward.verifier=exakt"], ["exakt", "did you mean exact?"]),
        (["reward.verifier=nothing.py:f"], ["nothing.py"]),
        (["reward.verifier=code"], ["reward.verifier=code", "data.train", "a list of tests"]),
        (
            ["reward.verifier=exact + exact.no"],
            ["reward.verifier=exact + exact.no", "no part no"],
        ),
        (["method.entropy_coef=1e30"], ["method.entropy_coef", "between -1000000 and 1000000"]),
        (["optimizer.lr=2"], ["optimizer.lr=2", "at most 1"]),
        (["model.path=/no/such/model"], ["model.path=/no/such/model"]),
        (["model.path=no-such-org/no-such-model"], ["model.path=no-such-org/no-such-model"]),
        (["model.device=cuda"], ["model.device=cuda"]),
        (["model.device=cudda"], ["model.device=cudda", "did you mean cuda?"]),
        (["model.device=npu"], ["model.device=npu", "torch_npu"]),
        (["data.template=chat"], ["chat template"]),
        (["cluster.engines=1"], ["cluster.engines=1", "cluster=process or ray"]),
        (
            ["training.profile_steps=[1]", "cluster.backend=process"],
            ["training.profile_steps", "cluster.backend=process"],
        ),
        (["training.profile_steps=[0]"], ["training.profile_steps", "at least 1"]),
        (
            ["cluster.offload=true"],
            ["cluster.offload=true", "use cluster=ray"],
        ),
        (
            ["rollout.max_logprob_difference=0.5"],
            ["rollout.max_logprob_difference=0.5 has no effect", "leave it at 0"],
        ),
        (
            ["reward.judge.highest=5"],
            ["reward.judge.highest=5 has no effect with reward.verifier=auto", "leave it at 10"],
        ),
        (
            ["data.max_prompt_tokens=3", "data.overlong=lef"],
            ["data.overlong=lef", "did you mean left?"],
        ),
        (
            ["data.train=few.jsonl", "training.problems_per_step=4"],
            ["training.problems_per_step=3"],
        ),
        (["training.problems_per_step=1000"], ["1000", "training.problems_per_step"]),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_wrong_input_exits_with_2_and_writes_nothing(home, capsys, tiny, overrides, parts):
    if "model.device=cuda" in overrides and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    code, line = train_and_fail(home, capsys, tiny, *overrides)
    assert code == 2, line
    for part in parts:
        assert part in line, line


def test_sft_refuses_a_problem_without_demonstration(home, capsys, tiny):
    (home / "bare.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": f"{i}="}],
                    "data_source": "x",
                    "reward_model": {"ground_truth": "1"},
                }
            )
            + "\n"
            for i in range(9)
        )
    )
    code, line = train_and_fail(home, capsys, tiny, "data.train=bare.jsonl", recipe="sft")
    assert code == 2 and "has no demonstration" in line


def test_dpo_refuses_pairs_that_are_too_long(home, capsys, tiny):
    rows = [{"prompt": f"{n}+1=", "chosen": "1", "rejected": "1" * n} for n in range(1, 10)]
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, line = train_and_fail(
        home, capsys, tiny, "data.train=pairs.jsonl", "rollout.max_response_tokens=7", recipe="dpo"
    )
    assert (
        code == 2
        and "3 of 9 responses are longer than rollout.max_response_tokens=7" in line
        and "data.overlong=drop" in line
    )


def test_response_limit_beyond_the_context_is_refused(home, capsys, tiny):
    code, line = train_and_fail(home, capsys, tiny, "rollout.max_response_tokens=600")
    assert code in (1, 2) and "context of 512" in line and "rollout.max_response_tokens" in line


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dpo", "reward_model"])
def test_only_the_rows_of_a_method_that_does_not_sample_must_fit_the_context(
    home, capsys, tiny, recipe
):
    def write_pairs(num_digits: int) -> None:
        rows = [
            {"prompt": f"{n}+1=", "chosen": "1" * num_digits, "rejected": "2"} for n in range(4)
        ]
        (home / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    settings = ("data.train=long.jsonl", "rollout.max_response_tokens=600")
    write_pairs(520)
    code, line = train_and_fail(home, capsys, tiny, *settings, recipe=recipe)
    assert code == 2 and "context of 512" in line and "data.overlong=drop" in line
    write_pairs(300)
    overrides = overrides_of(tiny, *SMALL, "runs=runs", "training.steps=1", *settings)
    assert main(["train", recipe, *overrides]) == 0


@pytest.mark.slow
def test_without_validation_data_the_response_limit_of_validation_is_not_checked(home, tiny):
    settings = ("rollout.max_response_tokens=600", "data.prompt_style=own", "training.epochs=0")
    overrides = overrides_of(tiny, *SMALL, "runs=runs", "training.steps=1", *settings)
    assert main(["train", "cs336_sft", *overrides]) == 0


@pytest.mark.slow
def test_each_row_must_fit_the_context_and_for_kto_each_prompt_with_each_response(
    home, capsys, tiny
):
    """A long prompt with a short response, and the other way round, in a context of 512."""
    lengths = [(400, 2), (2, 400)] * 2
    rows = [
        {"prompt": "1" * prompt + "=", "completion": "2" * response, "label": True}
        for prompt, response in lengths
    ]
    (home / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "data.train=mixed.jsonl",
        "data.max_prompt_tokens=500",
        "rollout.max_response_tokens=500",
    )
    code, line = train_and_fail(home, capsys, tiny, *settings, recipe="kto")
    assert code == 2 and "401 tokens" in line and "context of 512" in line
    overrides = overrides_of(tiny, *SMALL, "runs=runs", "training.steps=1", *settings)
    assert main(["train", "sft", *overrides]) == 0


def finished(model, home, *overrides) -> dict[str, bytes]:
    """Train a run to its end and return its files."""
    train(
        config_of(
            "grpo", model, *SMALL, f"runs={home}/runs", "training.checkpoint_every=2", *overrides
        ),
        Reporter(),
    )
    return tree(home / "runs")


@pytest.mark.slow
def test_run_folder_in_use_is_refused_and_unchanged(home, capsys, tiny):
    before = finished(tiny, home)
    with (home / "runs" / "test" / ".lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (
            main(
                [
                    "train",
                    "grpo",
                    *overrides_of(tiny, *SMALL, f"runs={home}/runs", "training.checkpoint_every=2"),
                ]
            )
            == 2
        )
    err = capsys.readouterr().err
    assert "is in use by another process" in err and err.count("\n") == 1
    assert tree(home / "runs") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "part"),
    [(False, "is in use by another process"), (True, "another process has created")],
)
def test_run_that_another_process_started_during_loading_is_unchanged(
    home, capsys, tiny, monkeypatch, over, part
):
    """Neither found a folder at first; the slower one must not write into the other's."""
    open_models = run_opening.open_models
    before = {}
    lock = []

    def slow_open_models(config):
        monkeypatch.undo()
        before.update(finished(tiny, home))
        if not over:
            lock.append((home / "runs" / "test" / ".lock").open("r+"))
            fcntl.flock(lock[0], fcntl.LOCK_EX)
        return open_models(config)

    monkeypatch.setattr(run_opening, "open_models", slow_open_models)
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides_of(tiny, *SMALL, f"runs={home}/runs", "training.checkpoint_every=2"),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1
    assert tree(home / "runs") == before
    for file in lock:
        file.close()


@pytest.mark.slow
def test_run_may_be_renamed_moved_and_extended(home, tiny):
    """The name, the folder and the number of steps do not change what it computes."""
    finished(tiny, home)
    (home / "moved").mkdir()
    (home / "runs" / "test").rename(home / "moved" / "other")
    more = ("training.steps=5", "training.checkpoint_every=5")
    train(config_of("grpo", tiny, *SMALL, f"runs={home}/moved", "name=other", *more), Reporter())
    train(config_of("grpo", tiny, *SMALL, f"runs={home}/whole", *more), Reporter())
    assert metrics_without_timing(home / "moved" / "other") == metrics_without_timing(
        home / "whole" / "test"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        "optimizer.schedule=linear",
        "optimizer.schedule=cosine",
        "optimizer.warmup_ratio=0.5",
        "rollout.staleness=1",
    ],
)
def test_run_whose_steps_depend_on_their_number_cannot_be_extended(tmp_path, word):
    overrides = (word, "cluster.backend=process", "cluster.engines=1", f"runs={tmp_path}")
    run.create_folder(config_of("grpo", Path("tiny"), *SMALL, *overrides))
    with pytest.raises(ConfigError, match=r"training\.steps was 4, now 9"):
        run.resume_config(config_of("grpo", Path("tiny"), *SMALL, *overrides, "training.steps=9"))


@pytest.mark.parametrize("limit", ["training.max_flat_steps=99", "reward.max_failure_rate=0.9"])
def test_limits_that_stop_a_run_may_change(tmp_path, limit):
    run.create_folder(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}"))
    run.resume_config(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}", limit))


def test_model_path_may_change_after_a_warmup_run_only(tmp_path):
    with_warmup = ("warmup.recipe=sft", f"runs={tmp_path}")
    run.create_folder(config_of("grpo", tmp_path / "here", *SMALL, *with_warmup))
    run.resume_config(config_of("grpo", tmp_path / "there", *SMALL, *with_warmup))
    run.create_folder(
        config_of("grpo", tmp_path / "here", *SMALL, "name=alone", f"runs={tmp_path}")
    )
    with pytest.raises(ConfigError, match=r"model\.path was .*here, now .*there"):
        run.resume_config(
            config_of("grpo", tmp_path / "there", *SMALL, "name=alone", f"runs={tmp_path}")
        )


@pytest.mark.parametrize("text", ["", "model: [", "a list", "model: 3\n", "\xff\xfe"])
def test_damaged_config_yaml_is_one_line(tmp_path, text):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "config.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"test/config\.yaml .*use another name=") as caught:
        run.resume_config(config_of("grpo", Path("tiny"), *SMALL, f"runs={tmp_path}"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("optimizer.lr=2e-2", "optimizer.lr was 0.01, now 0.02"),
        ("seed=5", "seed was 0, now 5"),
        ("method.aggregation=token-sum", "method.aggregation was token-mean, now token-sum"),
    ],
)
def test_changed_setting_of_an_existing_run_is_refused_with_both_values(
    home, capsys, tiny, word, part
):
    before = finished(tiny, home)
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides_of(
                    tiny, *SMALL, f"runs={home}/runs", "training.checkpoint_every=2", word
                ),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert part in err and "another name=" in err and err.count("\n") == 1
    assert tree(home / "runs") == before


@pytest.mark.slow
def test_settings_that_do_not_change_the_computation_may_change(home, tiny):
    finished(tiny, home)
    assert (
        main(
            [
                "train",
                "grpo",
                *overrides_of(
                    tiny,
                    *SMALL,
                    f"runs={home}/runs",
                    "training.checkpoint_every=1",
                    "training.token_budget=64",
                ),
            ]
        )
        == 0
    )


def test_run_folder_that_cannot_be_created_is_one_line(home, capsys, tiny):
    (home / "runs").write_text("a file, not a folder")
    assert main(["train", "grpo", *overrides_of(tiny, *SMALL, "runs=runs")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "runs" in err


# ---- a full disk


@pytest.mark.slow
def test_checkpoint_that_cannot_be_written_leaves_the_previous_one(home, tiny, monkeypatch, capsys):
    overrides = overrides_of(tiny, *SMALL, "runs=runs", "training.checkpoint_every=2")
    assert main(["train", "grpo", *overrides, "name=whole"]) == 0
    real = checkpoint.fsync_tree

    def full(folder):
        if folder.name == ".step-4.partial":
            raise OSError(28, "No space left on device")
        real(folder)

    monkeypatch.setattr(checkpoint, "fsync_tree", full)
    capsys.readouterr()
    assert main(["train", "grpo", *overrides]) == 1
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and "step-4 could not be written: No space left on device" in err
        and "earlier checkpoints are intact" in err
    )
    assert sorted(p.name for p in (home / "runs" / "test" / "checkpoints").iterdir()) == [
        "latest",
        "step-2",
    ], "the half-written one is gone"
    monkeypatch.setattr(checkpoint, "fsync_tree", real)
    assert main(["train", "grpo", *overrides]) == 0
    assert metrics_without_timing(home / "runs" / "test") == metrics_without_timing(
        home / "runs" / "whole"
    )


class DiskFiller(Reporter):
    """Fills the disk up to `free` bytes when step 2 is saved."""

    def __init__(self, folder, free: int) -> None:
        self.folder = folder
        self.free = free

    def saved(self, path, *_) -> None:
        if path.name == "step-2":
            space = os.statvfs(self.folder)
            with (self.folder / "ballast").open("wb") as file:
                file.write(b"\0" * max(0, space.f_bavail * space.f_frsize - self.free))


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "what"),
    [(0, "could not be written"), (64 * 1024, "checkpoints/step-4 could not be written")],
)
def test_full_disk_stops_the_run_and_the_same_command_continues_it(
    small_disk, tmp_path, tiny, free, what
):
    overrides = (*SMALL, "training.checkpoint_every=2", "training.steps=6")
    with pytest.raises(RunError, match=what) as caught:
        train(
            config_of("grpo", tiny, *overrides, f"runs={small_disk}"),
            DiskFiller(small_disk, free),
        )
    assert "No space left" in str(caught.value) and "\n" not in str(caught.value)
    checkpoints = small_disk / "test" / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == "step-2" and sorted(
        p.name for p in checkpoints.glob("*step*")
    ) == ["step-2"]
    (small_disk / "ballast").unlink()
    train(config_of("grpo", tiny, *overrides, f"runs={small_disk}"), Reporter())
    train(config_of("grpo", tiny, *overrides, f"runs={tmp_path}"), Reporter())
    assert metrics_without_timing(small_disk / "test") == metrics_without_timing(tmp_path / "test")
    final = "checkpoints/step-6/policy/model.safetensors"
    assert (small_disk / "test" / final).read_bytes() == (tmp_path / "test" / final).read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_metrics_that_cannot_be_written_are_a_run_error(tmp_path):
    log = RunLog(tmp_path, 0)
    log.file.close()
    log.file = open("/dev/full", "a")  # noqa: PTH123, SIM115
    with pytest.raises(RunError, match=r"metrics\.jsonl could not be written: No space left"):
        log.write(1, {"loss": 1.0})
    log.close()


def test_rollouts_that_the_disk_lost_are_a_run_error(tmp_path):
    log = RunLog(tmp_path, 0)
    log.unsynced = [tmp_path / "step-000001.parquet"]
    with pytest.raises(RunError, match=r"step-000001\.parquet could not be written: No such file"):
        log.sync()
    log.close()


def test_advantages_that_are_not_numbers_end_the_run(home, capsys, tiny):
    (home / "mine.py").write_text(
        "from postgrad.algorithms.advantages import Advantage\n"
        "def broken(rewards, groups):\n"
        "    return rewards * float('nan')\n"
        "BROKEN = Advantage(broken, reads=('rewards', 'groups'))\n"
    )
    code, err = train_and_fail(home, capsys, tiny, "method.advantage=mine.py:broken")
    assert code == 1 and "advantages after Grpo.estimate are not finite numbers" in err


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward_model"])
def test_a_temperature_for_given_responses_is_refused(home, capsys, tiny, recipe):
    """It would change their log-probs, and with them the loss."""
    (home / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    settings = ["rollout.temperature=0.3"]
    if recipe != "sft":
        settings.append("data.train=pairs.jsonl")
    code, err = train_and_fail(home, capsys, tiny, *settings, recipe=recipe)
    assert code == 2 and "rollout.temperature=0.3" in err


def test_a_name_that_is_no_folder_in_runs_is_refused(home, capsys, tiny):
    code, err = train_and_fail(home, capsys, tiny, "name=../elsewhere")
    assert code == 2 and "name=../elsewhere is outside of runs=runs" in err
    code, err = train_and_fail(home, capsys, tiny, f"name={'a' * 300}")
    assert code == 2 and "has 300 characters" in err


class Notes(Reporter):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("max_refills", [0, 2])
def test_the_first_responses_without_a_score_are_reported(tmp_path, tiny, max_refills):
    """Their share is that of all responses, also of those that refills replace."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def sometimes(response, problem):\n"
        f"    open({str(tmp_path / 'calls')!r}, 'a').write('.')\n"
        "    if sum(map(ord, response)) % 4 == 0:\n"
        "        raise ValueError('one in four')\n"
        "    return float(sum(map(ord, response)) % 5 == 0)\n"
    )
    settings = (
        f"reward.verifier={file}:sometimes",
        "reward.max_failure_rate=0.9",
        "training.steps=1",
        f"method.max_refills={max_refills}",
    )
    notes = Notes()
    train(config_of("grpo", tiny, *SMALL, *settings, f"runs={tmp_path}"), notes)
    (warning,) = [text for text in notes.texts if "could not be scored" in text]
    assert warning.startswith("warning: step 1: ") and "one in four" in warning
    assert f" of {len((tmp_path / 'calls').read_text())} responses" in warning


def test_pairs_with_equal_responses_are_reported(tmp_path, tiny):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    other = {"prompt": "1+2=", "chosen": "3", "rejected": "2"}
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in (row, other, other, other)))
    notes = Notes()
    train(config_of("dpo", tiny, *SMALL, f"data.train={file}", f"runs={tmp_path}"), notes)
    assert any("1 of 4 pairs of data.train have the same chosen" in text for text in notes.texts)
