"""`postgrad doctor [--fit RECIPE key=value ...]`"""

import json as json_format
import sys
from typing import TYPE_CHECKING

from postgrad.cli.arguments import Positive
from postgrad.errors import Missing, UnknownName

if TYPE_CHECKING:
    from postgrad.doctor.report import Report


def doctor(
    *overrides: str,
    fit: str | None = None,
    device: str | None = None,
    device_gib: Positive | None = None,
    json: bool = False,
) -> int:
    """Without arguments: show what this machine offers and what a run would use: device, compute
    type, threads, memory, engines, packages.
    With --fit: estimate whether a run fits into memory and on the disk. If it does, short real
    steps show how long it takes and which passes and decoding the model gets; that takes about a
    minute and writes no run. With --device NAME the estimate is for a GPU that this machine need
    not have.

    Args:
        overrides: settings of that run
        --fit [RECIPE]: estimate the run of `postgrad train RECIPE key=value ...`
        --device [NAME]: estimate for a GPU that this machine need not have: h200, h100, a100, ...
        --device-gib [GIB]: memory of --device, if it has another size
        --json: print one JSON object
    """
    if fit is None:
        if overrides:
            raise UnknownName(
                f"unexpected argument {overrides[0]}; write postgrad doctor, "
                "or postgrad doctor --fit RECIPE key=value ...",
                at=overrides[0],
            )
        from postgrad.doctor.machine import examine

        show(examine(), json)
        return 0
    from postgrad.cli.train import compose_arguments
    from postgrad.doctor.fit import check_fit
    from postgrad.sizing.devices import find_gpu

    config = compose_arguments([fit, *overrides])
    if device is None and device_gib is not None:
        raise Missing(
            f"--device-gib {device_gib:g} needs the kind of GPU; add --device h200", at="--device"
        )
    gpu = None if device is None else find_gpu(device, device_gib)
    show(check_fit(config, gpu), json)
    return 0


def show(report: "Report", as_json: bool = False) -> None:
    """Print the report: a table on a terminal, aligned lines elsewhere; problems come last.

    `as_json` prints one JSON object instead.
    """
    if as_json:
        print(json_format.dumps(report.to_dict()))
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
