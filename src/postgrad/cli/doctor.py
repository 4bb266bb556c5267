"""`postgrad doctor [--fit RECIPE key=value ...]`"""

import sys
from typing import TYPE_CHECKING

from postgrad.errors import ConfigError

if TYPE_CHECKING:
    from postgrad.doctor.machine import Report

HELP = """usage: postgrad doctor
       postgrad doctor --fit RECIPE [key=value ...]

Alone: what this machine offers and what a run would use: device, compute type, threads, memory, engines, packages.
With --fit: whether the run that `postgrad train RECIPE key=value ...` would start fits into memory and on the disk, and how
long it takes; measured in under half a minute, without loading the weights and without writing a run."""


def run(overrides: list[str]) -> int:
    if "--help" in overrides or "-h" in overrides:
        print(HELP)
        return 0
    if overrides and overrides[0] != "--fit":
        raise ConfigError(
            f"doctor does not know {overrides[0]}; write postgrad doctor, or postgrad doctor --fit RECIPE key=value ..."
        )
    if not overrides:
        from postgrad.doctor.machine import examine

        show(examine())
        return 0
    from postgrad.cli.train import compose_words

    config = compose_words(overrides[1:])
    from postgrad.doctor.machine import describe, estimate

    show(describe(estimate(config)))
    return 0


def show(report: "Report") -> None:
    """A table on a terminal, aligned lines elsewhere; the problems below."""
    if sys.stdout.isatty():
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
        return
    width = max(len(name) for name, _ in report.rows) + 2
    for name, value in report.rows:
        print(f"{name:<{width}}{value}")
    for problem in report.problems:
        print(f"{'problem':<{width}}{problem}")
