"""Steps seen through torch's profiler: a trace for Perfetto or chrome://tracing, and a table of what took longest."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, supported_activities

ROWS = 40


@contextmanager
def profiled(
    folder: Path, number: int, steps: list[int], note: Callable[[str], None]
) -> Iterator[None]:
    """Write profile/step-N.json.gz and step-N.txt of the run when N is among `steps`; stages are named in both."""
    if number not in steps:
        yield
        return
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # else it writes a line about itself before and after
    activities = supported_activities()
    with profile(activities=activities) as seen:
        yield
    here = folder / "profile"
    by = "self_cpu_time_total" if activities == {ProfilerActivity.CPU} else "self_device_time_total"
    try:
        here.mkdir(exist_ok=True)
        seen.export_chrome_trace(str(here / f"step-{number}.json.gz"))
        (here / f"step-{number}.txt").write_text(
            seen.key_averages().table(sort_by=by, row_limit=ROWS)
        )
    except OSError as error:
        note(f"the profile of step {number} could not be written: {error.strerror}")
        return
    note(
        f"profile of step {number}: {here / f'step-{number}.txt'}, and step-{number}.json.gz beside it for ui.perfetto.dev"
    )
