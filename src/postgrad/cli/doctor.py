"""`postgrad doctor [--fit RECIPE key=value ...]`"""

import sys
from typing import TYPE_CHECKING

from postgrad.cli.arguments import Parser, positive_number
from postgrad.errors import ConfigError

if TYPE_CHECKING:
    from postgrad.doctor.report import Report

DESCRIPTION = """\
Without arguments: shows what this machine offers and what a run would use: device, compute type,
threads, memory, engines, packages.
With --fit: estimates whether a run fits into memory and on the disk, how long it takes, and which
passes and decoding the model gets. It measures for less than half a minute, loads no weights and
writes no run."""


def make_parser() -> Parser:
    parser = Parser("doctor [--fit RECIPE [key=value ...]]", DESCRIPTION)
    parser.add_argument(
        "--fit", metavar="RECIPE", help="estimate the run of `postgrad train RECIPE key=value ...`"
    )
    parser.add_argument(
        "--device-gib",
        type=positive_number,
        default=80.0,
        metavar="GIB",
        help="with cluster=ray: memory of one device (default 80)",
    )
    parser.add_overrides("settings of that run")
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv)
    if arguments.fit is None:
        if arguments.overrides:
            raise ConfigError(
                f"unexpected argument {arguments.overrides[0]}; write postgrad doctor, "
                "or postgrad doctor --fit RECIPE key=value ..."
            )
        from postgrad.doctor.machine import examine

        show(examine())
        return 0
    from postgrad.cli.train import compose_arguments

    config = compose_arguments([arguments.fit, *arguments.overrides])
    if config.cluster.backend == "ray":
        from postgrad.doctor.mesh import describe_mesh

        show(describe_mesh(config, arguments.device_gib))
        return 0
    from postgrad.doctor.estimate import describe, estimate

    show(describe(estimate(config)))
    return 0


def show(report: "Report") -> None:
    """Prints the report: a table on a terminal, aligned lines elsewhere; problems come last."""
    if sys.stdout.isatty():
        _show_table(report)
        return
    width = max(len(name) for name, _ in report.rows) + 2
    for name, value in report.rows:
        print(f"{name:<{width}}{value}")
    for problem in report.problems:
        print(f"{'problem':<{width}}{problem}")


def _show_table(report: "Report") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in report.rows:
        table.add_row(escape(name), escape(value))
    console = Console()
    console.print(table)
    for problem in report.problems:
        console.print(f"[yellow]problem[/yellow]  {escape(problem)}", highlight=False)
