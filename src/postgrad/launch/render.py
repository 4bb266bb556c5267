"""The text of a job file, and the command that submits it, for each kind of cluster."""

import shlex
from collections.abc import Callable
from typing import NamedTuple

import yaml

from postgrad.errors import ConfigError
from postgrad.launch.job import PORT, Job, cluster_command

# Nodes that know the token may join and run code. The file is readable by its owner only.
TOKEN_LINES = """\
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={file}
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$RAY_AUTH_TOKEN_PATH")"""
HEAD = f"ray start --head --node-ip-address=$address --port={PORT} --include-dashboard=false"
WORKER = f"ray start --address=$address:{PORT}"


class Launcher(NamedTuple):
    """How to write and submit the job file of one kind of cluster."""

    render: Callable[[Job], str]
    file_name: str  # {name} is the job's name
    submit: tuple[str, ...]  # the command; the file's name follows


def render_slurm(job: Job) -> str:
    """Return a batch script. If a node fails, Slurm starts the job again and the run continues."""
    hours = int(job.hours)
    minutes = round(60 * (job.hours - hours))
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus),
        "time": f"{hours:02d}:{minutes:02d}:00",
        "partition": job.partition,
        "account": job.account,
        "output": f"{job.name}-%j.log",
    }
    lines = ["#!/usr/bin/env bash"]
    lines += [f"#SBATCH --{key}={value}" for key, value in options.items() if value]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue", "set -euo pipefail"]
    lines += _setup_lines(job)
    lines += [
        TOKEN_LINES.format(file='"$PWD/.ray-token-$SLURM_JOB_ID"'),
        "trap 'rm -f \"$RAY_AUTH_TOKEN_PATH\"; kill $(jobs -p) 2> /dev/null || true' EXIT",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        'address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address'
        " | cut -d ' ' -f 1)",
        f'srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" {HEAD} --block &',
    ]
    if job.nodes > 1:
        others = f"--nodes={job.nodes - 1} --ntasks={job.nodes - 1}"
        lines.append(f'srun {others} --overlap --exclude="$head" {WORKER} --block &')
    return "\n".join([*lines, *_run_lines(job), ""])


def render_ssh(job: Job) -> str:
    """Return a shell script that starts Ray on each host by SSH, and stops it at the end.

    It is run on the first host. All hosts see the current folder under the same path.
    """
    if len(job.hosts) != job.nodes:
        raise ConfigError(f"hosts= names {len(job.hosts)} hosts and nodes={job.nodes}")
    others = " ".join(shlex.quote(host) for host in job.hosts[1:])
    environment = 'RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$RAY_AUTH_TOKEN_PATH"'
    enter = f'cd "$PWD" && {job.setup + " && " if job.setup else ""}{environment}'
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", *_setup_lines(job)]
    lines += [
        TOKEN_LINES.format(file='"$PWD/.ray-token"'),
        f"others=({others})",
        'stop() { ray stop; for host in "${others[@]}"; do ssh "$host" '
        f'"{_in_quotes(enter)} ray stop" || true; done; rm -f "$RAY_AUTH_TOKEN_PATH"; }}',
        "trap stop EXIT",
        f"address={shlex.quote(job.hosts[0])}",
        HEAD,
        'for host in "${others[@]}"; do',
        f'  ssh "$host" "{_in_quotes(enter)} {WORKER}"',
        "done",
    ]
    return "\n".join([*lines, *_run_lines(job), ""])


def render_skypilot(job: Job) -> str:
    """Return a task: every node runs the same lines, and the first one runs the command."""
    if not job.accelerator:
        raise ConfigError("SkyPilot needs the kind of device: accelerator=H100")
    run = [
        "set -euo pipefail",
        *_setup_lines(job),
        'address=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)',
        'if [ "$SKYPILOT_NODE_RANK" != 0 ]; then',
        f"  until {WORKER} --block; do sleep 5; done",
        "  exit 0",
        "fi",
        HEAD,
        *_run_lines(job),
    ]
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {"accelerators": f"{job.accelerator}:{job.gpus}"},
        "workdir": ".",
        **({"setup": job.setup} if job.setup else {}),
        "run": "\n".join(run) + "\n",
    }
    return _yaml(task)


def render_kuberay(job: Job) -> str:
    """Return a RayJob: KubeRay starts the cluster, runs the command in it and removes it."""
    if not job.image:
        raise ConfigError("KubeRay needs an image with postgrad and Ray: image=registry/name:tag")
    gpus = {"nvidia.com/gpu": job.gpus}
    container = {"image": job.image, "resources": {"limits": gpus, "requests": gpus}}
    spec: dict[str, object] = {
        "headGroupSpec": {
            "rayStartParams": {"include-dashboard": "true"},
            "template": {"spec": {"containers": [{"name": "head", **container}]}},
        }
    }
    if job.nodes > 1:
        worker = {
            "groupName": "workers",
            "replicas": job.nodes - 1,
            "minReplicas": job.nodes - 1,
            "maxReplicas": job.nodes - 1,
            "rayStartParams": {},
            "template": {"spec": {"containers": [{"name": "worker", **container}]}},
        }
        spec["workerGroupSpecs"] = [worker]
    if job.folder:
        _mount(spec, job.folder)
    run = " && ".join([*_setup_lines(job), 'address="${RAY_ADDRESS%:*}"', *_run_lines(job)])
    return _yaml(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {"name": job.name},
            "spec": {
                "entrypoint": f"bash -c {shlex.quote(run)}",
                "shutdownAfterJobFinishes": True,
                "rayClusterSpec": spec,
            },
        }
    )


def _mount(spec: dict[str, object], folder: str) -> None:
    """Mount the persistent volume claim `postgrad` at a folder in every pod."""
    groups: list[dict] = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]  # type: ignore[misc,list-item]
    for group in groups:
        pod = group["template"]["spec"]
        claim = {"claimName": "postgrad"}
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": claim}]
        pod["containers"][0]["volumeMounts"] = [{"name": "runs", "mountPath": folder}]


def _setup_lines(job: Job) -> list[str]:
    return [job.setup] if job.setup else []


def _run_lines(job: Job) -> list[str]:
    """Return the lines that wait for all nodes and run the command."""
    return [
        f"python -m postgrad.launch.wait $address:{PORT} {job.num_gpus}",
        cluster_command(job, f"$address:{PORT}"),
    ]


def _in_quotes(text: str) -> str:
    """Return text for use inside double quotes; variables are still replaced."""
    return text.replace('"', '\\"')


class _Dumper(yaml.SafeDumper):
    """Writes several lines as a block, and equal parts in full instead of by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)


LAUNCHERS = {
    "slurm": Launcher(render_slurm, "{name}.sbatch", ("sbatch",)),
    "kuberay": Launcher(render_kuberay, "{name}.rayjob.yaml", ("kubectl", "create", "-f")),
    "skypilot": Launcher(render_skypilot, "{name}.sky.yaml", ("sky", "launch", "--yes")),
    "ssh": Launcher(render_ssh, "{name}.sh", ("bash",)),
}
