"""What a job file needs to know: the command, the nodes and their devices."""

import re
import shlex
from dataclasses import dataclass

from postgrad.errors import Conflict, Unsupported, WrongValue

PORT = 6379
# The job file sets these: it knows the address of the cluster.
CLUSTER_SETTINGS = ("cluster", "cluster.backend", "cluster.address")


@dataclass(frozen=True)
class Job:
    """A command on some nodes."""

    command: tuple[str, ...]  # arguments of `postgrad`, such as train grpo model.path=...
    nodes: int
    gpus: int  # per node
    name: str = "postgrad"
    setup: str = ""  # a shell line that is run first on every node
    hours: float = 24.0
    partition: str = ""  # Slurm
    account: str = ""  # Slurm
    accelerator: str = ""  # SkyPilot, such as H100
    image: str = ""  # KubeRay
    folder: str = ""  # a folder that all nodes see; runs are written below it
    hosts: tuple[str, ...] = ()  # SSH; the first one is the head

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus


def check_job(job: Job) -> None:
    """Raise ConfigError for a command that does not run on a cluster, or settings of the job's."""
    if not job.command or job.command[0] not in ("train", "eval"):
        raise Unsupported(
            "launch runs train or eval on a cluster: launch slurm train grpo ...", at="command"
        )
    settings = settings_of(job)
    for key in CLUSTER_SETTINGS:
        if key in settings:
            raise Conflict(f"{key} is set by the job file; remove it", at=key)
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", job.name):
        raise WrongValue(f"name={job.name} must be lower-case letters, digits and hyphens")
    for key, value in (("setup", job.setup), ("folder", job.folder), ("image", job.image)):
        if "\n" in value:
            raise WrongValue(f"{key}= must be one line")


def settings_of(job: Job) -> dict[str, str]:
    """Return the settings of the command, by key."""
    pairs = (word.partition("=") for word in job.command if "=" in word)
    return {key: value for key, _, value in pairs}


def cluster_command(job: Job, address: str) -> str:
    """Return the shell line that runs the command on the cluster at `address`.

    Without cluster.workers all devices train that no engine and no pool uses.
    """
    settings = settings_of(job)
    arguments = [shlex.quote(argument) for argument in ("postgrad", *job.command)]
    if "cluster.workers" not in settings:
        others = _num_other_devices(settings)
        if others >= job.num_gpus:
            raise Conflict(
                f"engines and pools use {others} devices of {job.num_gpus}; none is left to train",
                at="cluster.engines",
            )
        arguments.append(f"cluster.workers={job.num_gpus - others}")
    arguments += ["cluster=ray", f"cluster.address={address}"]
    if job.folder and "runs" not in settings:
        arguments.append(f"runs={shlex.quote(job.folder + '/runs')}")
    return " ".join(arguments)


def _num_other_devices(settings: dict[str, str]) -> int:
    """Return the number of devices that engines and pools use. Raises ConfigError."""
    per_engine = _count(settings, "rollout.tensor_parallel", default=1)
    num_devices = _count(settings, "cluster.engines", default=0) * per_engine
    for key in settings:
        if key.startswith("cluster.pools.") and key != "cluster.pools.verifier":
            num_devices += _count(settings, key, default=0)
    return num_devices


def _count(settings: dict[str, str], key: str, default: int) -> int:
    value = settings.get(key, str(default))
    if not value.isdecimal():
        raise WrongValue(f"{key}={value} is not a whole number from 0")
    return int(value)
