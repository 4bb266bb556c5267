"""Profiles of single steps: a trace for Perfetto or chrome://tracing, and a table of operators."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

NUM_ROWS = 40  # of the table


@contextmanager
def profiled(
    folder: Path, number: int, steps: list[int], note: Callable[[str], None]
) -> Iterator[None]:
    """Profile the block if `number` is in `steps`.

    Writes profile/step-N.json.gz (the trace) and profile/step-N.txt (the table) in the run
    folder; both name the stages. A profile that cannot be written is a note, not an error.
    """
    if number not in steps:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no log lines of the profiler
    activities = supported_activities()
    with profile(activities=activities) as profiler:
        yield
    on_cpu_only = activities == {ProfilerActivity.CPU}
    order = "self_cpu_time_total" if on_cpu_only else "self_device_time_total"
    trace = folder / "profile" / f"step-{number}.json.gz"
    table = folder / "profile" / f"step-{number}.txt"
    try:
        trace.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        table.write_text(profiler.key_averages().table(sort_by=order, row_limit=NUM_ROWS))
    except OSError as error:
        note(f"the profile of step {number} could not be written: {error.strerror}")
        return
    note(f"profile of step {number}: {table}; open {trace.name} beside it in ui.perfetto.dev")
