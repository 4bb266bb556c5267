"""The text of a job file, and the command that submits it, for each kind of cluster."""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import jinja2

from postgrad.errors import Conflict, Missing
from postgrad.launch.job import PORT, Job, cluster_command

HEAD = f"ray start --head --node-ip-address=$address --port={PORT} --include-dashboard=false"
WORKER = f"ray start --address=$address:{PORT}"
TEMPLATES = Path(__file__).parent / "templates"


class Launcher(NamedTuple):
    """How to write and submit the job file of one kind of cluster."""

    template: str  # a file of templates/
    file_name: str  # {name} is the job's name
    submit: tuple[str, ...]  # the command; the file's name follows


LAUNCHERS = {
    # If a node fails, Slurm starts the job again and the run continues.
    "slurm": Launcher("slurm.sbatch", "{name}.sbatch", ("sbatch",)),
    # KubeRay starts the cluster, runs the command in it and removes it.
    "kuberay": Launcher("rayjob.yaml", "{name}.rayjob.yaml", ("kubectl", "create", "-f")),
    "skypilot": Launcher("task.sky.yaml", "{name}.sky.yaml", ("sky", "launch", "--yes")),
    "ssh": Launcher("ssh.sh", "{name}.sh", ("bash",)),
}


def render(kind: str, job: Job) -> str:
    """Return the text of the job file. Raises ConfigError if the job lacks what its kind needs."""
    _check(kind, job)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    # tojson would write < and & as escapes, for pages; a job file keeps them readable.
    environment.filters["tojson"] = json.dumps
    wait = f"python -m postgrad.launch.wait $address:{PORT} {job.num_gpus}"
    command = cluster_command(job, f"$address:{PORT}")
    lines = [*([job.setup] if job.setup else []), 'address="${RAY_ADDRESS%:*}"', wait, command]
    return environment.get_template(LAUNCHERS[kind].template).render(
        job=job,
        head=HEAD,
        worker=WORKER,
        wait=wait,
        command=command,
        entrypoint=f"bash -c {shlex.quote(' && '.join(lines))}",
    )


def _check(kind: str, job: Job) -> None:
    if kind == "ssh" and len(job.hosts) != job.nodes:
        raise Conflict(f"hosts= names {len(job.hosts)} hosts and nodes={job.nodes}")
    if kind == "skypilot" and not job.accelerator:
        raise Missing("SkyPilot needs the kind of device: accelerator=H100", at="accelerator")
    if kind == "kuberay" and not job.image:
        raise Missing(
            "KubeRay needs an image with postgrad and Ray: image=registry/name:tag", at="image"
        )
