"""The memory of a run on one GPU: packed passes, captured graphs, paged cache, optimizer.

Counted is what torch allocates, captured graphs and the cache included: `memory_gib` of a run's
metrics. The context of CUDA is not (devices.UNUSABLE_BYTES).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from postgrad.config.schema import Config
from postgrad.model.device import DTYPES
from postgrad.model.parallel.experts import count_experts
from postgrad.model.passes.captured import MAX_BLOCK_OPERATIONS, padded_size
from postgrad.rollout.native.pages import (
    KEPT_CACHE_BYTES,
    PAGE,
    graph_rows,
    largest_cache,
    num_pages,
)
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.memory import (
    Memory,
    optimizer_working_bytes,
    state_bytes,
    state_bytes_on_device,
)
from postgrad.sizing.packed import PackedSimulation
from postgrad.sizing.plan import Plan, StepLayout, lay_out_step, role_weight_bytes
from postgrad.sizing.simulate import ModelSize, measure_size

PREFILL_TOKENS = 16384  # of rollout/native/paged_prefill.py
VLLM_BLOCK = 128  # of rollout/vllm.py
VLLM_ROWS = 1024


class Widths(NamedTuple):
    """Columns of the matrices of a block."""

    hidden: int
    intermediate: int
    query: int
    key: int

    @staticmethod
    def of(model_config: Any) -> "Widths":
        text = model_config.get_text_config()
        heads = int(text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        intermediate = int(text.intermediate_size)
        if count_experts(model_config):  # of the experts that a token uses
            intermediate = int(getattr(text, "moe_intermediate_size", None) or intermediate)
            intermediate *= int(text.num_experts_per_tok)
        return Widths(
            int(text.hidden_size),
            intermediate,
            heads * head_dim,
            key_heads * head_dim,
        )


def kept_bytes(widths: Widths, itemsize: int) -> int:
    """Return the activations of one token in one block, without checkpointing and LoRA."""
    block = 4 * widths.hidden + 2 * widths.intermediate + 3 * widths.query + 4 * widths.key
    return block * itemsize


class Passes(NamedTuple):
    """Bytes of a step's training passes."""

    pool: int  # of captured graphs; held from then on
    activations: int  # of the largest pass that is not captured
    extra: int  # beyond activations and pool, at most


@dataclass
class GpuEstimator:
    """Estimates the memory of one model's run with different settings; simulates it once.

    Args:
        gpu: where the run computes.
        detachable: the cache gives its memory back between rollouts, as with CUDA's driver.
    """

    gpu: GpuSpec
    detachable: bool = True
    simulations: dict[tuple[Any, ...], PackedSimulation] = field(default_factory=dict)

    def estimate(self, plan: Plan) -> Memory:
        """Return the peak memory of the run by what holds it."""
        config = plan.config
        size = measure_size(config, plan.model)
        layout = lay_out_step(plan, config.rollout.max_response_tokens)
        passes = self.passes(plan, size, layout)
        gradients = 4 * size.trained
        buffers = 4 * size.block * size.blocks if passes.pool else 0
        held = {
            "weights": size.weights,
            **state_bytes_on_device(config, size),
            "captured passes": passes.pool,
            "captured gradients": buffers,
        }
        role_memory, role_phases = self._roles(plan, layout)
        held |= role_memory
        rollout_held, rollout = self._rollout(plan, size, sum(held.values()))
        held |= rollout_held
        kept_attention = kept_attention_bytes(plan, layout)
        update_gradients = gradients - buffers
        if len(layout.passes) == 1 and not passes.pool:
            # They come in the place of activations. The head's are there before the blocks'.
            head = 0 if config.model.lora.rank else 4 * size.vocabulary * plan.width
            in_place = passes.activations + kept_attention
            update_gradients = min(gradients, max(head, gradients - in_place))
        phases = {
            "update": {
                "gradients": update_gradients,
                "activations": passes.activations,
                "head and working memory": passes.extra,
                "kept attention": kept_attention,
            },
            "optimizer step": {
                "gradients": gradients - buffers,
                "working copy": optimizer_working_bytes(config, size),
            },
            "rollout": rollout,
            **role_phases,
        }
        return Memory(
            held={name: size for name, size in held.items() if size},
            phases={name: parts for name, parts in phases.items() if sum(parts.values())},
        )

    def passes(self, plan: Plan, size: ModelSize, layout: StepLayout) -> Passes:
        """Return the bytes of the step's passes, in the order in which they run.

        All are captured or none. A pass is captured after one run outside of the graph's memory,
        beside earlier graphs.
        """
        captures = is_captured(plan.config, size, max(tokens for tokens, _ in layout.passes))
        simulation = self.simulation(plan.config, plan.model)
        pool = 0
        captured: set[int] = set()
        activations = 0
        peak = 0  # beyond the pool
        for tokens, response_tokens in layout.passes:
            if not captures:
                one = simulation.run(tokens, response_tokens)
                activations = max(activations, one.kept)
                peak = max(peak, one.peak)
                continue
            size_of_graph = padded_size(tokens)
            one = simulation.run(size_of_graph, response_tokens)
            needed = one.kept + one.blocks_extra
            if pool and size_of_graph not in captured:
                peak = max(peak, needed)
            captured.add(size_of_graph)
            pool = max(pool, needed)
            peak = max(peak, one.head_extra)
        return Passes(pool, activations, peak - activations)

    def simulation(self, config: Config, model: Any, adapters: bool = True) -> PackedSimulation:
        """Return the simulation of this model's passes."""
        settings = config.model
        rank = settings.lora.rank if adapters else 0
        recomputes = settings.activation_checkpointing
        key = (id(model), settings.dtype, recomputes, settings.quantization, rank)
        if key not in self.simulations:
            self.simulations[key] = PackedSimulation(config, model, adapters)
        return self.simulations[key]

    def _roles(
        self, plan: Plan, layout: StepLayout
    ) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
        """Return what the models besides the policy hold, and the update phase of each critic."""
        held: dict[str, int] = {}
        phases: dict[str, dict[str, int]] = {}
        for name, (kind, model) in plan.roles.items():
            size = measure_size(plan.config, model, adapters=False)
            held[name] = role_weight_bytes(kind, size)
            if kind == "critic":
                state = state_bytes_on_device(plan.config, size)
                held[f"{name}'s optimizer"] = sum(state.values())
                simulation = self.simulation(plan.config, model, adapters=False)
                tokens, response_tokens = max(layout.passes)
                one = simulation.run(tokens, response_tokens)
                phases[f"{name}'s update"] = {
                    "gradients": 4 * size.parameters,
                    "activations": one.kept + one.blocks_extra,
                }
        return held, phases

    # ---- rollouts

    def _rollout(
        self, plan: Plan, size: ModelSize, held: int
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return what rollouts hold all the time, and what they need while they run."""
        if not plan.decode_rows:
            return {}, {}
        config = plan.config
        if config.rollout.engine == "vllm":
            return {}, self._vllm(plan, size, held)
        masters = 0
        if config.cluster.engine_apart:
            masters = state_bytes(config, size)["float32 masters"]
            held += size.weights + masters
        cache = self.cache_bytes(plan, held)
        step = decode_step_bytes(plan, size)
        prompts = sum(group.prompt for group in plan.workload.groups)
        prefill = prefill_bytes(plan, min(PREFILL_TOKENS, prompts))
        working = {"sampling and prefill": max(step, prefill)}
        is_detached = self._detaches(plan) and cache > KEPT_CACHE_BYTES
        if config.cluster.engine_apart:  # its process keeps what it has worked with
            own = size.weights + masters + step + sum(working.values())
            if is_detached:
                return {"engine process": own}, {"KV cache": cache}
            return {"engine process": own + cache}, {}
        if is_detached:
            return {"decode graphs": step}, {"KV cache": cache, **working}
        return {"KV cache": cache, "decode graphs": step}, working

    def _detaches(self, plan: Plan) -> bool:
        """Return whether the cache gives its memory back while the trainer works."""
        return self.detachable and not plan.rollouts_overlap

    def cache_bytes(self, plan: Plan, held: int) -> int:
        """Return the bytes of the paged cache; `held` are those that other things hold.

        It holds at least one row, without which nothing can be sampled.
        """
        config = plan.config
        if config.rollout.cache_gib:
            limit = int(config.rollout.cache_gib * 2**30)
        else:
            is_detachable = self.detachable and not config.rollout.stream
            limit = largest_cache(max(0, self.gpu.usable - held), is_detachable)
        row = plan.workload.longest_prompt + config.rollout.max_response_tokens
        one_row = (num_pages(row) + 2) * PAGE * token_cache_bytes(plan)
        return min(max(limit, one_row), wanted_cache_bytes(plan))

    def _vllm(self, plan: Plan, size: ModelSize, held: int) -> dict[str, int]:
        """Return what vLLM takes while it is awake: its own weights, a float32 head, its cache."""
        config = plan.config
        rows = min(plan.max_rows, VLLM_ROWS)
        prompt = config.data.max_prompt_tokens
        tokens = min(size.context, prompt + config.rollout.max_response_tokens) + VLLM_BLOCK
        needed = max(rows * tokens, size.context + VLLM_BLOCK) * token_cache_bytes(plan)
        free = max(0, self.gpu.usable - held)
        cache = int(config.rollout.cache_gib * 2**30) or min(free // 3, needed)
        head = 4 * size.vocabulary * plan.width if config.model.dtype == "bfloat16" else 0
        return {
            "vLLM's weights": size.weights,
            "vLLM's head in float32": head,
            "vLLM's KV cache": cache,
        }


def is_captured(config: Config, size: ModelSize, tokens: int) -> bool:
    """Return whether a pass over this many tokens is captured as a graph (passes/captured.py)."""
    if config.model.lora.rank or config.model.activation_checkpointing:
        return False
    return 6 * size.block * tokens <= MAX_BLOCK_OPERATIONS


def num_kept_attention(config: Config, num_blocks: int) -> int:
    """Return the blocks whose attention is not computed again in the backward pass."""
    model = config.model
    if not model.activation_checkpointing:
        return 0
    return min(model.kept_attention_blocks or 0, num_blocks)


def block_attention_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the bytes of one block's attention outputs in the largest pass of a step."""
    text = plan.model.get_text_config()
    each = DTYPES[plan.config.model.dtype].itemsize
    token = Widths.of(plan.model).query * each + 4 * int(text.num_attention_heads)
    return token * max(tokens for tokens, _ in layout.passes)


def kept_attention_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the bytes of the attention outputs that recomputed blocks keep."""
    num_blocks = int(plan.model.get_text_config().num_hidden_layers)
    num_kept = num_kept_attention(plan.config, num_blocks)
    return num_kept * block_attention_bytes(plan, layout) if num_kept else 0


def token_cache_bytes(plan: Plan) -> int:
    """Return the bytes of the keys and values of one token in all blocks."""
    text = plan.model.get_text_config()
    each = DTYPES[plan.config.model.dtype].itemsize
    return 2 * int(text.num_hidden_layers) * Widths.of(plan.model).key * each


def wanted_cache_bytes(plan: Plan) -> int:
    """Return the bytes of a paged cache in which all rows decode at the same time."""
    limit = plan.config.rollout.max_response_tokens
    groups = [group for group in plan.workload.groups if group.num_samples]
    prompt_pages = sum(num_pages(group.prompt - 1) for group in groups)
    pages = graph_rows(plan.decode_rows) * num_pages(limit) + prompt_pages + 1
    return pages * PAGE * token_cache_bytes(plan)


def decode_step_bytes(plan: Plan, size: ModelSize) -> int:
    """Return the bytes that one decode step allocates: logits in float32, and a block's tensors."""
    widths = Widths.of(plan.model)
    each = DTYPES[plan.config.model.dtype].itemsize
    block = 4 * widths.hidden + 3 * widths.query + 2 * widths.key + 3 * widths.intermediate
    return graph_rows(plan.decode_rows) * (4 * size.vocabulary + each * block)


def prefill_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes that one prefill pass allocates: the widest tensors of one block."""
    widths = Widths.of(plan.model)
    each = DTYPES[plan.config.model.dtype].itemsize
    return tokens * each * (4 * widths.hidden + 3 * widths.intermediate)
