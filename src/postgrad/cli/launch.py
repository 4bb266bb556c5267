"""`postgrad launch slurm|kuberay|skypilot|ssh train ...`: writes and submits job files."""

import shutil
import subprocess
from pathlib import Path

from postgrad.cli.arguments import Parser, positive_number, whole_number
from postgrad.errors import ConfigError

KINDS = ("slurm", "kuberay", "skypilot", "ssh")
DESCRIPTION = """\
Prints a job file that starts Ray on several nodes and runs a command there. The nodes need
postgrad[cluster] and a common file system for the run folder."""

EPILOG = """\
examples:
  postgrad launch slurm nodes=4 gpus=8 partition=h100 setup='source .venv/bin/activate' \\
      train grpo model.path=Qwen/Qwen3-8B data.train=math.parquet
  postgrad launch kuberay nodes=2 gpus=8 image=registry/postgrad:1 folder=/data train sft ...
Without --submit nothing is written and nothing is started. If a job is started again, its run
continues from the last checkpoint."""


def make_parser() -> Parser:
    parser = Parser(f"launch {'|'.join(KINDS)} nodes=N gpus=N ... train ...", DESCRIPTION, EPILOG)
    parser.add_argument("kind", choices=KINDS, metavar="|".join(KINDS), help="kind of cluster")
    parser.add_setting("nodes", type=whole_number(1), default=1, help="number of nodes")
    parser.add_setting("gpus", type=whole_number(1), default=8, help="GPUs per node (default 8)")
    parser.add_setting("job", default="postgrad", help="name of the job (default postgrad)")
    parser.add_setting("setup", default="", help="shell line that is run first on every node")
    parser.add_setting("hours", type=positive_number, default=24.0, help="slurm: time limit")
    parser.add_setting("partition", default="", help="slurm: partition")
    parser.add_setting("account", default="", help="slurm: account")
    parser.add_setting("accelerator", default="", help="skypilot: kind of device, such as H100")
    parser.add_setting("image", default="", help="kuberay: container image with postgrad and Ray")
    parser.add_setting(
        "folder",
        default="",
        help="folder that all nodes see, for runs; kuberay mounts the claim `postgrad` there",
    )
    parser.add_setting("hosts", default="", help="ssh: names of the hosts, with commas")
    parser.add_argument("--submit", action="store_true", help="write the job file and submit it")
    parser.add_overrides("the command: train RECIPE key=value ...")
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.launch.job import Job, check_job
    from postgrad.launch.render import LAUNCHERS, render

    hosts = tuple(host for host in arguments.hosts.split(",") if host)
    job = Job(
        command=tuple(arguments.overrides),
        nodes=len(hosts) or arguments.nodes,
        gpus=arguments.gpus,
        name=arguments.job,
        setup=arguments.setup,
        hours=arguments.hours,
        partition=arguments.partition,
        account=arguments.account,
        accelerator=arguments.accelerator,
        image=arguments.image,
        folder=arguments.folder.rstrip("/"),
        hosts=hosts,
    )
    check_job(job)
    launcher = LAUNCHERS[arguments.kind]
    text = render(arguments.kind, job)
    file = Path(launcher.file_name.format(name=job.name))
    command = [*launcher.submit, str(file)]
    if not arguments.submit:
        print(text, end="")
        print(
            f"# not submitted; with --submit this is written to {file}, then: {' '.join(command)}"
        )
        return 0
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not installed here; leave --submit out to see the file")
    file.write_text(text)
    print(f"wrote {file}; running: {' '.join(command)}")
    return subprocess.run(command, check=False).returncode
