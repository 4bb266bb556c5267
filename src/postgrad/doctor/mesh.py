"""`postgrad doctor --fit RECIPE cluster=ray ...`: memory and time on a mesh of workers.

Everything is computed from the models' configurations; no weights are loaded and nothing is
measured. docs/scale.md has the formulas and the assumptions.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from postgrad.config.schema import ClusterConfig, Config
from postgrad.doctor.report import Report, gib
from postgrad.doctor.workload import read_workload
from postgrad.errors import ConfigError
from postgrad.methods.base import Method
from postgrad.model.experts import count_experts
from postgrad.model.load import model_config
from postgrad.model.passes.support import CAPTURED_FAMILIES
from postgrad.rollout.kinds import find_engine
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.mesh_memory import MeshMemory, MeshSizes, Roles, estimate_mesh
from postgrad.sizing.mesh_time import MeshClock, StepTime
from postgrad.sizing.plan import Plan, check_context
from postgrad.sizing.traffic import Links
from postgrad.training import prepare
from postgrad.training.auto_passes import local_roles

MAX_PROPOSALS = 3
SIZES = (1, 2, 4, 8, 16)
GIB = 2**30


@dataclass(frozen=True)
class Proposal:
    """A mesh that fits."""

    cluster: ClusterConfig
    memory: MeshMemory
    step_s: float | None = None  # None if no GPU was named

    @property
    def overrides(self) -> str:
        """The settings of this mesh, as typed on the command line."""
        overrides = [
            f"cluster.tensor_parallel={self.cluster.tensor_parallel}",
            f"cluster.sequence_parallel={self.cluster.sequence_parallel}",
        ]
        if self.cluster.expert_parallel > 1:
            overrides.append(f"cluster.expert_parallel={self.cluster.expert_parallel}")
        return " ".join(overrides)


class MeshEstimator:
    """Estimates one run on several meshes.

    Args:
        config: of the run, resolved.
        roles: the models besides the policy.
        plan: the run with its data as lengths; None: memory only.
        gpu: what each worker has; None: memory only.
        stages: names of the method's stages.
    """

    def __init__(
        self,
        config: Config,
        model: Any,
        roles: Roles,
        plan: Plan | None = None,
        gpu: GpuSpec | None = None,
        stages: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.model = model
        self.roles = roles
        self.plan = plan
        self.gpu = gpu
        self.stages = stages
        self.links = Links()
        self.sizes = MeshSizes()

    def memory(self, cluster: ClusterConfig) -> MeshMemory:
        """Return the memory per device on this mesh. Raises ConfigError."""
        config = replace(self.config, cluster=cluster)
        return estimate_mesh(config, self.model, self.roles, self.sizes)

    def time(self, cluster: ClusterConfig) -> StepTime | None:
        """Return the seconds of a step on this mesh; None without a GPU. Raises ConfigError."""
        if self.plan is None or self.gpu is None:
            return None
        plan = replace(self.plan, config=replace(self.config, cluster=cluster))
        return MeshClock(self.gpu, plan, self.links, self.sizes).step(self.stages)

    def propose(self, available: int) -> list[Proposal]:
        """Return meshes of the same number of workers that fit into `available` bytes per device.

        The fastest is first; without a GPU, the one with the least communication.
        """
        proposals: list[Proposal] = []
        for cluster in self._candidates():
            try:
                memory = self.memory(cluster)
                if memory.total <= available:
                    time = self.time(cluster)
                    proposals.append(Proposal(cluster, memory, time.total if time else None))
            except ConfigError:  # the model or the workers cannot be divided so
                continue
        proposals.sort(key=_order)
        return proposals[:MAX_PROPOSALS]

    def _candidates(self) -> list[ClusterConfig]:
        has_experts = any(
            count_experts(model) for model in (self.model, *(m for _, m in self.roles.values()))
        )
        candidates: list[ClusterConfig] = []
        for tensor in SIZES:
            expert_sizes = SIZES if tensor == 1 else (1, tensor)
            for expert in expert_sizes if has_experts else (1,):
                for sequence in SIZES:
                    candidates.append(
                        replace(
                            self.config.cluster,
                            tensor_parallel=tensor,
                            sequence_parallel=sequence,
                            expert_parallel=expert,
                            shard_workers=0,
                        )
                    )
        return candidates


def _order(proposal: Proposal) -> tuple[float, ...]:
    cluster = proposal.cluster
    sizes = (cluster.tensor_parallel, cluster.sequence_parallel, cluster.expert_parallel)
    communication = (sizes[0] * sizes[1] * sizes[2], sizes[1], sizes[2])
    return (proposal.step_s or 0.0, *communication)


def describe_mesh(config: Config, device_gib: float, gpu: GpuSpec | None = None) -> Report:
    """Return memory per device and time per step of the run's mesh, and meshes that fit, as rows.

    Args:
        config: of the run.
        device_gib: memory of one device.
        gpu: its rates; None: no time is estimated.

    Raises: ConfigError for a run or a mesh that `postgrad train` would refuse.
    """
    method = _make_method(config, device_gib, gpu)
    config = method.config
    model = model_config(config.model, config.seed)
    model_type = model.get_text_config().model_type
    estimator = MeshEstimator(config, model, local_roles(config, method))
    if gpu and model_type in CAPTURED_FAMILIES:
        plan = _read_plan(config, method, model, estimator)
        stages = tuple(stage.__name__ for stage in method.stages())
        estimator = MeshEstimator(config, model, estimator.roles, plan, gpu, stages)
    report = Report()
    cluster = config.cluster
    data = cluster.workers // (cluster.tensor_parallel * cluster.sequence_parallel)
    sizes = f"data {data} x sequence {cluster.sequence_parallel} x tensor {cluster.tensor_parallel}"
    if cluster.expert_parallel > 1:
        sizes += f", experts over {cluster.expert_parallel}"
    if cluster.shard_workers:
        sizes += f", a copy of the weights per {cluster.shard_workers * cluster.tensor_parallel}"
    report.add("mesh", f"{cluster.workers} workers: {sizes}")
    report.values["mesh"] = asdict(cluster)
    proposals = estimator.propose(round(device_gib * GIB))
    _add_memory(report, estimator, device_gib, proposals)
    if gpu and model_type not in CAPTURED_FAMILIES:
        known = ", ".join(CAPTURED_FAMILIES)
        report.add("time per step", f"not estimated for {model_type}, only for {known}")
    elif gpu is None:
        report.add("time per step", "add --device NAME, such as --device h200")
    else:
        _add_time(report, estimator, gpu)
    _add_proposals(report, proposals)
    report.add("estimated by", "formulas of docs/scale.md; nothing was measured on several devices")
    return report


def _make_method(config: Config, device_gib: float, gpu: GpuSpec | None) -> Method:
    """Return the method of a planned run: nothing of this machine is measured or used."""
    if config.model.device == "cpu":
        config.model.threads = config.model.threads or 1
        return prepare.make_method(config)
    return prepare.make_method(config, gpu or GpuSpec("device", round(device_gib * GIB), 1.0, 1.0))


def _read_plan(config: Config, method: Method, model: Any, estimator: MeshEstimator) -> Plan:
    inputs = prepare.load_inputs(config, method)
    workload = read_workload(config, method, inputs)
    inputs.scorer.close()
    plan = Plan(config, model, workload, estimator.roles, packed=True)
    check_context(plan, estimator.sizes.measure(config, model))
    return plan


def _add_memory(
    report: Report, estimator: MeshEstimator, device_gib: float, proposals: list[Proposal]
) -> None:
    memory = estimator.memory(estimator.config.cluster)
    fits = memory.total <= device_gib * GIB
    problem = ""
    if not fits:
        problem = f"{gib(memory.total)} per device needed, {device_gib:g} GiB available: "
        problem += "use one of the meshes above" if proposals else _advice(estimator.config)
    verdict = f"{device_gib:g} GiB: {'fits' if fits else 'DOES NOT FIT'}"
    report.add("memory per device", f"{gib(memory.total)} of {verdict}", problem)
    for name, size in memory.parts.items():
        report.add(f"  {name}", f"{gib(size):>10}")
    report.values["memory"] = {"total": memory.total, "fits": fits, "parts": memory.parts}


def _add_time(report: Report, estimator: MeshEstimator, gpu: GpuSpec) -> None:
    cluster = estimator.config.cluster
    time = estimator.time(cluster)
    assert time is not None, "the plan and the GPU are known"
    devices = cluster.workers + cluster.engines * estimator.config.rollout.tensor_parallel
    devices += sum(size for name, size in cluster.pools.items() if name in estimator.roles)
    note = "; sampling runs beside the rest" if time.overlaps else ""
    if find_engine(estimator.config.rollout.engine).remote:
        note = f"; without sampling, which a server does ({estimator.config.rollout.engine})"
    report.add("time per step", f"{time.total:.2f} s with {devices} x {gpu.name}{note}")
    for name, seconds in time.stages.items():
        report.add(f"  {name}", f"{seconds:8.2f} s")
        if name == "update":
            for part, value in time.update.items():
                report.add(f"    {part}", f"{value:8.2f} s")
    report.values["time"] = {"total": time.total, "stages": time.stages, "update": time.update}
    report.add("assumed links", str(estimator.links))
    report.add(
        "assumed", "full responses, no verifiers, no checkpoints; FSDP2 sends while it computes"
    )
    report.values["links"] = asdict(estimator.links)


def _add_proposals(report: Report, proposals: list[Proposal]) -> None:
    for number, proposal in enumerate(proposals):
        step = "" if proposal.step_s is None else f", {proposal.step_s:.2f} s per step"
        text = f"{proposal.overrides}: {gib(proposal.memory.total)}{step}"
        report.add("meshes that fit" if number == 0 else "", text)
    report.values["proposals"] = [
        {"overrides": p.overrides, "memory": p.memory.total, "step_s": p.step_s} for p in proposals
    ]


def _advice(config: Config) -> str:
    changes: list[str] = []
    if not config.model.activation_checkpointing:
        changes.append("model.activation_checkpointing=true")
    if not config.cluster.engines:
        changes.append("cluster.engines=N (engines on devices of their own)")
    changes.append("more workers")
    return ", ".join(changes)
