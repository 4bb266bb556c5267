"""Opening a run: its folder, its lock, its models and its reporters."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from postgrad import phases
from postgrad.cluster.backends import open_models
from postgrad.methods.ports import Ports
from postgrad.training import run
from postgrad.training.guard import GAP_MAX, GAP_MEAN, check_engine_gap
from postgrad.training.log import RunLog, missing_steps
from postgrad.training.prepare import Prepared
from postgrad.training.report import Events, MultiReporter, Reporter
from postgrad.training.stages import check_stages


@dataclass
class OpenRun:
    """A prepared run with a locked folder, whose method is connected to its models."""

    run: Prepared
    folder: Path
    reporter: Reporter


@contextmanager
def open_run(prepared: Prepared, reporter: Reporter) -> Iterator[OpenRun]:
    """Yield a prepared run: folder locked, models loaded, reporters connected.

    A new run folder is created only after the models have loaded, so a run that cannot start
    writes nothing. Raises ConfigError.
    """
    from postgrad.methods.support.judging import connect_scorer

    config = prepared.config
    folder = run.run_folder(config)
    with ExitStack() as stack:
        exists = folder.is_dir()
        if exists:
            stack.enter_context(run.locked_folder(config))
        scorer = stack.enter_context(prepared.scorer)
        if prepared.turns is not None:
            stack.callback(prepared.turns.close)
        config.method.freeze()
        phases.begin(f"loading {config.model.path}")
        models = stack.enter_context(open_models(config))
        encoder = prepared.encoder
        ports = Ports(models.policy, models.engine, scorer, encoder, models.models, prepared.turns)
        prepared.method.bind(ports)
        check_stages(prepared.method)
        if not exists:
            stack.enter_context(run.locked_folder(config, new=True))
        run.create_folder(config)
        run.record_inputs(folder, config)
        encoder.save(folder / "tokenizer.json")
        events = stack.enter_context(Events(folder))
        connect_scorer(config, scorer, models.models, folder)
        reporters = [events, reporter]
        if config.track:
            from postgrad.training.trackers import tracker_reporters

            reporters += tracker_reporters(config)
        yield OpenRun(prepared, folder, MultiReporter(*reporters))


@contextmanager
def report_run(opened: OpenRun, log: RunLog, start: int) -> Iterator[None]:
    """Report the start after step `start`, check the engine, and close the log at the end.

    Raises RunError if the engine does not sample from the policy that is trained.
    """
    config = opened.run.config
    reporter = opened.reporter
    with closing(log):
        try:
            reporter.started(opened.folder, config, start)
            for note in opened.run.notes if start == 0 else ():
                reporter.note(note)
            if missing := missing_steps(opened.folder, start):
                reporter.note(
                    f"metrics.jsonl has no line for {len(missing)} of the {start} steps so far; "
                    f"the first is step {missing[0]}"
                )
            is_finished = start >= config.training.steps
            if start and not is_finished:
                for file in run.changed_inputs(opened.folder, config):
                    effect = f"steps from {start + 1} on use the new content"
                    if file == config.model.path:
                        effect = f"the policy continues from the checkpoint of step {start}"
                    reporter.note(f"{file} has changed since the run began; {effect}")
            gap = check_engine_gap(config, opened.run.method.ports, opened.run.train)
            if gap:
                reporter.note(
                    "engine and trainer agree: their log-probs differ by "
                    f"{gap[GAP_MEAN]:.2g} nats on average, by {gap[GAP_MAX]:.2g} at most"
                )
                if start == 0:
                    log.write(0, gap)
            yield
        finally:
            reporter.stopped()
