"""The time of a step on a mesh of workers: one device's estimate, divided, and what they send.

The rates of a device are those of gpu_time.py, the traffic is that of traffic.py. Assumed are:

- the speeds of links (traffic.Links);
- the workers of a tensor- or sequence-parallel group compute a pass as fast as one device with
  their arithmetic and bandwidth together; kernels are not launched faster;
- FSDP2 gathers weights and reduces gradients beside the computation, so that the longer of the two
  counts; all other exchanges are waited for;
- rows are divided evenly, and every response has its full length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postgrad.model.device import DTYPES
from postgrad.rollout.kinds import find_engine
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.gpu_memory import GpuEstimator, Widths
from postgrad.sizing.gpu_time import GpuClock, Shape, Work, count_work
from postgrad.sizing.mesh_memory import (
    SHARDED_KINDS,
    MeshSizes,
    check_model_mesh,
    estimate_mesh,
    sent_sizes,
)
from postgrad.sizing.plan import (
    AVERAGED_WEIGHTS,
    SHARED_WEIGHTS,
    Plan,
    StepLayout,
    Workload,
    lay_out_step,
)
from postgrad.sizing.traffic import (
    MASTER_BYTES,
    Links,
    Mesh,
    SentSizes,
    count_traffic,
    sent_share,
    traffic_s,
)

PUBLISH = "weights to the engines"
TENSORS_PER_BLOCK = 11  # of Qwen3; weights for engines are gathered tensor by tensor
# Parts of a model's memory that are there while engines sample.
KEPT_PARTS = ("weights, Adam, gradients", "engine beside")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on a mesh, by stage; and of what the update consists."""

    stages: dict[str, float]
    update: dict[str, float]  # computation, optimizer, and each kind of exchange
    overlaps: bool = False  # the engines sample while the trainers work

    @property
    def total(self) -> float:
        everything = sum(self.stages.values())
        if not self.overlaps:
            return everything
        sample = self.stages.get("sample", 0.0)
        publish = self.stages.get(PUBLISH, 0.0)  # while nothing is sampled
        return max(sample, everything - sample - publish) + publish


@dataclass(frozen=True)
class ModelOnMesh:
    """A model and the workers that it is sharded over."""

    shape: Shape
    sizes: SentSizes
    mesh: Mesh


@dataclass
class MeshClock:
    """Computes the seconds of the stages of a run on a mesh of GPUs.

    Args:
        gpu: what each worker has.
        plan: the run.
        links: speeds between the GPUs.
        counted: counts of parameters of earlier estimates.
    """

    gpu: GpuSpec
    plan: Plan
    links: Links = field(default_factory=Links)
    counted: MeshSizes = field(default_factory=MeshSizes)

    def __post_init__(self) -> None:
        self.policy = self.place(self.plan.model, self.plan.config.cluster.workers, adapters=True)

    def place(
        self, model: Any, num_workers: int, adapters: bool = False, is_pool: bool = False
    ) -> ModelOnMesh:
        """Return a model on its workers. Raises ConfigError for a mesh that a run would refuse."""
        config = self.plan.config
        mesh = check_model_mesh(config, model, num_workers, is_pool)
        counts = self.counted.count(config, model, adapters)
        shape = self._shape(model, adapters)
        return ModelOnMesh(shape, sent_sizes(config, model, counts), mesh)

    def _shape(self, model: Any, adapters: bool) -> Shape:
        config = self.plan.config
        size = self.counted.measure(config, model, adapters)
        return Shape(size, Widths.of(model), DTYPES[config.model.dtype].itemsize)

    # ---- passes

    def own_work(self, mesh: Mesh, layout: StepLayout) -> Work:
        """Return what one group of workers computes, the one with the most rows."""
        work = count_work(self.plan, layout)
        num_updates = self.plan.config.training.updates_per_step
        rows = max(1.0, layout.num_rows / num_updates)
        share = math.ceil(rows / mesh.data) / rows
        passes = math.ceil(work.num_passes / num_updates / mesh.data)
        return Work(
            math.ceil(work.tokens * share),
            math.ceil(work.response_tokens * share),
            num_updates * max(1, passes),
            work.attention_pairs * share,
        )

    def passes_s(self, model: ModelOnMesh, layout: StepLayout, trains: bool) -> dict[str, float]:
        """Return the seconds of computation and of each kind of exchange of a step's passes."""
        mesh = model.mesh
        work = self.own_work(mesh, layout)
        group = scaled(self.gpu, mesh.tensor * mesh.sequence)
        clock = GpuClock(group, self.plan, model.shape, captures=False)
        compute = clock.train_s if trains else clock.forward_s
        recomputes = bool(self.plan.config.model.activation_checkpointing)
        traffic = count_traffic(mesh, model.sizes, work, trains, recomputes)
        return {
            "computation": compute(work, model.shape),
            **traffic_s(mesh, traffic, self.links),
        }

    def update_parts(self, model: ModelOnMesh, layout: StepLayout) -> dict[str, float]:
        """Return the seconds of the updates of one step, by what takes them."""
        training = self.plan.config.training
        parts = self.passes_s(model, layout, trains=True)
        parts = {name: training.ppo_epochs * seconds for name, seconds in parts.items()}
        num_updates = training.updates_per_step * training.ppo_epochs
        shards = model.mesh.tensor * model.mesh.shards
        clock = GpuClock(self.gpu, self.plan, model.shape)
        parts["optimizer"] = num_updates * clock.optimizer_s(model.shape) / shards
        return parts

    def role_s(self, name: str, kind: str, model: Any, layout: StepLayout) -> float:
        """Return the seconds of a model besides the policy."""
        cluster = self.plan.config.cluster
        num_workers = cluster.pools.get(name, cluster.workers)
        if kind not in (
            *SHARDED_KINDS,
            SHARED_WEIGHTS,
            AVERAGED_WEIGHTS,
        ):  # complete on each worker
            alone = Mesh(num_workers)
            shape = self._shape(model, adapters=False)
            work = self.own_work(alone, layout)
            return GpuClock(self.gpu, self.plan, shape, captures=False).forward_s(work, shape)
        placed = self.place(model, num_workers, is_pool=name in cluster.pools)
        seconds = elapsed(self.passes_s(placed, layout, trains=False))
        if kind == "critic":
            seconds += elapsed(self.update_parts(placed, layout))
        return seconds

    # ---- rollouts

    @property
    def num_engines(self) -> int:
        config = self.plan.config
        return max(1, config.cluster.engines or self._workers // config.rollout.tensor_parallel)

    @property
    def _workers(self) -> int:
        return self.plan.config.cluster.workers

    @property
    def samples_on_server(self) -> bool:
        """Whether a server samples, whose devices are not known here."""
        return find_engine(self.plan.config.rollout.engine).remote

    def engine_plan(self) -> Plan:
        """Return the plan of the engine with the most groups."""
        workload = self.plan.workload
        groups = [group for group in workload.groups if group.num_samples]
        share = math.ceil(len(groups) / self.num_engines)
        return replace(self.plan, workload=Workload(groups[:share], workload.longest_prompt))

    def engine_clock(self, plan: Plan) -> GpuClock:
        """Return the clock of one engine, which rollout.tensor_parallel devices divide."""
        group = scaled(self.gpu, plan.config.rollout.tensor_parallel)
        return GpuClock(group, plan, self.policy.shape)

    def engine_cache(self, plan: Plan) -> int:
        """Return the bytes of one engine's cache of keys and values."""
        config = plan.config
        divided = config.rollout.tensor_parallel
        if config.cluster.engines:
            held = self.policy.shape.size.weights
        else:
            memory = estimate_mesh(config, plan.model, plan.roles, self.counted)
            kept = [
                size for name, size in memory.parts.items() if name in (*KEPT_PARTS, *plan.roles)
            ]
            held = divided * sum(kept)
        return max(1, GpuEstimator(scaled(self.gpu, divided)).cache_bytes(plan, held))

    def decode_exchange_s(self, num_tokens: float, rows: float) -> float:
        """Return the seconds that the devices of one engine exchange sums while they decode."""
        divided = self.plan.config.rollout.tensor_parallel
        sizes = self.policy.sizes
        num_sums = 2 * sizes.blocks * num_tokens
        nbytes = 2 * sent_share(divided) * sizes.hidden * sizes.itemsize * rows * num_sums
        return self.links.ring_s(divided, 1, nbytes, num_sums)

    def sampling_s(self, layout: StepLayout, rows_per_prompt: int = 0) -> float:
        """Return the seconds until the engine with the most rows has sampled them.

        `rows_per_prompt` replaces the number of samples.
        """
        own = self.engine_plan()
        groups = own.workload.groups
        num_rows = sum(rows_per_prompt or group.num_samples for group in groups)
        prompts = sum(group.prompt for group in groups)
        length = layout.sampled_tokens
        cache = self.engine_cache(own)
        seconds = self.engine_clock(own).generation_s(num_rows, prompts, len(groups), length, cache)
        return seconds + self.decode_exchange_s(length, num_rows)

    def publish_s(self) -> float:
        """Return the seconds until every engine has the new weights.

        Workers gather float32 shards tensor by tensor. Separate engines get them through host
        memory and the network.
        """
        config = self.plan.config
        size = self.policy.shape.size
        mesh = self.policy.mesh
        num_bytes = MASTER_BYTES * size.parameters * sent_share(mesh.workers)
        calls = TENSORS_PER_BLOCK * size.blocks
        seconds = self.links.ring_s(mesh.workers, 1, num_bytes, calls)
        if config.cluster.engines:
            own = size.weights / config.rollout.tensor_parallel
            seconds += size.weights / mesh.workers / self.gpu.host_bandwidth
            seconds += size.weights / self.links.network + own / self.gpu.host_bandwidth
        return seconds

    # ---- the step

    def step(self, stages: Sequence[str]) -> StepTime:
        """Return the seconds of one step, without verifiers, refills and checkpoints."""
        config = self.plan.config
        layout = lay_out_step(self.plan, config.rollout.max_response_tokens)
        seconds: dict[str, float] = {}
        samples_here = layout.num_sampled and not self.samples_on_server
        if samples_here:
            seconds["sample"] = self.sampling_s(layout)
            if "sample_greedy" in stages:
                seconds["sample_greedy"] = self.sampling_s(layout, rows_per_prompt=1)
        if "compute_old_logprobs" in stages:
            parts = self.passes_s(self.policy, layout, trains=False)
            seconds["compute_old_logprobs"] = elapsed(parts)
        for name, (kind, model) in self.plan.roles.items():
            seconds[name] = self.role_s(name, kind, model, layout)
        update = self.update_parts(self.policy, layout)
        seconds["update"] = elapsed(update)
        if samples_here:
            seconds[PUBLISH] = self.publish_s()
        return StepTime(seconds, update, self.plan.rollouts_overlap)


def elapsed(parts: dict[str, float]) -> float:
    """Return the seconds of passes whose sharding runs beside their computation."""
    beside = ("computation", "sharding")
    others = sum(seconds for name, seconds in parts.items() if name not in beside)
    return max(parts.get(name, 0.0) for name in beside) + others


def scaled(gpu: GpuSpec, num_devices: int) -> GpuSpec:
    """Return this many GPUs as if they were one."""
    return replace(
        gpu,
        memory=gpu.memory * num_devices,
        flops=gpu.flops * num_devices,
        bandwidth=gpu.bandwidth * num_devices,
    )
