"""One decode step of a transformer over paged keys and values, captured as CUDA graphs.

The weights are the trainer's own; model/kernels/install.py has fused those that are read
together. So nothing is copied when the trainer changes them. The state of all rows is on the
device: a replayed graph reads the last token of each row, writes its key and value, samples the
next token and marks the rows that have ended.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from postgrad.model.detachable import DetachableMemory, driver_library
from postgrad.model.device import capture_graph, supports_graph_capture
from postgrad.model.kernels import NO_FP_FUSION
from postgrad.model.kernels.install import Norm
from postgrad.model.kernels.launch import LOG2E, warp_config
from postgrad.model.passes.head import head_of, upcast_logits
from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import CHUNK
from postgrad.model.passes.support import (
    NO_TRANSFORM,
    capture_problem,
    family_problem,
    sees_pictures,
    support_of,
    vision_of,
)
from postgrad.model.views import rotary_kinds, rotary_values
from postgrad.rollout.native import kernels
from postgrad.rollout.native.device_sampling import sample
from postgrad.rollout.native.layers import Layer, known_norm, project
from postgrad.rollout.native.pages import KEPT_CACHE_BYTES
from postgrad.rollout.native.sampling import MAX_TOP_LOGPROBS
from postgrad.rollout.native.tables import (
    ALIVE,
    FIELDS,
    PREFILL_ROWS,
    SAMPLING_FIELDS,
    STEPS_PER_SYNC,
    BufferSizes,
)

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
BUSY_PROGRAMS = 512  # programs of attention that keep a device busy
HEADS_BLOCK = 8  # heads per program of write_cache


def unsupported_reason(model: Any) -> str:
    """Return why this decoder cannot run the model; "" when it can."""
    config = model.config.get_text_config()
    if support_of(model).passes != "packed":
        return "; ".join(support_of(model).reasons) or "its passes are not packed"
    if problem := family_problem(model):
        return problem
    for block in model.get_decoder().layers:
        if not hasattr(block.self_attn, "fused_params"):
            return "the kernels are not installed"
        if not hasattr(block.mlp, "fused_params") and not hasattr(block.mlp, "experts"):
            return f"activation {type(block.mlp.act_fn).__name__} has no kernel"
    if sees_pictures(model) and vision_of(model).passes != "packed":
        return "its passes with pictures are not packed"
    if support_of(model).transform != NO_TRANSFORM:
        return "the model scales or caps its logits"
    for rope_type in rotary_types(config):
        if rope_type not in STATIC_ROTARY:
            return f"rotary positions of type {rope_type} change with the length"
    return ""


def rotary_types(config: Any) -> list[str]:
    """Return the types of rotary positions; some models have one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    return [kind.get("rope_type", "default") for kind in by_layer or [parameters]]


# The buffers that `reserve` allocates.
BUFFERS = (
    "state",
    "table",
    "uniforms",
    "tokens",
    "logprobs",
    "sampling",
    "top_tokens",
    "top_logprobs",
    "keys",
    "values",
)


class Decoder:
    """Buffers, weights and graphs of the decode step.

    `reserve` fixes the sizes of the buffers. Larger sizes allocate new buffers and drop the graphs.
    """

    def __init__(self, model: Any, stop_ids: Tensor) -> None:
        self.model = model
        self.stop_ids = stop_ids.to(torch.int32)
        config = model.config.get_text_config()
        self.num_heads = config.num_attention_heads
        self.num_key_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        embedding = model.get_input_embeddings()
        self.embedding = embedding.weight
        self.head = head_of(model)
        self.norm = known_norm(model.get_decoder().norm)
        blocks = model.get_decoder().layers
        self.layers = [Layer(*pair) for pair in zip(blocks, rotary_kinds(model), strict=True)]
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.embedding_scale = 1.0
        if hasattr(embedding, "embed_scale"):
            self.embedding_scale = float(embedding.embed_scale.to(self.dtype))
        self.captures = supports_graph_capture(self.device) and not capture_problem(model)
        self.rotary: dict[str, tuple[Tensor, Tensor]] = {}
        self.sizes = BufferSizes(0, 0, 0, 0, 0, 0)
        self.graphs: dict[int, Any] = {}  # of whole steps, by rows
        self.forward_graphs: dict[int, tuple[Any, Tensor]] = {}  # of logits only, with these
        self.prefill_graph: Any = None  # of PREFILL_ROWS rows, without logits
        self.pool: Any = None
        self.driver = driver_library(self.device)  # None: the cache cannot be detached
        self.cache_memory: DetachableMemory | None = None

    def page_bytes(self) -> int:
        """Return the memory of one page in all layers."""
        page_elements = PAGE * self.num_key_heads * self.head_dim
        return len(self.layers) * 2 * page_elements * self.dtype.itemsize

    def reserve(self, sizes: BufferSizes) -> None:
        """Allocate buffers of at least these sizes, unless the present ones are large enough."""
        if all(have >= want for have, want in zip(self.sizes, sizes, strict=True)):
            self.attach_cache()
            return
        self.release()
        self.sizes = BufferSizes(*map(max, self.sizes, sizes))
        sizes = self.sizes
        device = self.device
        self.state = torch.zeros(FIELDS, sizes.rows, dtype=torch.int32, device=device)
        self.table = torch.zeros(sizes.rows, sizes.row_pages, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(sizes.slots, sizes.length, device=device)
        self.tokens = torch.zeros(sizes.slots, sizes.length, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(sizes.slots, sizes.length, device=device)
        self.sampling = torch.zeros(sizes.slots, SAMPLING_FIELDS, device=device)
        # The most likely tokens of the last STEPS_PER_SYNC steps; token n is at n % STEPS_PER_SYNC.
        top_shape = (sizes.rows, STEPS_PER_SYNC, MAX_TOP_LOGPROBS)
        self.top_tokens = torch.zeros(top_shape, dtype=torch.int32, device=device)
        self.top_logprobs = torch.zeros(top_shape, device=device)
        shape = (2, len(self.layers), sizes.pages, PAGE, self.num_key_heads, self.head_dim)
        self.keys, self.values = self._allocate_cache(shape)
        positions = torch.arange(sizes.positions, device=device)[None]
        like = torch.empty(1, dtype=self.dtype, device=device)
        for kind, (cos, sin) in rotary_values(self.model, like, positions).items():
            self.rotary[kind] = (cos[0].contiguous(), sin[0].contiguous())

    def _allocate_cache(self, shape: tuple[int, ...]) -> Tensor:
        """Return memory for keys and values of this shape; detachable where the device can."""
        if self.driver is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        num_bytes = math.prod(shape) * self.dtype.itemsize
        self.cache_memory = DetachableMemory(self.driver, num_bytes, self.device)
        return self.cache_memory.tensor()[:num_bytes].view(self.dtype).view(shape)

    def attach_cache(self) -> None:
        """Attach the cache's memory, if it was detached. Raises RunError."""
        if self.cache_memory is not None:
            self.cache_memory.attach()

    def detach_cache(self) -> None:
        """Give the memory of a large cache back until the next attach_cache."""
        if self.cache_memory is not None and self.cache_memory.size > KEPT_CACHE_BYTES:
            self.cache_memory.detach()

    def cache_bytes(self) -> int:
        """Return the memory that the cache has attached."""
        memory = self.cache_memory
        return memory.size if memory is not None and memory.attached else 0

    def release(self) -> None:
        """Free the buffers and the graphs that use them."""
        self.graphs.clear()
        self.forward_graphs.clear()
        self.prefill_graph = None
        self.rotary.clear()
        if self.cache_memory is not None:
            self.cache_memory.close()
            self.cache_memory = None
        self.pool = None
        for name in BUFFERS:
            self.__dict__.pop(name, None)

    def drop_pages(self) -> None:
        """Free the buffers, so that the next `reserve` may make a smaller cache."""
        self.release()
        self.sizes = self.sizes._replace(pages=0)

    def run(self, rows: int, steps: int, filters: bool = False, tops: bool = False) -> None:
        """Run `steps` decode steps of the first `rows` rows, each with its sampling parameters.

        A step with filters or tops is captured up to its logits. What follows is launched kernel
        by kernel.

        Args:
            rows: a row count of graph_rows.
            steps: at most STEPS_PER_SYNC.
            filters: some rows have top-p, top-k or min-p.
            tops: the most likely tokens are kept in `top_tokens` and `top_logprobs`.
        """
        if not self.captures:
            for _ in range(steps):
                sample(self, self.forward(rows), filters, tops)
        elif filters or tops:
            graph, logits = self.forward_graphs.get(rows) or self.capture_forward(rows)
            for _ in range(steps):
                graph.replay()
                sample(self, logits, filters, tops)
        else:
            graph = self.graphs.get(rows) or self.capture(rows)
            for _ in range(steps):
                graph.replay()

    def run_prefill(self) -> None:
        """Write the keys and values of PREFILL_ROWS rows; they stay as they are."""
        if not self.captures:
            self.forward_states(PREFILL_ROWS)
            return
        if self.prefill_graph is None:
            self.capture_prefill()
        assert self.prefill_graph is not None
        self.prefill_graph.replay()

    def capture_prefill(self) -> None:
        """Capture the step of run_prefill."""
        self.prefill_graph = self._capture(lambda: self.forward_states(PREFILL_ROWS))

    def capture(self, rows: int) -> Any:
        """Capture one step as a graph and keep it."""
        graph = self._capture(lambda: sample(self, self.forward(rows)))
        self.graphs[rows] = graph
        return graph

    def capture_forward(self, rows: int) -> tuple[Any, Tensor]:
        """Capture one step up to its logits; keeps the graph and the logits that it computes."""
        logits: list[Tensor] = []

        def forward() -> None:
            logits[:] = [self.forward(rows)]

        graph = self._capture(forward)
        self.forward_graphs[rows] = graph, logits[0]
        return self.forward_graphs[rows]

    def _capture(self, step: Callable[[], object]) -> Any:
        alive = self.state[ALIVE].clone()
        self.state[ALIVE] = 0  # the warm-up compiles and allocates, but changes no row
        graph = capture_graph(step, self.pool)
        self.pool = self.pool or graph.pool()
        self.state[ALIVE] = alive
        return graph

    def forward(self, rows: int) -> Tensor:
        """Write the last token of each of the first `rows` rows to its page.

        Returns the logits (rows, vocabulary) of the next tokens in float32. Those of rows that
        have ended mean nothing.
        """
        return self.compute_logits(self.forward_states(rows))

    def forward_states(self, rows: int) -> Tensor:
        """Write the tokens as `forward` does; returns the last hidden states (rows, width)."""
        width = self.embedding.shape[1]
        block = triton.next_power_of_2(width)
        residual = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        normed = torch.empty_like(residual)
        attended = residual.new_empty(rows, self.num_heads * self.head_dim)
        query = torch.empty_like(attended)
        kernels.embed[(rows,)](
            self.state, self.sizes.rows, self.embedding, residual, width, self.embedding_scale,
            SCALED=self.embedding_scale != 1.0, BLOCK=block,
        )  # fmt: skip

        def add_norm(x: Tensor, norm: Norm, post_norm: Norm | None = None) -> None:
            """Add x to the residual, unless it is the residual itself, and normalize the sum.

            With a `post_norm`, x is normalized before it is added.
            """
            kernels.add_norm[(rows,)](
                x, residual, norm.weight, (post_norm or norm).weight, normed, width, norm.eps,
                ADD=x is not residual, POST=post_norm is not None, CENTERED=norm.centered,
                BLOCK=block, **NO_FP_FUSION,
            )  # fmt: skip

        add_norm(residual, self.layers[0].input_norm)
        for i, layer in enumerate(self.layers):
            self.attend(i, layer, layer.project_qkv(normed), query, attended)
            attention_out = project(layer.output, attended)
            add_norm(attention_out, layer.mlp_norm, layer.attention_post_norm)
            is_last = i + 1 == len(self.layers)
            next_norm = self.norm if is_last else self.layers[i + 1].input_norm
            add_norm(layer.apply_mlp(normed), next_norm, layer.mlp_post_norm)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (rows, vocabulary) of the last hidden states (rows, width)."""
        return upcast_logits(hidden, *self.head).float()

    def attend(
        self, number: int, layer: Layer, qkv: Tensor, query: Tensor, attended: Tensor
    ) -> None:
        """Write the keys and values of `qkv` (rows, heads * head_dim) and compute the attention.

        `query` is a scratch buffer. The result goes to `attended`, (rows, heads * head_dim).
        """
        rows = len(qkv)
        heads: dict[str, Any] = {
            "HEADS": self.num_heads,
            "KEY_HEADS": self.num_key_heads,
            "D": self.head_dim,
        }
        keys = self.keys[number]
        values = self.values[number]
        no_norm = Norm(qkv, 0.0, False)  # the kernel does not read it
        q_norm = layer.q_norm or no_norm
        k_norm = layer.k_norm or no_norm
        cos, sin = self.rotary[layer.rotary]
        num_programs = triton.cdiv(self.num_heads + 2 * self.num_key_heads, HEADS_BLOCK)
        kernels.write_cache[(rows, num_programs)](
            qkv, query, keys, values, self.table, self.state, self.sizes.rows, cos, sin,
            self.sizes.row_pages, q_norm.weight, k_norm.weight, q_norm.eps, **heads, PAGE=PAGE,
            NORM=layer.q_norm is not None, CENTERED=q_norm.centered,
            HALF=triton.next_power_of_2(self.head_dim // 2), HEADS_BLOCK=HEADS_BLOCK,
            num_warps=2, **NO_FP_FUSION,
        )  # fmt: skip
        group_size = self.num_heads // self.num_key_heads
        config = warp_config(self.head_dim, self.dtype, rows * self.num_key_heads)
        chunk = CHUNK
        if not config.same_bits and rows * self.num_key_heads >= BUSY_PROGRAMS:
            chunk = triton.next_power_of_2(self.sizes.row_pages)  # one program reads a whole row
        num_parts = -(-self.sizes.row_pages // chunk)
        constants: dict[str, Any] = {
            **heads,
            "PAGE": PAGE,
            "WIDTH": max(16, triton.next_power_of_2(self.head_dim)),
            "CHUNK": chunk,
            "PARTS": num_parts,
            "WINDOW": layer.window,
        }
        parts = query.new_empty(
            rows if num_parts > 1 else 0,
            self.num_key_heads,
            num_parts,
            group_size,
            self.head_dim,
            dtype=torch.float32,
        )
        weights = parts.new_empty(*parts.shape[:-1], 2)
        kernels.attend[(rows, self.num_key_heads, num_parts)](
            query, keys, values, attended, parts, weights, self.table, self.state, self.sizes.rows,
            layer.scale * LOG2E, self.sizes.row_pages, **constants,
            M=max(config.decode_rows, triton.next_power_of_2(group_size)),
            PRECISE=self.dtype == torch.float32, num_warps=config.decode_warps,
            num_stages=config.decode_stages, **NO_FP_FUSION,
        )  # fmt: skip
        if num_parts > 1:
            kernels.merge_chunks[(rows, self.num_key_heads)](
                parts, weights, attended, self.state, self.sizes.rows, **constants,
                M=triton.next_power_of_2(group_size), num_warps=1, **NO_FP_FUSION,
            )  # fmt: skip
