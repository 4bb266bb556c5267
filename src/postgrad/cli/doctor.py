"""`postgrad doctor [--fit RECIPE key=value ...]`"""

import json
import sys
from typing import TYPE_CHECKING

from postgrad.cli.arguments import Parser, positive_number
from postgrad.errors import ConfigError

if TYPE_CHECKING:
    from postgrad.doctor.report import Report
    from postgrad.sizing.devices import Device

DESCRIPTION = """\
Without arguments: shows what this machine offers and what a run would use: device, compute type,
threads, memory, engines, packages.
With --fit: estimates whether a run fits into memory and on the disk. If it does, two real steps
with a few problems show how long it takes and which passes and decoding the model gets; that takes
about a minute and writes no run. With --device NAME the estimate is for a GPU that this machine
need not have."""


def make_parser() -> Parser:
    parser = Parser("doctor [--fit RECIPE [key=value ...]]", DESCRIPTION)
    parser.add_argument(
        "--fit", metavar="RECIPE", help="estimate the run of `postgrad train RECIPE key=value ...`"
    )
    parser.add_argument(
        "--device-gib",
        type=positive_number,
        metavar="GIB",
        help="memory of --device, if it has another size",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="estimate for a GPU that this machine need not have: h200, h100, a100, ...",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
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

        show(examine(), arguments.json)
        return 0
    from postgrad.cli.train import compose_arguments

    config = compose_arguments([arguments.fit, *arguments.overrides])
    gpu = _planned_gpu(arguments.device, arguments.device_gib)
    if gpu is None and arguments.device_gib is not None:
        raise ConfigError(
            f"--device-gib {arguments.device_gib:g} needs the kind of GPU; add --device h200"
        )
    from postgrad.doctor.fit import check_fit

    show(check_fit(config, gpu), arguments.json)
    return 0


def _planned_gpu(name: str | None, gib: float | None) -> "Device | None":
    """Return the GPU of --device; None without it. Raises ConfigError."""
    if name is None:
        return None
    from postgrad.sizing.devices import find_gpu

    return find_gpu(name, gib)


def show(report: "Report", as_json: bool = False) -> None:
    """Prints the report: a table on a terminal, aligned lines elsewhere; problems come last.

    `as_json` prints one JSON object instead.
    """
    if as_json:
        print(json.dumps(report.to_dict()))
        return
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
