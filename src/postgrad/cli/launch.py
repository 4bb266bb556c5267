"""`postgrad launch slurm|kuberay|skypilot|ssh train ...`: writes and submits job files."""

import shutil
import subprocess
from pathlib import Path
from typing import Literal

from postgrad.cli.arguments import CountFrom1, Positive
from postgrad.errors import NotInstalled


def launch(
    kind: Literal["slurm", "kuberay", "skypilot", "ssh"],
    *command: str,
    nodes: CountFrom1 = 1,
    gpus: CountFrom1 = 8,
    job: str = "postgrad",
    setup: str = "",
    hours: Positive = 24.0,
    partition: str = "",
    account: str = "",
    accelerator: str = "",
    image: str = "",
    folder: str = "",
    hosts: str = "",
    submit: bool = False,
) -> int:
    """Print a job file that starts Ray on several nodes and runs a command there. The nodes need
    postgrad[cluster] and a common file system for the run folder.

    Args:
        kind [slurm|kuberay|skypilot|ssh]: kind of cluster
        command: the command: train RECIPE key=value ...
        nodes: number of nodes
        gpus: GPUs per node
        job: name of the job
        setup: shell line that is run first on every node
        hours: slurm: time limit
        partition: slurm: partition
        account: slurm: account
        accelerator: skypilot: kind of device, such as H100
        image: kuberay: container image with postgrad and Ray
        folder: folder that all nodes see, for runs; kuberay mounts the claim `postgrad` there
        hosts: ssh: names of the hosts, with commas
        --submit: write the job file and submit it

    examples:
      postgrad launch slurm nodes=4 gpus=8 partition=h100 setup='source .venv/bin/activate' \\
          train grpo model.path=Qwen/Qwen3-8B data.train=math.parquet
      postgrad launch kuberay nodes=2 gpus=8 image=registry/postgrad:1 folder=/data train sft ...
    Without --submit nothing is written and nothing is started. If a job is started again, its run
    continues from the last checkpoint.
    """
    from postgrad.launch.job import Job, check_job
    from postgrad.launch.render import LAUNCHERS, render

    host_names = tuple(host for host in hosts.split(",") if host)
    description = Job(
        command=command,
        nodes=len(host_names) or nodes,
        gpus=gpus,
        name=job,
        setup=setup,
        hours=hours,
        partition=partition,
        account=account,
        accelerator=accelerator,
        image=image,
        folder=folder.rstrip("/"),
        hosts=host_names,
    )
    check_job(description)
    launcher = LAUNCHERS[kind]
    text = render(kind, description)
    file = Path(launcher.file_name.format(name=job))
    submit_command = [*launcher.submit, str(file)]
    line = " ".join(submit_command)
    if not submit:
        print(text, end="")
        print(f"# not submitted; with --submit this is written to {file}, then: {line}")
        return 0
    if shutil.which(submit_command[0]) is None:
        raise NotInstalled(
            f"{submit_command[0]} is not installed here; leave --submit out to see the file",
            at="--submit",
        )
    file.write_text(text)
    print(f"wrote {file}; running: {line}")
    return subprocess.run(submit_command, check=False).returncode
