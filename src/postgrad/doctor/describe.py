"""The estimate of a run as rows to read."""

from postgrad.doctor import fit
from postgrad.doctor.estimate import Estimate
from postgrad.doctor.machine import disk_free
from postgrad.doctor.paths import describe_paths
from postgrad.doctor.report import Report, gib
from postgrad.phases import duration
from postgrad.sizing.gpu_memory import is_captured


def describe(result: Estimate) -> Report:
    """Return the needs of the run and what the machine has, as rows and problems."""
    config = result.plan.config
    model = config.model
    size = result.size
    report = Report()
    report.add("model", f"{model.path}: {size.parameters:,} parameters in {size.blocks} blocks")
    if result.gpu is not None:
        report.add("computes on", f"{result.gpu.name}, {model.dtype}")
    else:
        report.add("computes on", f"{model.device}, {model.dtype}, {model.threads} threads")
    _describe_memory(report, result)
    if result.planned:
        _describe_planned_passes(report, result)
    elif result.fits:
        samples = bool(result.layout.num_sampled)
        describe_paths(report, config, result.plan.model, samples)
    if result.largest:
        values = ", ".join(f"{setting}={value}" for setting, value in result.largest.items())
        report.add("largest that fit", f"{values} (each alone)")
    tokens = result.layout.tokens
    total = tokens * config.training.steps
    rows = f"{result.layout.num_rows:,} rows"
    report.add("tokens", f"{tokens:,} per step in {rows}, {total:,} in total")
    _describe_time(report, result)
    _describe_disk(report, result)
    return report


def _describe_planned_passes(report: Report, result: Estimate) -> None:
    """Add how the passes would be computed; the numeric gate decides on the GPU itself."""
    tokens, _ = max(result.layout.passes)
    captured = is_captured(result.plan.config, result.size, tokens)
    graphs = "captured as graphs" if captured else "kernel by kernel"
    report.add("passes", f"packed, {graphs}")


def _describe_memory(report: Report, result: Estimate) -> None:
    memory = result.memory
    verdict = "fits" if result.fits else "DOES NOT FIT"
    peak = f"{gib(memory.peak)} in the {memory.peak_phase}"
    problem = "" if result.fits else _memory_advice(result)
    report.add("peak memory", f"{peak}; {gib(result.available)} available: {verdict}", problem)
    padded = result.layout.largest_padded_pass
    shape = (max(result.layout.passes)[0],) if padded is None else padded.ids.shape
    notes = {
        "activations": f"  ({' x '.join(map(str, shape))} tokens in one pass)",
        "KV cache": f"  ({result.plan.decode_rows} rows)",
    }
    for name, size in {**memory.held, **memory.phases[memory.peak_phase]}.items():
        report.add(f"  {name}", f"{gib(size):>10}{notes.get(name, '')}")
    for phase, parts in memory.phases.items():
        if phase != memory.peak_phase:
            sizes = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
            report.add(f"  in the {phase}", f"{sizes}, at another time")


def _memory_advice(result: Estimate) -> str:
    """Return what to change so that the run fits."""
    needed = f"{gib(result.memory.peak)} of memory needed, {gib(result.available)} available"
    state = sum(result.memory.held.values()) + 4 * result.size.parameters
    missing = result.memory.peak - result.available
    one_helps = any(saved >= missing for _, saved in result.suggestions)
    if state > result.available and not one_helps:
        return (
            f"{needed}: weights, gradients and optimizer alone take {gib(state)}; "
            "use a smaller model"
        )
    changes = [f"{setting} (saves {gib(saved)})" for setting, saved in result.suggestions]
    return f"{needed}: set, the most effective first, {', '.join(changes)}"


def _describe_time(report: Report, result: Estimate) -> None:
    if not result.fits:
        report.add("time", "not measured, because the run does not fit")
        return
    if not result.step:
        report.add("time", "not estimated on a GPU")
        return
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.step.items())
    report.add("time per step", f"{sum(result.step.values()):.2f} s at most ({stages})")
    layout = result.layout
    if layout.num_sampled:
        half = f"{sum(result.half_length_step.values()):.2f} s at half the length"
        length = f"{layout.sampled_tokens} tokens long"
        report.add("", f"with all responses {length} and every row trained on; {half}")
    steps = result.plan.config.training.steps
    total = duration(result.total_s)
    report.add("total time", f"{total} at most for {steps} steps and the validations")
    blocks = result.size.blocks
    how = f"timing 1 and 3 blocks in training and decoding on this machine, scaled to {blocks}"
    report.add("estimated by", how)
    report.add("", "not included: verifiers, refills, checkpoints")


def _describe_disk(report: Report, result: Estimate) -> None:
    config = result.plan.config
    needed = fit.disk_bytes(result.plan, result.layout)
    free = disk_free(config.runs)
    report.add("checkpoint", gib(fit.checkpoint_bytes(result.plan)))
    best = " and the best" if config.training.keep_best else ""
    kept = f"{config.training.keep_checkpoints} checkpoints{best}"
    problem = ""
    if needed > free:
        problem = (
            f"the run needs {gib(needed)} of disk, {gib(free)} are free: "
            "lower training.keep_checkpoints or choose runs=FOLDER"
        )
    contents = f"{kept} kept, one being written, and the rollouts"
    report.add("disk", f"{gib(needed)} at most ({contents}); {gib(free)} free", problem)
