"""The time of a run on one GPU: operations at the device's rate, bytes at its bandwidth.

The constants are shares of these rates that the kernels reach, measured on an H200 with Qwen3's
shapes (docs/lab.md); tests compare the result with measured steps of four sizes.
"""

from dataclasses import dataclass
from typing import Any

from postgrad.model.device import DTYPES
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.gpu_memory import (
    Widths,
    is_captured,
    kept_bytes,
    num_kept_attention,
    token_cache_bytes,
    wanted_cache_bytes,
)
from postgrad.sizing.plan import Plan, StepLayout
from postgrad.sizing.simulate import ModelSize, measure_size

# Shares of the arithmetic of a large square product.
TRAINING_PRODUCTS = 0.92  # 4B, passes of 7,000 tokens
DECODE_PRODUCTS = 0.71  # 4B, 256 rows: 562 TFLOP/s
# Packed attention of wide heads: LONG · keys / (keys + HALF_KEYS); keys is the mean per query.
# Forward and backward together reach 32% for rows of 1,025 tokens and 69% for one row of 16,384.
LONG_ATTENTION = 0.77
HALF_ATTENTION_KEYS = 860
# Operations per pair of query and key, and per column of the heads: two products forward; seven
# backward, because both gradient kernels compute the scores again.
ATTENTION_FORWARD = 4
ATTENTION_BACKWARD = 14
# Share of the bandwidth at which a decode step reads keys and values.
DECODE_ATTENTION = 0.86
# Bytes moved per byte of kept activations by norms, gates, rotary positions, sums and copies,
# forward and backward: 0.18 s for 33,000 tokens of 4B.
ACTIVATION_TRAFFIC = 7.1
FORWARD_TRAFFIC_SHARE = 1 / 3
# Bytes moved per weight and captured pass to add a gradient to the float32 sums: 0.13 s for five
# passes of 4B. In other passes the products add it.
GRADIENT_TRAFFIC = 28
# Bytes per logit: written and read forward and backward in float32, its gradient in bfloat16.
LOGIT_TRAFFIC = 22
LOGIT_FORWARD_TRAFFIC = 8
DECODE_LOGIT_TRAFFIC = 12
# Bytes per trained weight of an optimizer step: gradients three times, masters and moments read
# and written, weights written.
OPTIMIZER_TRAFFIC = 46
UNFUSED_OPTIMIZER_TRAFFIC = 90  # one kernel per operation
OFFLOADED_STATE = 12  # bytes per weight that move to the device and back
MUON_PRODUCTS = 5 * 3  # products with the matrix's smaller side: five iterations
KERNEL_S = 5e-6  # the shortest kernel of a captured graph, with the gap before it
DECODE_PRODUCT_KERNELS = 4
DECODE_OTHER_KERNELS = 4
# A block of a training pass that is not captured, at least: the host launches kernel by kernel.
# Measured: 3.7 s for 29 passes over 30 blocks that take the GPU 0.7 s.
LAUNCH_S = 4e-3


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its time follows from."""

    size: ModelSize
    widths: Widths
    itemsize: int

    @staticmethod
    def of(plan: Plan, model_config: Any, adapters: bool = True) -> "Shape":
        size = measure_size(plan.config, model_config, adapters)
        itemsize = DTYPES[plan.config.model.dtype].itemsize
        return Shape(size, Widths.of(model_config), itemsize)

    @property
    def head(self) -> int:
        """Weights of the head."""
        return self.size.vocabulary * self.widths.hidden


@dataclass(frozen=True)
class Work:
    """The tokens of a step."""

    tokens: int  # of all passes
    response_tokens: int
    num_passes: int
    attention_pairs: float  # of query and key, of all rows


def count_work(plan: Plan, layout: StepLayout) -> Work:
    """Return the tokens that the step's packed passes compute."""
    responses: list[int] = []
    pairs = 0.0
    for group in plan.workload.groups:
        shared = group.prompt - 1
        own = group.responses(layout.sampled_tokens)
        responses += own
        pairs += shared**2 / 2 + sum(shared * length + length**2 / 2 for length in own)
    return Work(layout.padded_tokens, sum(responses), layout.num_passes, pairs)


class GpuClock:
    """Computes the seconds of passes, decode steps and updates on one GPU.

    Args:
        gpu: where the run computes.
        plan: the run.
        shape: of the policy, if it was counted before.
        captures: short passes run as captured graphs, as they do in one process.
    """

    def __init__(
        self, gpu: GpuSpec, plan: Plan, shape: Shape | None = None, captures: bool = True
    ) -> None:
        self.gpu = gpu
        self.plan = plan
        self.shape = shape or Shape.of(plan, plan.model)
        self.captures = captures
        self.token_cache = token_cache_bytes(plan)

    # ---- passes

    def forward_s(self, work: Work, shape: Shape) -> float:
        """Return the seconds of log-probs without gradient."""
        flops = 2 * shape.size.active_block * shape.size.blocks * work.tokens
        flops += 2 * shape.head * work.response_tokens
        seconds = flops / (TRAINING_PRODUCTS * self.gpu.flops)
        seconds += self._attention_s(work, shape, ATTENTION_FORWARD)
        traffic = self._kept_bytes(shape) * ACTIVATION_TRAFFIC * FORWARD_TRAFFIC_SHARE * work.tokens
        traffic += LOGIT_FORWARD_TRAFFIC * work.response_tokens * shape.size.vocabulary
        return max(seconds + traffic / self.gpu.bandwidth, self._launches_s(work, shape) / 3)

    def train_s(self, work: Work, shape: Shape) -> float:
        """Return the seconds of forward and backward passes."""
        config = self.plan.config
        is_full = not config.model.lora.rank
        products = 3 if is_full else 2  # forward, gradient of inputs, gradient of weights
        products += int(bool(config.model.activation_checkpointing))
        blocks = shape.size.active_block * shape.size.blocks
        flops = 2.0 * products * blocks * work.tokens
        # The head's logits are computed twice.
        flops += 2.0 * (4 if is_full else 3) * shape.head * work.response_tokens
        seconds = flops / (TRAINING_PRODUCTS * self.gpu.flops)
        attention = ATTENTION_FORWARD + ATTENTION_BACKWARD
        traffic = self._kept_bytes(shape) * ACTIVATION_TRAFFIC * work.tokens
        if config.model.activation_checkpointing:
            num_kept = num_kept_attention(config, shape.size.blocks)
            attention += ATTENTION_FORWARD * (1 - num_kept / shape.size.blocks)
            traffic *= 1 + FORWARD_TRAFFIC_SHARE
        seconds += self._attention_s(work, shape, attention)
        traffic += LOGIT_TRAFFIC * work.response_tokens * shape.size.vocabulary
        if self._is_captured(work, shape):
            traffic += GRADIENT_TRAFFIC * shape.size.trained * work.num_passes
        return max(seconds + traffic / self.gpu.bandwidth, self._launches_s(work, shape))

    def _attention_s(self, work: Work, shape: Shape, operations: float) -> float:
        keys = work.attention_pairs / max(1, work.tokens)
        share = LONG_ATTENTION * keys / (keys + HALF_ATTENTION_KEYS)
        flops = operations * work.attention_pairs * shape.widths.query * shape.size.blocks
        return flops / (share * self.gpu.flops) if flops else 0.0

    def _launches_s(self, work: Work, shape: Shape) -> float:
        """Return the host's seconds for passes that are not captured as graphs."""
        if self._is_captured(work, shape):
            return 0.0
        return LAUNCH_S * work.num_passes * shape.size.blocks

    def _is_captured(self, work: Work, shape: Shape) -> bool:
        tokens = work.tokens // max(1, work.num_passes)
        return self.captures and is_captured(self.plan.config, shape.size, tokens)

    def _kept_bytes(self, shape: Shape) -> float:
        """Return the activations of one token in all blocks, without checkpointing."""
        return kept_bytes(shape.widths, shape.itemsize) * shape.size.blocks

    def optimizer_s(self, shape: Shape) -> float:
        """Return the seconds of one optimizer step."""
        kind = self.plan.config.optimizer.kind
        trained = shape.size.trained
        if kind == "adamw_offloaded":
            return OFFLOADED_STATE * trained / self.gpu.host_bandwidth
        per_weight = OPTIMIZER_TRAFFIC if kind == "adamw_fused" else UNFUSED_OPTIMIZER_TRAFFIC
        seconds = per_weight * trained / self.gpu.bandwidth
        if kind == "muon":
            # Products of a (rows, columns) matrix with its smaller side; a square one is the most.
            side = shape.widths.hidden
            seconds += 2 * MUON_PRODUCTS * side * shape.size.matrices / self.gpu.flops
        return seconds

    # ---- decoding

    def decode_step_s(self, rows: int, own: float, shared: float) -> float:
        """Return the seconds of one decode step.

        Args:
            rows: that decode at the same time.
            own: mean tokens that a row has for itself.
            shared: mean prompt tokens per row, those of one prompt divided by its rows.
        """
        shape = self.shape
        each = shape.itemsize
        size = shape.size
        products = self._products_s(size.active_block, rows, size.touched_block(rows))
        cache = (own + shared) * rows * self.token_cache / shape.size.blocks
        attention = cache / (DECODE_ATTENTION * self.gpu.bandwidth)
        other = rows * each * (3 * shape.widths.intermediate + 12 * shape.widths.hidden)
        block = max(products, DECODE_PRODUCT_KERNELS * KERNEL_S)
        block += max(attention, KERNEL_S)
        block += max(other / self.gpu.bandwidth, DECODE_OTHER_KERNELS * KERNEL_S)
        logits = DECODE_LOGIT_TRAFFIC * rows * shape.size.vocabulary / self.gpu.bandwidth
        return shape.size.blocks * block + self._products_s(shape.head, rows, shape.head) + logits

    def _products_s(self, weights: float, rows: int, read: float) -> float:
        """Return the seconds of products with `weights` per row; `read` weights are loaded."""
        flops = 2 * weights * rows / (DECODE_PRODUCTS * self.gpu.flops)
        return max(flops, read * self.shape.itemsize / self.gpu.bandwidth)

    def generation_s(
        self, num_rows: int, prompt_tokens: int, num_prompts: int, length: int, cache: int
    ) -> float:
        """Return the seconds to sample `length` tokens for each row.

        The prompts are computed once. Rows that do not fit into `cache` bytes wait for others.
        """
        wanted = max(1, wanted_cache_bytes(self.plan))
        rows = min(num_rows, self.plan.max_rows)
        rows = max(1, min(rows, round(rows * cache / wanted)))
        rows_per_prompt = max(1.0, num_rows / max(1, num_prompts))
        mean_prompt = prompt_tokens / max(1, num_prompts)
        step = self.decode_step_s(rows, length / 2, mean_prompt / rows_per_prompt)
        prompts = Work(prompt_tokens, 0, 1, prompt_tokens * mean_prompt / 2)
        return num_rows / rows * length * step + self.forward_s(prompts, self.shape)

    # ---- the step

    def step(self, stages: list[str], layout: StepLayout, cache: int) -> dict[str, float]:
        """Return the seconds of one step by stage, without verifiers, refills and checkpoints."""
        plan = self.plan
        training = plan.config.training
        work = count_work(plan, layout)
        num_updates = training.updates_per_step * training.ppo_epochs
        num_prompts = sum(1 for group in plan.workload.groups if group.num_samples)
        seconds: dict[str, float] = {}
        for name, num_rows in (("sample", layout.num_sampled), ("sample_greedy", num_prompts)):
            if num_rows and (name == "sample" or name in stages):
                seconds[name] = self.generation_s(
                    num_rows, layout.prompt_tokens, num_prompts, layout.sampled_tokens, cache
                )
        if "compute_old_logprobs" in stages:
            seconds["compute_old_logprobs"] = self.forward_s(work, self.shape)
        for name, (kind, model) in plan.roles.items():
            other = Shape.of(plan, model, adapters=False)
            seconds[name] = self.forward_s(work, other)
            if kind == "critic":
                seconds[name] += training.ppo_epochs * self.train_s(work, other)
                seconds[name] += num_updates * self.optimizer_s(other)
        seconds["update"] = training.ppo_epochs * self.train_s(work, self.shape)
        seconds["update"] += num_updates * self.optimizer_s(self.shape)
        return seconds

    def validation_s(self, cache: int) -> float:
        """Return the seconds of one validation, greedy and sampled."""
        workload = self.plan.workload
        training = self.plan.config.training
        if not workload.num_validation:
            return 0.0
        all_prompts = sum(group.prompt for group in workload.groups)
        prompt_tokens = workload.num_validation * all_prompts // len(workload.groups)
        seconds = self.generation_s(
            workload.num_validation * training.validation_samples,
            prompt_tokens,
            workload.num_validation,
            self.plan.config.rollout.max_response_tokens,
            cache,
        )
        return seconds * (2 if training.validation_temperature is None else 1)
