"""The memory of a run by what holds it: weights, optimizer, passes, graphs, cache, other models.

Counted is what torch allocates, captured graphs and the cache included: `memory_gib` of a run's
metrics. On a CPU the process itself counts too. The context of CUDA does not (devices.py).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from postgrad.config.schema import Config
from postgrad.model.device import DTYPES, supports_state_streaming
from postgrad.model.optimizers import adamw_8bit
from postgrad.model.optimizers.offload import NUM_SLOTS, SLICE_ELEMENTS
from postgrad.model.parallel.experts import count_experts
from postgrad.model.passes.captured import MAX_BLOCK_OPERATIONS, padded_size
from postgrad.rollout.native.pages import (
    KEPT_CACHE_BYTES,
    PAGE,
    graph_rows,
    largest_cache,
    num_pages,
)
from postgrad.sizing.devices import Device
from postgrad.sizing.simulate import ModelSize, measure_size, simulation_of
from postgrad.sizing.workload import (
    SHARED_WEIGHTS,
    Pass,
    Plan,
    StepLayout,
    lay_out_step,
)

PREFILL_TOKENS = 16384  # of rollout/native/prefill.py
VLLM_BLOCK = 128  # of rollout/vllm.py
VLLM_ROWS = 1024
MAX_KERNELS = 1024  # matrix shapes whose kernels oneDNN keeps
# Share of a phase that the CPU heap loses to gaps between tensors; measured 0.1 to 0.3.
HEAP_SLACK = 0.25
# Copies of its largest matrix that Muon holds while it orthogonalizes it: the step in float32, and
# in bfloat16 the matrix, its product with itself, a polynomial of that and the result.
MUON_COPY_BYTES = 4 + 4 * 2

# Numbers that a block of a tower keeps per patch, in hidden and in intermediate widths: measured
# 9 to 13 and 2 to 4.
TOWER_WIDTHS = (11, 2.5)

Parts = dict[str, int]  # bytes by what holds them


@dataclass(frozen=True)
class Memory:
    """Bytes by what holds them. The peak is `held`, which is permanent, plus the largest phase."""

    held: Parts
    phases: dict[str, Parts]  # one after the other

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak(self) -> int:
        return self.bytes_in(self.peak_phase)

    def bytes_in(self, phase: str) -> int:
        """Return all bytes of one phase."""
        return sum(self.held.values()) + sum(self.phases.get(phase, {}).values())


def estimate(plan: Plan, device: Device) -> Memory:
    """Return the peak memory of the run by what holds it."""
    config = plan.config
    size = measure_size(config, plan.model)
    layout = lay_out_step(plan)
    passes = pass_bytes(plan, size, layout)
    gradients = 4 * size.trained
    captured_gradients = 4 * size.block * size.blocks if passes.pool else 0
    in_own_process = config.cluster.backend == "process"
    role_memory, role_phases = _roles(plan, layout)
    held = {
        "process": device.process,
        "driver process": device.process if in_own_process else 0,
        "kernels by shape": device.kernel * _num_kernels(plan, size, layout),
        "weights": size.weights,
        **state_bytes_on_device(config, size),
        "captured passes": passes.pool,
        "captured gradients": captured_gradients,
        **role_memory,
    }
    pictures_held, pictures = picture_bytes(plan, layout)
    held |= pictures_held
    rollout_held, rollout = _rollout(plan, size, device, sum(held.values()))
    phases = {
        "update": {
            "gradients": _gradients_beside_activations(plan, size, layout, passes)
            - captured_gradients,
            "activations": passes.activations,
            "head and working memory": passes.extra,
            "kept attention": kept_attention_bytes(plan, layout),
            **pictures,
            "dequantized weights": 0 if plan.packed else size.dequantized,
        },
        "optimizer step": {
            "gradients": gradients - captured_gradients,
            "working copy": optimizer_working_bytes(config, size),
        },
        "rollout": rollout,
        **role_phases,
    }
    if config.model.device == "cpu":
        for parts in phases.values():
            parts["heap slack"] = round(HEAP_SLACK * sum(parts.values()))
    return Memory(
        held=_without_zeros(held | rollout_held),
        phases={name: kept for name, parts in phases.items() if (kept := _without_zeros(parts))},
    )


def _without_zeros(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if size}


# ---- weights and optimizer


def state_bytes(config: Config, size: ModelSize) -> Parts:
    """Return the bytes of a model's optimizer state, on the device or off it.

    Muon keeps one float32 number per weight of the blocks' matrices; AdamW keeps two.
    """
    per_parameter = {"adamw_8bit": 2, "rmsprop": 4}.get(config.optimizer.kind, 8)
    state = per_parameter * size.trained
    if config.optimizer.kind == "muon":
        state -= 4 * size.matrices
    master = 0 if config.model.dtype == "float32" else 4
    return {"optimizer state": state, "float32 masters": master * size.trained}


def state_bytes_on_device(config: Config, size: ModelSize) -> Parts:
    """Return the bytes of a model's optimizer state on the device."""
    device = torch.device(config.model.device)
    if config.optimizer.kind == "adamw_offloaded" and supports_state_streaming(device):
        return {}
    return state_bytes(config, size)


def optimizer_working_bytes(config: Config, size: ModelSize) -> int:
    """Return the extra bytes of an optimizer step.

    AdamW updates one tensor at a time on the CPU, all at once elsewhere. Muon does so one by one.
    """
    kind = config.optimizer.kind
    if kind == "adamw_fused":
        return 0
    if kind == "adamw_8bit":  # two moments, numbers of levels and their inputs in float32 or int64
        return 7 * 4 * min(adamw_8bit.SLICE_ELEMENTS, size.largest)
    if config.model.device == "cpu":
        return 2 * 4 * size.largest
    if kind == "adamw_offloaded":
        return NUM_SLOTS * 3 * 4 * SLICE_ELEMENTS
    if kind == "muon":
        return max(MUON_COPY_BYTES * size.largest, 4 * (size.trained - size.matrices))
    return 4 * size.trained


def role_weight_bytes(kind: str, size: ModelSize) -> int:
    """Return the bytes of the weights of a model besides the policy, in one process."""
    return 0 if kind == SHARED_WEIGHTS else size.weights


def _roles(plan: Plan, layout: StepLayout) -> tuple[Parts, dict[str, Parts]]:
    """Return what the models besides the policy hold, and the update phase of each critic."""
    held: Parts = {}
    phases: dict[str, Parts] = {}
    for name, (kind, model) in plan.roles.items():
        size = measure_size(plan.config, model, adapters=False)
        held[name] = role_weight_bytes(kind, size)
        if kind == "critic":
            held[f"{name}'s optimizer"] = sum(state_bytes_on_device(plan.config, size).values())
            one = simulation_of(plan, model, adapters=False).run(layout.largest_pass)
            phases[f"{name}'s update"] = {
                "gradients": 4 * size.parameters,
                "activations": one.kept + one.blocks_extra,
            }
    return held, phases


# ---- training passes


class PassBytes(NamedTuple):
    """Bytes of a step's training passes."""

    pool: int  # of captured graphs; held from then on
    activations: int  # of the largest pass that is not captured
    extra: int  # beyond activations and pool, at most


def pass_bytes(plan: Plan, size: ModelSize, layout: StepLayout) -> PassBytes:
    """Return the bytes of the step's passes, in the order in which they run.

    All are captured or none. A pass is captured after one run outside of the graph's memory,
    beside earlier graphs.
    """
    simulation = simulation_of(plan, plan.model)
    if not is_captured(plan, size, layout.largest_pass.tokens):
        extremes = {layout.largest_pass, max(layout.passes, key=lambda one: one.response_tokens)}
        simulated = [simulation.run(one) for one in extremes]
        activations = max(one.kept for one in simulated)
        return PassBytes(0, activations, max(one.peak for one in simulated) - activations)
    pool = 0
    extra = 0
    captured: set[int] = set()
    for tokens, response_tokens, _ in layout.passes:
        size_of_graph = padded_size(tokens)
        one = simulation.run(Pass(size_of_graph, response_tokens))
        needed = one.kept + one.blocks_extra
        if pool and size_of_graph not in captured:
            extra = max(extra, needed)
        captured.add(size_of_graph)
        pool = max(pool, needed)
        extra = max(extra, one.head_extra)
    return PassBytes(pool, 0, extra)


def is_captured(plan: Plan, size: ModelSize, tokens: int) -> bool:
    """Return whether a pass over this many tokens is captured as a graph (passes/captured.py)."""
    model = plan.config.model
    if not plan.packed or model.lora.rank or model.activation_checkpointing:
        return False
    if plan.model.get_text_config() is not plan.model:  # it also reads pictures
        return False
    return 6 * size.block * tokens <= MAX_BLOCK_OPERATIONS


def _gradients_beside_activations(
    plan: Plan, size: ModelSize, layout: StepLayout, passes: PassBytes
) -> int:
    """Return the bytes of gradients on top of the activations.

    In a single pass they come in the place of activations, but the head's are there before the
    blocks'. A later pass begins beside all gradients of the first.
    """
    gradients = 4 * size.trained
    if len(layout.passes) > 1 or passes.pool:
        return gradients
    head = (
        0
        if plan.config.model.lora.rank
        else 4 * size.vocabulary * LayerWidths.of(plan.model).hidden
    )
    in_place = passes.activations + kept_attention_bytes(plan, layout)
    return min(gradients, max(head, gradients - in_place))


def block_attention_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the bytes of one block's attention outputs in the largest pass of a step."""
    text = plan.model.get_text_config()
    each = DTYPES[plan.config.model.dtype].itemsize
    token = LayerWidths.of(plan.model).query * each + 4 * int(text.num_attention_heads)
    return token * layout.largest_pass.tokens


def kept_attention_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the bytes of the attention outputs that recomputed blocks keep."""
    model = plan.config.model
    if not (model.activation_checkpointing and model.kept_attention_blocks):
        return 0
    num_blocks = int(plan.model.get_text_config().num_hidden_layers)
    return min(model.kept_attention_blocks, num_blocks) * block_attention_bytes(plan, layout)


def picture_bytes(plan: Plan, layout: StepLayout) -> tuple[Parts, Parts]:
    """Return what pictures hold all the time, and in an update.

    The activations of a trained tower follow from its widths: to run it takes real pictures.
    """
    tokens, pixel_bytes = plan.workload.pictures
    if not tokens:
        return {}, {}
    from postgrad.model.vision import KEPT_FEATURE_BYTES, KEPT_PIXEL_BYTES

    settings = plan.config.model
    tower = plan.model.vision_config
    each = DTYPES[settings.dtype].itemsize
    held: Parts = {}
    if settings.device == "cpu":
        held["pixels of pictures"] = min(KEPT_PIXEL_BYTES, round(tokens * pixel_bytes))
    if settings.vision == "frozen":
        num_models = 1 + sum(kind != SHARED_WEIGHTS for kind, _ in plan.roles.values())
        layers = 1 + len(getattr(tower, "deepstack_visual_indexes", None) or ())
        features = tokens * layers * LayerWidths.of(plan.model).hidden * each
        held["features of pictures"] = num_models * min(KEPT_FEATURE_BYTES, features)
        return held, {}
    side = tower.patch_size
    area = side * side if isinstance(side, int) else side[0] * side[1]
    patch_bytes = 4 * 3 * area * getattr(tower, "temporal_patch_size", 1)
    patches = max(one.image_tokens for one in layout.passes) * pixel_bytes / patch_bytes
    width = int(getattr(tower, "embed_dim", tower.hidden_size))  # hidden_size is Qwen2-VL's output
    inner = getattr(tower, "intermediate_size", 0) or int(tower.mlp_ratio * width)
    block = TOWER_WIDTHS[0] * width + TOWER_WIDTHS[1] * inner
    depth = int(getattr(tower, "depth", 0) or tower.num_hidden_layers)
    kept = depth * width + block if settings.activation_checkpointing else depth * block
    return held, {"activations of the tower": round(patches * kept * each)}


def _num_kernels(plan: Plan, size: ModelSize, layout: StepLayout) -> int:
    """Return the number of matrix shapes whose kernels a CPU keeps.

    Rows leave the engine one by one, and passes differ if lengths do.
    """
    steps = plan.config.training.steps
    all_alike = not layout.num_sampled and len(set(plan.workload.groups)) == 1
    num_passes = 1 if all_alike else layout.num_passes * steps
    decode_shapes = min(plan.decode_rows, steps * plan.config.rollout.max_response_tokens)
    return min(MAX_KERNELS, size.linears * (decode_shapes + 3 * num_passes))


# ---- rollouts


def _rollout(plan: Plan, size: ModelSize, device: Device, held: int) -> tuple[Parts, Parts]:
    """Return what rollouts hold all the time, and what they need while they run.

    `held` are the bytes that everything else holds.
    """
    config = plan.config
    if not plan.decode_rows:
        return {}, {}
    if plan.packed and config.rollout.engine == "vllm":
        return {}, _vllm(plan, size, device, held)
    apart = config.cluster.engines > 0
    masters = state_bytes(config, size)["float32 masters"] if apart else 0
    graphs = 0
    if plan.packed:
        graphs = decode_step_bytes(plan, size)
        cache = cache_bytes(plan, device, held + (size.weights + masters if apart else 0))
        prompts = sum(group.prompt for group in plan.workload.groups)
        working = max(graphs, prefill_bytes(plan, min(PREFILL_TOKENS, prompts)))
        cache_stays = plan.rollouts_overlap or not device.detachable or cache <= KEPT_CACHE_BYTES
    else:
        length = plan.workload.longest_prompt + config.rollout.max_response_tokens
        cache = plan.decode_rows * length * token_cache_bytes(plan)
        working = padded_sampling_bytes(plan, size)
        cache_stays = plan.rollouts_overlap
    rollout = {"KV cache": cache, "sampling and prefill": working}
    stays = {"decode graphs": graphs}
    if cache_stays:
        stays["KV cache"] = rollout.pop("KV cache")
    if not apart:
        return stays, rollout
    if plan.packed or cache_stays:  # its process keeps what it has worked with
        stays["sampling and prefill"] = rollout.pop("sampling and prefill")
    own = device.process + size.weights + masters + sum(stays.values())
    return {"engine process": own}, rollout


def _vllm(plan: Plan, size: ModelSize, device: Device, held: int) -> Parts:
    """Return what vLLM takes while it is awake: its own weights, a float32 head, its cache."""
    config = plan.config
    rows = min(plan.max_rows, VLLM_ROWS)
    prompt = config.data.max_prompt_tokens
    tokens = min(size.context, prompt + config.rollout.max_response_tokens) + VLLM_BLOCK
    needed = max(rows * tokens, size.context + VLLM_BLOCK) * token_cache_bytes(plan)
    free = max(0, device.usable - held)
    cache = int(config.rollout.cache_gib * 2**30) or min(free // 3, needed)
    head = 4 * size.vocabulary * LayerWidths.of(plan.model).hidden
    return {
        "vLLM's weights": size.weights,
        "vLLM's head in float32": head if config.model.dtype == "bfloat16" else 0,
        "vLLM's KV cache": cache,
    }


def cache_bytes(plan: Plan, device: Device, held: int) -> int:
    """Return the bytes of the paged cache; `held` are those that other things hold.

    It holds at least one row, without which nothing can be sampled.
    """
    config = plan.config
    if config.rollout.cache_gib:
        limit = int(config.rollout.cache_gib * 2**30)
    else:
        is_detachable = device.detachable and not config.rollout.stream
        limit = largest_cache(max(0, device.usable - held), is_detachable)
    row = plan.workload.longest_prompt + config.rollout.max_response_tokens
    one_row = (num_pages(row) + 2) * PAGE * token_cache_bytes(plan)
    return min(max(limit, one_row), wanted_cache_bytes(plan))


def wanted_cache_bytes(plan: Plan) -> int:
    """Return the bytes of a paged cache in which all rows decode at the same time."""
    limit = plan.config.rollout.max_response_tokens
    groups = [group for group in plan.workload.groups if group.num_samples]
    prompt_pages = sum(num_pages(group.prompt - 1) for group in groups)
    pages = graph_rows(plan.decode_rows) * num_pages(limit) + prompt_pages + 1
    return pages * PAGE * token_cache_bytes(plan)


class LayerWidths(NamedTuple):
    """Columns of the matrices of a block."""

    hidden: int
    intermediate: int
    query: int
    key: int

    @staticmethod
    def of(model_config: Any) -> "LayerWidths":
        text = model_config.get_text_config()
        heads = int(text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        intermediate = int(text.intermediate_size)
        if count_experts(model_config):  # of the experts that a token uses
            intermediate = int(getattr(text, "moe_intermediate_size", None) or intermediate)
            intermediate *= int(text.num_experts_per_tok)
        return LayerWidths(
            int(text.hidden_size), intermediate, heads * head_dim, key_heads * head_dim
        )


def token_cache_bytes(plan: Plan) -> int:
    """Return the bytes of the keys and values of one token in all blocks."""
    text = plan.model.get_text_config()
    each = DTYPES[plan.config.model.dtype].itemsize
    return 2 * int(text.num_hidden_layers) * LayerWidths.of(plan.model).key * each


def decode_step_bytes(plan: Plan, size: ModelSize) -> int:
    """Return the bytes that one decode step allocates: logits in float32, and a block's tensors."""
    widths = LayerWidths.of(plan.model)
    each = DTYPES[plan.config.model.dtype].itemsize
    block = 4 * widths.hidden + 3 * widths.query + 2 * widths.key + 3 * widths.intermediate
    return graph_rows(plan.decode_rows) * (4 * size.vocabulary + each * block)


def prefill_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes that one prefill pass allocates: the widest tensors of one block."""
    widths = LayerWidths.of(plan.model)
    each = DTYPES[plan.config.model.dtype].itemsize
    return tokens * each * (4 * widths.hidden + 3 * widths.intermediate)


def padded_sampling_bytes(plan: Plan, size: ModelSize) -> int:
    """Return the bytes of sampling from a contiguous cache."""
    # Logits, log-softmax, probabilities and their running sum are alive at the same time.
    sampling = 4 * 4 * plan.decode_rows * size.vocabulary
    if plan.config.model.device == "cpu" and size.bytes_each == 2:
        sampling += 4 * size.vocabulary * LayerWidths.of(plan.model).hidden  # the head in float32
    return sampling
