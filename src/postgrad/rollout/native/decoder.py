"""One decode step of a Llama-like model over paged keys and values, captured as CUDA graphs.

The weights are the trainer's own, those that are read at once fused as kernels/install.py does, so nothing is copied when the trainer
moves them. The state of all rows lies on the device; a replayed graph reads the
last token of each row, writes its key and value, picks the next token and notes which rows have ended.
"""

# Triton launches its kernels with arguments that a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from postgrad.model.device import capture_graph, supports_graph_capture
from postgrad.model.lora import add_lora_outputs, base_layer
from postgrad.model.passes.head import upcast_logits
from postgrad.model.passes.kernels import NO_FP_FUSION
from postgrad.model.passes.kernels.packed_attention import LOG2E, warp_config
from postgrad.model.passes.kernels.swiglu import swiglu_forward
from postgrad.model.passes.packing import BLOCK_N as PAGE
from postgrad.model.passes.packing import CHUNK
from postgrad.model.passes.support import PACKED_FAMILIES, support_of
from postgrad.rollout.native import kernels

STATIC_ROTARY = ("default", "linear", "llama3", "yarn")
VOCABULARY_BLOCK = 4096
FIELDS = 7  # token, own, shared, blocks, slot, limit, alive


def refusal(model: Any) -> str:
    """Why this decoder cannot run the model; empty when it can."""
    config = model.config.get_text_config()
    if support_of(model).passes != "packed":
        return "; ".join(support_of(model).reasons) or "its passes are not packed"
    if config.model_type not in PACKED_FAMILIES:
        return f"model type {config.model_type} is not one of {', '.join(PACKED_FAMILIES)}"
    if getattr(config, "use_sliding_window", False):
        return "the model has a sliding window"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act} is not silu"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        ""
        if rotary in STATIC_ROTARY
        else f"rotary positions of type {rotary} change with the length"
    )


class BufferSizes(NamedTuple):
    """Sizes of the buffers: rows at once, pages a row, trajectories of a call, tokens of one, positions, pages in all."""

    rows: int
    blocks: int
    slots: int
    length: int
    positions: int
    pages: int


class Layer:
    """What one block reads, by role."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.qkv, self.inwards = (
            attention.fused_params,
            [attention.q_proj, attention.k_proj, attention.v_proj],
        )
        self.out = attention.o_proj
        self.gate_up, self.gates = mlp.fused_params, [mlp.gate_proj, mlp.up_proj]
        self.down = mlp.down_proj
        self.norm_in, self.norm_post = block.input_layernorm, block.post_attention_layernorm
        self.q_norm, self.k_norm = (
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )


def project(module: Any, x: Tensor) -> Tensor:
    """x through one linear layer and the adapter it may have."""
    plain = base_layer(module)
    return add_lora_outputs(linear(x, plain.weight, plain.bias), [module], x)


class Decoder:
    """Buffers, weights and graphs. Sizes are fixed by `reserve`; asking for more makes new ones and forgets the graphs."""

    def __init__(self, model: Any, stops: Tensor) -> None:
        self.model, self.stops = model, stops.to(torch.int32)
        config = model.config.get_text_config()
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.embedding, self.head = (
            model.get_input_embeddings().weight,
            model.get_output_embeddings().weight,
        )
        self.norm = model.base_model.norm
        self.layers = [Layer(block) for block in model.base_model.layers]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.room = BufferSizes(0, 0, 0, 0, 0, 0)
        self.graphs: dict[tuple[int, float], Any] = {}
        self.pool: Any = None

    def page_bytes(self) -> int:
        """Memory of one page in all layers."""
        return len(self.layers) * 2 * PAGE * self.key_heads * self.width * self.dtype.itemsize

    def reserve(self, room: BufferSizes) -> None:
        """Make buffers of at least these sizes; none where there is room already."""
        if all(have >= want for have, want in zip(self.room, room, strict=True)):
            return
        self.release()
        self.room = BufferSizes(*map(max, self.room, room))
        rows, blocks, slots, length, positions, pages = self.room
        empty = {"device": self.device}
        self.state = torch.zeros(FIELDS, rows, dtype=torch.int32, **empty)
        self.table = torch.zeros(rows, blocks, dtype=torch.int32, **empty)
        self.uniforms = torch.zeros(slots, length, **empty)
        self.tokens = torch.zeros(slots, length, dtype=torch.int32, **empty)
        self.logprobs = torch.zeros(slots, length, **empty)
        shape = (len(self.layers), pages, PAGE, self.key_heads, self.width)
        self.keys = torch.zeros(shape, dtype=self.dtype, **empty)
        self.values = torch.zeros(shape, dtype=self.dtype, **empty)
        where = torch.arange(positions, device=self.device)[None]
        cos, sin = self.model.base_model.rotary_emb(
            torch.empty(1, dtype=self.dtype, **empty), position_ids=where
        )
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def release(self) -> None:
        """Give the buffers back."""
        self.graphs.clear()
        self.pool = None
        for name in (
            "state",
            "table",
            "uniforms",
            "tokens",
            "logprobs",
            "keys",
            "values",
            "cos",
            "sin",
        ):
            self.__dict__.pop(name, None)

    def run(self, rows: int, steps: int, temperature: float) -> None:
        """Replay `steps` decode steps of the first `rows` rows; 0 is greedy."""
        if not supports_graph_capture(self.device):  # the interpreter: no graphs
            for _ in range(steps):
                self.step(rows, temperature)
            return
        graph = self.graphs.get((rows, temperature)) or self.capture(rows, temperature)
        for _ in range(steps):
            graph.replay()

    def capture(self, rows: int, temperature: float) -> Any:
        alive = self.state[6].clone()
        self.state[6] = 0  # the warm-up compiles and allocates, and moves no row
        graph = capture_graph(lambda: self.step(rows, temperature), self.pool)
        self.pool = self.pool or graph.pool()
        self.state[6] = alive
        self.graphs[rows, temperature] = graph
        return graph

    def step(self, rows: int, temperature: float) -> None:
        """One token for each of the first `rows` rows that is alive."""
        width, wide = self.embedding.shape[1], triton.next_power_of_2(self.embedding.shape[1])
        residual = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        normed, attended = (
            torch.empty_like(residual),
            residual.new_empty(rows, self.heads * self.width),
        )
        query = torch.empty_like(attended)
        kernels.embed[(rows,)](
            self.state, self.room.rows, self.embedding, residual, width, BLOCK=wide
        )

        def norm(x: Tensor, by: Any) -> None:
            add = x is not residual
            kernels.add_norm[(rows,)](
                x,
                residual,
                by.weight,
                normed,
                width,
                by.variance_epsilon,
                ADD=add,
                BLOCK=wide,
                **NO_FP_FUSION,
            )

        norm(residual, self.layers[0].norm_in)
        for i, layer in enumerate(self.layers):
            self.attend(
                i,
                layer,
                add_lora_outputs(linear(normed, *layer.qkv), layer.inwards, normed),
                query,
                attended,
            )
            norm(project(layer.out, attended), layer.norm_post)
            gated = swiglu_forward(
                add_lora_outputs(linear(normed, *layer.gate_up), layer.gates, normed)
            )
            following = self.layers[i + 1].norm_in if i + 1 < len(self.layers) else self.norm
            norm(project(layer.down, gated), following)
        self.pick(upcast_logits(normed, self.head).float(), temperature)

    def attend(
        self, number: int, layer: Layer, qkv: Tensor, query: Tensor, attended: Tensor
    ) -> None:
        rows, q_norm = len(qkv), layer.q_norm
        sizes = {"HEADS": self.heads, "KEY_HEADS": self.key_heads, "D": self.width, "PAGE": PAGE}
        keys, values = self.keys[number], self.values[number]
        if q_norm is not None:
            kernels.norm_heads[(rows, self.heads + self.key_heads)](
                qkv, q_norm.weight, layer.k_norm.weight, q_norm.variance_epsilon, HEADS=self.heads, KEY_HEADS=self.key_heads,
                D=self.width, BLOCK=triton.next_power_of_2(self.width), num_warps=4, **NO_FP_FUSION,
            )  # fmt: skip
        kernels.place[(rows, self.heads + 2 * self.key_heads)](
            qkv, query, keys, values, self.table, self.state, self.room.rows, self.cos, self.sin, self.room.blocks,
            **sizes, HALF=triton.next_power_of_2(self.width // 2), num_warps=1, **NO_FP_FUSION,
        )  # fmt: skip
        parts, group, kind = (
            -(-self.room.blocks // CHUNK),
            self.heads // self.key_heads,
            warp_config(self.width),
        )
        wide: dict[str, Any] = {
            **sizes,
            "WIDTH": max(16, triton.next_power_of_2(self.width)),
            "CHUNK": CHUNK,
            "PARTS": parts,
        }
        acc = query.new_empty(
            rows if parts > 1 else 0, self.key_heads, parts, group, self.width, dtype=torch.float32
        )
        weights = acc.new_empty(*acc.shape[:-1], 2)
        kernels.attend[(rows, self.key_heads, parts)](
            query, keys, values, attended, acc, weights, self.table, self.state, self.room.rows, self.width**-0.5 * LOG2E,
            self.room.blocks, **wide, M=kind.decode_rows, PRECISE=self.dtype == torch.float32, num_warps=kind.decode_warps, **NO_FP_FUSION,
        )  # fmt: skip
        if parts > 1:
            kernels.join_parts[(rows, self.key_heads)](
                acc,
                weights,
                attended,
                self.state,
                self.room.rows,
                **wide,
                M=triton.next_power_of_2(group),
                num_warps=1,
                **NO_FP_FUSION,
            )

    def pick(self, logits: Tensor, temperature: float) -> None:
        rows, vocabulary = logits.shape
        blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
        tops, sums = logits.new_empty(rows, blocks), logits.new_empty(rows, blocks)
        places = torch.empty(rows, blocks, dtype=torch.int32, device=self.device)
        inverse = 1.0 / temperature if temperature else 1.0
        kernels.summarize[(rows, blocks)](
            logits, tops, sums, places, vocabulary, blocks, inverse, BLOCK=VOCABULARY_BLOCK
        )
        kernels.pick[(rows,)](
            logits, tops, sums, places, self.state, self.room.rows, self.uniforms, self.tokens, self.logprobs, self.stops, len(self.stops),
            self.room.length, vocabulary, blocks, inverse, GREEDY=temperature == 0.0, BLOCK=VOCABULARY_BLOCK,
            BLOCKS_WIDE=triton.next_power_of_2(blocks),
        )  # fmt: skip
