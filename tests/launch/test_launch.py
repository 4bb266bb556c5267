"""Job files: what they contain, and that their shell lines run in the right order."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from postgrad.cli.main import main

TRAIN = ["train", "grpo", "model.path=a/model", "data.train=my data.parquet"]
FAKE = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "{log}"
{body}
"""


@pytest.fixture
def fake_tools(tmp_path, monkeypatch, request):
    """Stand-ins for the cluster's commands, which note their arguments in a file."""
    folder = tmp_path / "tools"
    folder.mkdir()
    log = tmp_path / "log"
    bodies = {
        "sbatch": 'SLURM_JOB_ID=7 SLURM_JOB_NODELIST="n[1-2]" bash "$1"',
        "scontrol": "echo n1; echo n2",
        "srun": 'case "$*" in *hostname*) echo 10.0.0.1;; esac',
    }
    if request.node.name.startswith("test_slurm"):  # as the real one waits for both nodes
        bodies["python"] = f'until [ "$(grep -c "ray start" "{log}")" = 2 ]; do sleep 0.1; done'
    for name in ("sbatch", "scontrol", "srun", "ray", "python", "postgrad", "ssh", "kubectl"):
        file = folder / name
        file.write_text(FAKE.format(log=log, body=bodies.get(name, "")))
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return log


def launched(capsys, *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def test_slurm_starts_ray_on_all_nodes_then_the_command(fake_tools, tmp_path):
    words = ["slurm", "nodes=2", "gpus=4", "partition=h100", *TRAIN, "cluster.engines=2"]
    assert main(["launch", *words, "--submit"]) == 0
    text = (tmp_path / "postgrad.sbatch").read_text()
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --partition=h100" in text
    calls = fake_tools.read_text().splitlines()
    heads = [call for call in calls if "ray start --head" in call]
    workers = [call for call in calls if "ray start --address=10.0.0.1:6379" in call]
    assert len(heads) == len(workers) == 1
    assert "--nodelist=n1" in heads[0]
    assert "--exclude=n1" in workers[0]
    assert "python -m postgrad.launch.wait 10.0.0.1:6379 8" in calls
    command = "postgrad train grpo model.path=a/model data.train=my data.parquet cluster.engines=2 "
    assert calls[-1] == f"{command}cluster.workers=6 cluster=ray cluster.address=10.0.0.1:6379"
    assert not list(tmp_path.glob(".ray-token*")), "the token is removed at the end"


def test_engines_of_several_workers_leave_fewer_to_train(capsys):
    words = ["slurm", "nodes=2", "gpus=4", "partition=h100", *TRAIN, "cluster.engines=2"]
    words += ["rollout.engine=vllm", "rollout.tensor_parallel=2"]
    assert "cluster.workers=4 " in launched(capsys, *words)


def test_ssh_starts_and_stops_every_host(fake_tools, tmp_path):
    setup = "source ./env.sh"
    (tmp_path / "env.sh").touch()
    words = ["ssh", "hosts=10.0.0.1,b", "gpus=1", f"setup={setup}", *TRAIN]
    assert main(["launch", *words, "--submit"]) == 0
    calls = fake_tools.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["ray", "ssh", "python", "postgrad", "ray", "ssh"]
    assert setup in calls[1]
    assert "ray start --address=10.0.0.1:6379" in calls[1]
    assert "ray stop" in calls[-1]


def test_the_wait_for_nodes_may_fail(fake_tools, tmp_path):
    (tmp_path / "tools" / "python").write_text("#!/bin/sh\nexit 1\n")
    assert main(["launch", "ssh", "hosts=a", "gpus=1", *TRAIN, "--submit"]) == 1
    assert not any(call.startswith("postgrad") for call in fake_tools.read_text().splitlines())


def test_kuberay_has_one_pod_per_node(capsys):
    words = ["kuberay", "nodes=3", "gpus=8", "image=r/postgrad:1", "folder=/data", *TRAIN]
    job = yaml.safe_load(launched(capsys, *words))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert container["volumeMounts"][0]["mountPath"] == "/data"
    entrypoint = job["spec"]["entrypoint"]
    assert "cluster.workers=24" in entrypoint
    assert "runs=/data/runs" in entrypoint
    assert subprocess.run(["bash", "-n", "-c", entrypoint], check=False).returncode == 0


def test_skypilot_runs_the_command_on_the_first_node(capsys, fake_tools):
    task = yaml.safe_load(launched(capsys, "skypilot", "nodes=2", "accelerator=H100", *TRAIN))
    assert task["num_nodes"] == 2
    assert task["resources"] == {"accelerators": "H100:8"}
    for rank in (0, 1):
        environment = {
            **os.environ,
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NODE_RANK": str(rank),
        }
        subprocess.run(["bash", "-c", task["run"]], env=environment, check=True)
    calls = fake_tools.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["ray", "python", "postgrad", "ray"]
    assert "--head" in calls[0]
    assert "--address=10.0.0.1:6379" in calls[3]


def test_nothing_is_submitted_without_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", *TRAIN, "--submit"]) == 2
    assert "sbatch" in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []
