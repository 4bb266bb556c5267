"""Triton kernels of one decode step: norms, rotary embedding, cache writes, attention, sampling.

They round where the transformers blocks round, so that the engine's log-probs equal the trainer's
up to the last bits. The state of all rows is one int32 table (FIELDS, rows) of tables.py; its
lines are named below. The kernels skip a row whose ALIVE is 0.
"""

from postgrad.model.kernels.heads import apply_rotary, norm_halves
from postgrad.model.kernels.launch import tl, triton
from postgrad.model.kernels.packed_attention import (
    first_visible_block,
    merge_chunk,
    online_softmax_step,
)
from postgrad.model.kernels.rms_norm import rms_norm_row

# Lines of the state table; tables.py explains them.
TOKEN = tl.constexpr(0)
NUM_OWN = tl.constexpr(1)
NUM_SHARED = tl.constexpr(2)
SHARED_PAGES = tl.constexpr(3)
SLOT = tl.constexpr(4)
LIMIT = tl.constexpr(5)
ALIVE = tl.constexpr(6)
NUM_EARLIER = tl.constexpr(7)
ROTARY_OFFSET = tl.constexpr(8)


@triton.jit
def num_own_tokens(state, rows, row):
    """Return the number of tokens in a row's own pages: of earlier turns and of this one."""
    return tl.load(state + NUM_EARLIER * rows + row) + tl.load(state + NUM_OWN * rows + row)


@triton.jit
def add_norm(
    x_base, residual_base, weight_base, post_weight_base, normed_base, width, eps,
    ADD: tl.constexpr, POST: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += x (when ADD), normed = RMSNorm(residual) * weight; one program per row.

    With POST, x is normalized with its own weight before it is added.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    kind = normed_base.dtype.element_ty
    h = tl.load(residual_base + row * width + cols, mask=inside, other=0.0)
    if ADD:
        x = tl.load(x_base + row * width + cols, mask=inside, other=0.0)
        if POST:
            post_weight = tl.load(post_weight_base + cols, mask=inside, other=0.0)
            post_normed, _ = rms_norm_row(x, post_weight, width, eps, CENTERED)
            x = post_normed.to(kind)
        h = (h.to(tl.float32) + x.to(tl.float32)).to(kind)
        tl.store(residual_base + row * width + cols, h, mask=inside)
    weight = tl.load(weight_base + cols, mask=inside, other=0.0)
    normed, _ = rms_norm_row(h, weight, width, eps, CENTERED)
    tl.store(normed_base + row * width + cols, normed.to(kind), mask=inside)


@triton.jit
def embed(
    state, rows, weight_base, out_base, width, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """Look up the embedding of each row's last token, times `scale` when SCALED.

    One program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(state + TOKEN * rows + row).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    x = tl.load(weight_base + token * width + cols, mask=inside, other=0.0)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(x.dtype)
    tl.store(out_base + row * width + cols, x, mask=inside)


@triton.jit
def write_cache(
    qkv_base, q_base, k_pages, v_pages, table, state, rows, cos_base, sin_base, max_pages,
    q_weight, k_weight, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, HEADS_BLOCK: tl.constexpr, NORM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Write the row's key and value to its page, and its query to `q`.

    Queries and keys are normalized per head (when NORM) and rotated to their position. One program
    per row and HEADS_BLOCK heads of `qkv`, in which query heads come first, then keys, then values.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    if tl.load(state + ALIVE * rows + row) == 0:
        return
    own = num_own_tokens(state, rows, row)
    half = tl.arange(0, HALF)
    in_half = half < D // 2
    is_query = heads < HEADS
    is_key = (heads >= HEADS) & (heads < HEADS + KEY_HEADS)
    is_value = (heads >= HEADS + KEY_HEADS) & (heads < HEADS + 2 * KEY_HEADS)
    inside = (heads < HEADS + 2 * KEY_HEADS)[:, None] & in_half[None, :]
    at = qkv_base + (row * (HEADS + 2 * KEY_HEADS) + heads)[:, None] * D + half[None, :]
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + D // 2, mask=inside, other=0.0)
    entry = tl.load(state + SHARED_PAGES * rows + row) + own // PAGE
    page = tl.load(table + row * max_pages + entry).to(tl.int64)
    line = (page * PAGE + own % PAGE) * KEY_HEADS * D
    value_at = v_pages + line + (heads - HEADS - KEY_HEADS)[:, None] * D + half[None, :]
    value_mask = is_value[:, None] & in_half[None, :]
    tl.store(value_at, low, mask=value_mask)
    tl.store(value_at + D // 2, high, mask=value_mask)
    if NORM:
        low, high = norm_halves(
            low, high, is_query, q_weight, k_weight, half, in_half, eps, D, CENTERED
        )
    offset = tl.load(state + ROTARY_OFFSET * rows + row)
    position = (tl.load(state + NUM_SHARED * rows + row) + own + offset).to(tl.int64)
    cos_at = cos_base + position * D + half
    sin_at = sin_base + position * D + half
    cos_low = tl.load(cos_at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_at + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_at + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    new_low, new_high = apply_rotary(low, high, cos_low, cos_high, sin_low, sin_high)
    query_at = q_base + (row * HEADS + heads)[:, None] * D + half[None, :]
    query_mask = is_query[:, None] & in_half[None, :]
    tl.store(query_at, new_low, mask=query_mask)
    tl.store(query_at + D // 2, new_high, mask=query_mask)
    key_at = k_pages + line + (heads - HEADS)[:, None] * D + half[None, :]
    key_mask = is_key[:, None] & in_half[None, :]
    tl.store(key_at, new_low, mask=key_mask)
    tl.store(key_at + D // 2, new_high, mask=key_mask)


@triton.jit
def attend(
    q_base, k_pages, v_pages, out_base, part_base, weight_base, table, state, rows, scale_log2,
    max_pages,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PRECISE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of the query heads of one key head over CHUNK of the row's pages.

    One program per row, key head and chunk. The shared pages of the prompt come first. Pages
    before a sliding window are skipped. With one chunk the result goes to `out`; with several,
    merge_chunks combines them.
    """
    row = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    part = tl.program_id(2)
    if tl.load(state + ALIVE * rows + row) == 0:
        return
    group: tl.constexpr = HEADS // KEY_HEADS
    shared = tl.load(state + NUM_SHARED * rows + row)
    shared_pages = tl.load(state + SHARED_PAGES * rows + row)
    own = num_own_tokens(state, rows, row) + 1
    num_pages = shared_pages + (own + PAGE - 1) // PAGE
    first_page = part * CHUNK
    end_page = tl.minimum(first_page + CHUNK, num_pages)
    if WINDOW:
        position = shared + own - 1
        first_page = tl.maximum(first_page, first_visible_block(position, shared, PAGE, WINDOW))
    if first_page >= end_page:
        return
    member = tl.arange(0, M)
    cols = tl.arange(0, WIDTH)
    line = tl.arange(0, PAGE)
    heads = q_base + (row * HEADS + key_head * group + member)[:, None] * D + cols[None, :]
    real = (member < group)[:, None] & (cols < D)[None, :]
    q = tl.load(heads, mask=real, other=0.0)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    for j in range(first_page, end_page):
        page = tl.load(table + row * max_pages + j).to(tl.int64)
        inside = tl.where(
            j < shared_pages, j * PAGE + line < shared, (j - shared_pages) * PAGE + line < own
        )
        if WINDOW:
            key_position = tl.where(
                j < shared_pages, j * PAGE + line, shared + (j - shared_pages) * PAGE + line
            )
            inside &= position - key_position < WINDOW
        at = ((page * PAGE + line) * KEY_HEADS + key_head)[:, None] * D + cols[None, :]
        mask = inside[:, None] & (cols < D)[None, :]
        k = tl.load(k_pages + at, mask=mask, other=0.0)
        v = tl.load(v_pages + at, mask=mask, other=0.0)
        acc, top, total = online_softmax_step(
            acc, top, total, q, k, v, inside[None, :], scale_log2, PRECISE, WINDOW
        )
    if PARTS == 1:
        out = out_base + (row * HEADS + key_head * group + member)[:, None] * D + cols[None, :]
        tl.store(out, (acc / total[:, None]).to(out_base.dtype.element_ty), mask=real)
    else:
        offset = ((row * KEY_HEADS + key_head) * PARTS + part) * group + member
        tl.store(part_base + offset[:, None] * D + cols[None, :], acc, mask=real)
        tl.store(weight_base + offset * 2, top, mask=member < group)
        tl.store(weight_base + offset * 2 + 1, total, mask=member < group)


@triton.jit
def merge_chunks(
    part_base, weight_base, out_base, state, rows,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Combine the chunks of `attend`, in their order; one program per row and key head."""
    row = tl.program_id(0).to(tl.int64)
    key_head = tl.program_id(1)
    if tl.load(state + ALIVE * rows + row) == 0:
        return
    group: tl.constexpr = HEADS // KEY_HEADS
    own = num_own_tokens(state, rows, row) + 1
    num_pages = tl.load(state + SHARED_PAGES * rows + row) + (own + PAGE - 1) // PAGE
    member = tl.arange(0, M)
    cols = tl.arange(0, WIDTH)
    real = (member < group)[:, None] & (cols < D)[None, :]
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    first_part = 0
    if WINDOW:
        shared = tl.load(state + NUM_SHARED * rows + row)
        first_part = first_visible_block(shared + own - 1, shared, PAGE, WINDOW) // CHUNK
    for part in range(first_part, (num_pages + CHUNK - 1) // CHUNK):
        offset = ((row * KEY_HEADS + key_head) * PARTS + part) * group + member
        chunk = tl.load(part_base + offset[:, None] * D + cols[None, :], mask=real, other=0.0)
        chunk_top = tl.load(weight_base + offset * 2, mask=member < group, other=0.0)
        chunk_total = tl.load(weight_base + offset * 2 + 1, mask=member < group, other=1.0)
        acc, top, total = merge_chunk(acc, top, total, chunk, chunk_top, chunk_total, WINDOW)
    out = out_base + (row * HEADS + key_head * group + member)[:, None] * D + cols[None, :]
    tl.store(out, (acc / total[:, None]).to(out_base.dtype.element_ty), mask=real)


@triton.jit
def sampling_slot(state, rows, row):
    """Return a row's line of the sampling parameters, random numbers and results."""
    return tl.load(state + SLOT * rows + row).to(tl.int64)


@triton.jit
def summarize_blocks(
    logits, tops, sums, argmaxes, state, rows, sampling, vocabulary, num_blocks,
    SAMPLING_FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest logit, its token, and the sum of exponentials, for each block of the vocabulary.

    Logits are divided by the row's temperature, unless it is greedy. One program per row and block.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    inverse_temperature = tl.load(sampling + sampling_slot(state, rows, row) * SAMPLING_FIELDS)
    inverse_temperature = tl.where(inverse_temperature == 0.0, 1.0, inverse_temperature)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocabulary + cols, mask=cols < vocabulary, other=float("-inf"))
    x = x * inverse_temperature
    top, argmax = tl.max(x, 0, return_indices=True)
    total = tl.sum(tl.exp(x - top), 0)
    tl.store(tops + row * num_blocks + block, top)
    tl.store(argmaxes + row * num_blocks + block, block * BLOCK + argmax)
    # A block whose tokens are all filtered out has no weight.
    tl.store(sums + row * num_blocks + block, tl.where(top == float("-inf"), 0.0, total))


@triton.jit
def sample_token(
    logits, tops, sums, argmaxes, unfiltered_lse, state, rows, sampling, uniforms, out_tokens,
    out_logprobs, stops, num_stops, length, vocabulary, num_blocks,
    FILTERED: tl.constexpr, SAMPLING_FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_WIDE: tl.constexpr,
):  # fmt: skip
    """Sample each row's next token by inverse CDF; a greedy row takes the most likely one.

    Writes the token, its log-prob and the row's new state. One program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(state + ALIVE * rows + row) == 0:
        return
    own = tl.load(state + NUM_OWN * rows + row)
    slot = sampling_slot(state, rows, row)
    inverse_temperature = tl.load(sampling + slot * SAMPLING_FIELDS)
    is_greedy = inverse_temperature == 0.0
    inverse_temperature = tl.where(is_greedy, 1.0, inverse_temperature)
    blocks = tl.arange(0, BLOCKS_WIDE)
    real = blocks < num_blocks
    top = tl.load(tops + row * num_blocks + blocks, mask=real, other=float("-inf"))
    peak = tl.max(top, 0)
    weight = tl.load(sums + row * num_blocks + blocks, mask=real, other=0.0) * tl.exp(top - peak)
    total = tl.sum(weight, 0)
    lse = peak + tl.log(total)
    if FILTERED:
        lse = tl.load(unfiltered_lse + row)
    best = tl.argmax(top, 0, tie_break_left=True)
    greedy_token = tl.load(argmaxes + row * num_blocks + best)
    target = tl.load(uniforms + slot * length + own % length) * total
    cumulative = tl.cumsum(weight, 0)
    # Take the first block whose cumulative weight exceeds the target; if rounding leaves none,
    # the last block with any weight. A parallel scan need not be monotonic, so positions are
    # compared and not counted.
    beyond = tl.min(tl.where((cumulative > target) & (weight > 0), blocks, BLOCKS_WIDE), 0)
    chosen = tl.where(beyond < BLOCKS_WIDE, beyond, tl.max(tl.where(weight > 0, blocks, 0), 0))
    rest = tl.maximum(target - tl.sum(tl.where(blocks < chosen, weight, 0.0), 0), 0.0)
    within = tl.arange(0, BLOCK)
    cols = chosen * BLOCK + within
    x = tl.load(logits + row * vocabulary + cols, mask=cols < vocabulary, other=float("-inf"))
    p = tl.exp(x * inverse_temperature - peak)
    after = tl.min(tl.where((tl.cumsum(p, 0) > rest) & (p > 0), within, BLOCK), 0)
    index = tl.where(after < BLOCK, after, tl.max(tl.where(p > 0, within, 0), 0))
    token = tl.where(is_greedy, greedy_token, chosen * BLOCK + index)
    logit = tl.load(logits + row * vocabulary + token) * inverse_temperature
    tl.store(out_tokens + slot * length + own % length, token)
    tl.store(out_logprobs + slot * length + own % length, logit - lse)
    ended = own + 1 >= tl.load(state + LIMIT * rows + row)
    for i in range(num_stops):
        ended = ended | (token == tl.load(stops + i))
    tl.store(state + TOKEN * rows + row, token)
    tl.store(state + NUM_OWN * rows + row, own + 1)
    tl.store(state + ALIVE * rows + row, tl.where(ended, 0, 1))
