"""`cluster=ray` where it cannot work: one line, exit code 2, nothing written. And the words that lead there."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from world import config_of, overrides_of, toy_run, tree

from postgrad.cluster import ray_backend as ray_place
from postgrad.errors import ConfigError
from postgrad.training.prepare import check_cluster

WORDS = toy_run(steps=1)


def refused(tmp_path, tiny, *overrides: str, **environment: str) -> str:
    """The one line of a command that is refused."""
    runs = tmp_path / "runs"
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "train",
        "grpo",
        *overrides_of(tiny, *WORDS, f"runs={runs}", *overrides),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 2, done.stderr
    assert tree(runs) == {} if runs.exists() else True
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_bare_word_and_the_setting_are_one(tiny):
    for overrides in (
        ("cluster=ray",),
        ("cluster.backend=ray",),
        ("cluster=ray", "cluster.workers=3"),
    ):
        assert config_of("grpo", tiny, *overrides).cluster.backend == "ray"
    assert config_of(
        "grpo", tiny, "cluster=process", "cluster.engine_apart=true"
    ).cluster.engine_apart
    with pytest.raises(
        ConfigError, match=r"cluster\.backend=rray is not one of its values; did you mean ray\?"
    ):
        config_of("grpo", tiny, "cluster=rray")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.workers=2"],
            r"cluster\.workers is a setting of Ray, and cluster\.backend=local; add cluster=ray",
        ),
        (
            ["cluster.engines=2", "cluster=process"],
            r"cluster\.engines is a setting of Ray, and cluster\.backend=process",
        ),
        (["cluster.pools.critic=2"], r"cluster\.pools is a setting of Ray"),
        (["cluster.offload=true"], r"cluster\.offload is a setting of Ray"),
        (["cluster.address=a:1"], r"cluster\.address is a setting of Ray"),
        (
            ["cluster=ray", "cluster.pools.critic=0"],
            r"cluster\.pools\.critic=0 is out of range; it must be at least 1",
        ),
    ],
)
def test_settings_of_another_place_are_refused(overrides, message, tiny):
    with pytest.raises(ConfigError, match=message):
        check_cluster(config_of("grpo", tiny, *overrides).cluster)


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            "grpo",
            ["cluster=ray"],
            r"rollout\.staleness=1 .*cluster\.engine_apart=true",
        ),
        (
            "grpo",
            ["cluster=ray", "cluster.engines=1", "method.correction=none"],
            r"method\.correction=none",
        ),
        (
            "sft",
            ["cluster=ray", "cluster.engines=1"],
            r"rollout\.staleness=1",
        ),
    ],
)
def test_rollouts_ahead_are_refused_where_they_cannot_be_right(recipe, overrides, message, tiny):
    from postgrad.methods import find_method

    config = config_of(recipe, tiny, "rollout.staleness=1", *overrides)
    with pytest.raises(ConfigError, match=message):
        find_method(recipe)(config).check()


@pytest.mark.slow
def test_without_ray_the_package_is_named(tiny, tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ray.py").write_text("raise ImportError('hidden by the test')\n")
    path = os.pathsep.join([str(tmp_path / "hidden"), *sys.path])
    line = refused(tmp_path, tiny, "cluster=ray", PYTHONPATH=path)
    assert "cluster=ray needs one more package: pip install 'postgrad[cluster]'" in line


@pytest.mark.slow
def test_an_address_nobody_answers(tiny, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    line = refused(tmp_path, tiny, "cluster=ray", f"cluster.address=127.0.0.1:{port}")
    assert f"cluster.address=127.0.0.1:{port}: nobody answers there" in line


def test_an_address_that_is_none(tiny):
    from postgrad.cluster.ray_backend import _join

    for wrong in ("10.0.0.1", "here", "ray://x", ":"):
        with pytest.raises(ConfigError, match=rf"cluster\.address={wrong} is not host:port"):
            _join(None, wrong)


@pytest.mark.slow
def test_the_real_command_starts_clusters_trains_and_leaves_nothing_behind(tiny, tmp_path):
    """Two runs in one command: two clusters, one after the other."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")
    import psutil

    more = (
        "cluster=ray",
        "cluster.workers=1",
        f"runs={tmp_path}",
        "warmup.recipe=sft",
        'warmup.overrides=["training.steps=1"]',
    )
    mark = {
        "POSTGRAD_TEST_CLUSTER": str(tmp_path)
    }  # what the command starts inherits it; other tests have clusters, too
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "postgrad.cli.main",
            "train",
            "grpo",
            *overrides_of(tiny, *WORDS, *more),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | mark,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test" / "checkpoints" / "step-1" / "policy" / "model.safetensors").is_file()
    assert "ray" not in done.stderr.lower(), done.stderr
    left = [
        p.info["name"]
        for p in psutil.process_iter(["name", "environ"])
        if mark.items() <= (p.info["environ"] or {}).items()
    ]
    assert not left


def test_sigterm_while_ray_starts_is_a_stop_and_stays_ours_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ray_place._own_sigterm():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_tokens_of_killed_processes_are_removed_and_those_of_living_ones_are_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("left", "held", "young"):
        (tmp_path / f"{ray_place.TOKENS}{name}").mkdir()
        token = tmp_path / f"{ray_place.TOKENS}{name}" / "token"
        token.write_text(name)
        if name != "young":
            os.utime(token, (1, 1))
    with (tmp_path / f"{ray_place.TOKENS}held" / "token").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        mine = ray_place._token_file.__wrapped__()
    assert {folder.name.removeprefix(ray_place.TOKENS) for folder in tmp_path.iterdir()} - {
        "held",
        "young",
    } == {mine.parent.name.removeprefix(ray_place.TOKENS)}
    assert (
        len(list(tmp_path.iterdir())) == 3
        and mine.stat().st_mode & 0o777 == 0o600
        and len(mine.read_text()) == 64
    )
