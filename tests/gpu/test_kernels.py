"""The Triton kernels against plain torch, and the paged engine against the plain one, on a GPU."""

import pytest
import torch
from llama import make_llama

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.sampling import SeededRandom

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# (shared tokens, own tokens of each row)
BUNDLES = [(70, (5, 80)), (0, (30,)), (3, (66, 1)), (200, (129, 64, 65)), (530, (600, 20))]


def make_packing_and_mask():
    """Return a packing of BUNDLES and the equivalent dense mask."""
    from postgrad.model.passes.packing import make_packing

    segments = []
    begin = 0
    for shared, owns in BUNDLES:
        shared_start = begin
        shared_end = begin + shared
        if shared:
            segments.append((shared_start, shared_end, 0, 0, shared_end + sum(owns)))
        begin = shared_end
        for own in owns:
            segments.append((begin, begin + own, shared_start, shared_end, begin + own))
            begin += own
    mask = torch.zeros(begin, begin, dtype=torch.bool, device="cuda")
    for start, end, shared_start, shared_end, _ in segments:
        length = end - start
        mask[start:end, shared_start:shared_end] = True
        mask[start:end, start:end] = torch.ones(length, length, device="cuda").tril().bool()
    return make_packing(segments).to(torch.device("cuda")), mask


@pytest.mark.parametrize(
    ("dtype", "width", "heads", "key_heads", "bound"),
    [
        (torch.float32, 64, 9, 3, 3e-6),
        (torch.float32, 80, 4, 4, 3e-6),
        (torch.bfloat16, 64, 9, 3, 1.2e-2),
        (torch.bfloat16, 128, 12, 2, 1.2e-2),
    ],
)
def test_packed_attention_and_its_gradients_equal_a_dense_mask(
    dtype, width, heads, key_heads, bound
):
    from postgrad.model.kernels.packed_attention import packed_attention

    torch.manual_seed(0)
    packing, mask = make_packing_and_mask()
    q, k, v = (
        torch.randn(len(mask), h, width, device="cuda", dtype=dtype, requires_grad=True)
        for h in (heads, key_heads, key_heads)
    )
    out = packed_attention(q, k, v, packing, width**-0.5)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    Q, K, V = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(heads // key_heads, 1) for x in (K, V))
    scores = torch.einsum("qhd,khd->hqk", Q, keys) * width**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    expected_grads = torch.autograd.grad(expected, (Q, K, V), grad_out.double())
    for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (a - b).abs().max() / b.abs().max() < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_rms_norm_swiglu_and_heads_and_their_gradients_equal_plain_torch(dtype, bound):
    from postgrad.model.kernels.heads import HeadNorms, projected_heads
    from postgrad.model.kernels.rms_norm import rms_norm
    from postgrad.model.kernels.swiglu import swiglu

    torch.manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    def assert_close(ours, theirs, inputs, doubles):
        grad_out = torch.randn_like(ours)
        pairs = zip(
            (ours, *torch.autograd.grad(ours, inputs, grad_out, retain_graph=True)),
            (theirs, *torch.autograd.grad(theirs, doubles, grad_out.double(), retain_graph=True)),
            strict=True,
        )
        for a, b in pairs:
            assert (a - b).abs().max() / b.abs().max() < bound

    x, w, u = new(300, 576), new(576), new(300, 576)
    X, W, U = (t.detach().double().requires_grad_() for t in (x, w, u))
    assert_close(
        rms_norm(x, w, 1e-5),
        X * torch.rsqrt(X.square().mean(-1, keepdim=True) + 1e-5) * W,
        (x, w),
        (X, W),
    )
    assert_close(swiglu(torch.cat([x, u], 1)), torch.nn.functional.silu(X) * U, (x, u), (X, U))
    qkv = new(50, 15 * 64)
    angle = torch.rand(50, 32, device="cuda").repeat(1, 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = [new(64), new(64)]
    for norms in (None, HeadNorms(*weights, 1e-5, False)):
        heads = projected_heads(qkv, 9, cos, sin, norms)
        inputs = (qkv,) if norms is None else (qkv, *weights)
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        parts = doubles[0].unflatten(1, (15, 64)).split([9, 3, 3], 1)
        for number in range(2):
            X = parts[number]
            if norms is not None:
                X = X * torch.rsqrt(X.square().mean(-1, keepdim=True) + 1e-5) * doubles[1 + number]
            half = torch.cat([-X[..., 32:], X[..., :32]], -1)
            theirs = X * cos.double()[:, None] + half * sin.double()[:, None]
            used = [0] if norms is None else [0, 1 + number]
            assert_close(
                heads[number], theirs, [inputs[i] for i in used], [doubles[i] for i in used]
            )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
def test_down_projection_with_an_adapter_and_its_gradients_equal_plain_torch(dtype, bound):
    from postgrad.model.kernels.swiglu import swiglu_down_with_adapter
    from postgrad.model.lora import AdapterProducts

    torch.manual_seed(0)
    shapes = [(300, 1152), (8, 576), (96, 8)]
    inputs = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    weight = torch.randn(96, 576, device="cuda", dtype=dtype)
    out = swiglu_down_with_adapter(inputs[0], weight, None, AdapterProducts(*inputs[1:], 0.5))
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    gate, up = doubles[0].chunk(2, 1)
    activated = torch.nn.functional.silu(gate) * up
    adapter = activated @ doubles[1].T @ doubles[2].T
    expected = activated @ weight.double().T + adapter * 0.5
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad_out)
    expected_grads = torch.autograd.grad(expected, doubles, grad_out.double())
    for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (a - b).abs().max() / b.abs().max() < bound


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("llama") / "llama", weight_scale=3.0)


def load(folder, dtype):
    from postgrad.model.load.load import load

    return load(ModelConfig(path=str(folder), dtype=dtype), torch.device("cuda"), 0)


def requests(samples=8):
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 63, 64, 65, 66, 128, 130, 200, 7]
    prompts = [torch.randint(20, 2000, (n,), generator=generator).tolist() for n in lengths]
    return [
        Request(p, [100 * i + j for j in range(samples)], 40 if i % 2 else None)
        for i, p in enumerate(prompts)
    ]


def differs_by_rounding(model, request, index, tokens, others, temperature):
    """Return whether the first difference of two rows is due to float32 rounding.

    It is if the row's random number is within rounding of a boundary between the two tokens.
    """
    pairs = enumerate(zip(tokens, others, strict=False))
    at = next(i for i, (a, b) in pairs if a != b)
    low, high = sorted((tokens[at], others[at]))
    with torch.no_grad():
        ids = torch.tensor([request.prompt + tokens[:at]], device="cuda")
        logits = model(ids).logits[0, -1].double()
    if temperature == 0.0:
        return float(logits.max() - logits[[low, high]].min()) < 1e-4
    boundaries = (logits / temperature).softmax(-1).cumsum(-1)[low:high]  # between the two tokens
    number = SeededRandom().draw(request.seeds[index], at, 1)[0]
    return float((boundaries - number).abs().max()) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_the_paged_engine_samples_the_tokens_of_the_plain_engine(model, temperature):
    """Token for token, except where a random number is at a boundary within float32 rounding."""
    from postgrad.rollout.native.engine import NativeEngine

    loaded = load(model, "float32")
    engine = NativeEngine(loaded, RolloutConfig(max_rows=1024))
    sampling = Sampling(temperature, 70)
    paged = engine.generate(requests(), sampling)
    # Rows wait for slots and pages, and some start again.
    small_cache = RolloutConfig(max_rows=8, cache_gib=30 * engine.decoder.page_bytes() / 2**30)
    small_engine = NativeEngine(load(model, "float32"), small_cache)
    with_small_cache = small_engine.generate(requests(), sampling)
    engine.decoder = None
    plain = engine.generate(requests(), sampling)
    num_differences = 0
    for request, *rows in zip(requests(), plain, paged, with_small_cache, strict=True):
        for index, (x, *same) in enumerate(zip(*rows, strict=True)):
            for y in same:
                if x.tokens == y.tokens:
                    assert x.finish == y.finish
                    assert y.logprobs == pytest.approx(x.logprobs, abs=2e-4)
                else:
                    assert differs_by_rounding(
                        loaded.model, request, index, x.tokens, y.tokens, temperature
                    )
                    num_differences += 1
    assert num_differences <= 4, "of 160 comparisons"


def engine_and_trainer(folder, rows, asked, tokens):
    """Return what the engine samples in bfloat16, and the trainer's log-probs of these tokens."""
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.model.policy import LocalPolicy
    from postgrad.rollout.native.engine import NativeEngine
    from postgrad.types import Batch, Trajectory

    loaded = load(folder, "bfloat16")
    engine = NativeEngine(loaded, RolloutConfig(max_rows=rows))
    assert engine.decoder is not None
    done = engine.generate(asked, Sampling(1.0, tokens))
    overrides = [
        f"model.path={folder}",
        "data.train=arithmetic:1",
        "model.device=cuda",
        "model.dtype=bfloat16",
    ]
    config = compose("grpo", overrides, lambda name: find_method(name).Settings)
    policy = LocalPolicy(config, loaded, find_method("grpo")(config).objective)
    rows_of = [
        Trajectory(str(i), r.prompt, c.tokens, group=i, behavior_logprobs=c.logprobs)
        for i, (r, cs) in enumerate(zip(asked, done, strict=True))
        for c in cs
    ]
    batch = Batch.of(rows_of)
    return batch, policy.logprobs(batch)["logprobs"]


@pytest.mark.parametrize(("rows", "prompt", "tokens"), [(8, 0, 70), (1024, 0, 70), (64, 600, 700)])
def test_engine_and_trainer_log_probs_are_almost_equal_in_bfloat16(model, rows, prompt, tokens):
    """Short rows, and long ones whose keys a decode step divides into chunks."""
    asked = [
        Request(
            list(range(20, 20 + prompt)) + r.prompt, r.seeds, None if prompt else r.max_new_tokens
        )
        for r in requests()
    ]
    batch, trained = engine_and_trainer(model, rows, asked, tokens)
    gap = (trained - batch.tokens["behavior_logprobs"]).abs()
    assert gap.max() < 1e-3 and gap.mean() < 1e-5, (gap.mean(), gap.max())


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_engine_and_trainer_agree_with_wide_heads_biases_and_head_norms(tmp_path, family):
    """The gap is smaller than what rounding to bfloat16 does to the trainer itself.

    With heads of 128 the engine's attention multiplies fewer rows at a time than the trainer's, so
    that they need not compute the same bits (measured on an H200: 0.0009 nats on average).
    """
    import transformers

    from postgrad.model.load.gate import stock_logprobs
    from postgrad.model.load.tiny import make_tiny

    folder = make_tiny(tmp_path / family, seed=0)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=17,
    )
    random_model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in random_model.parameters():
            if p.dim() == 2:
                p.mul_(3)
            else:
                p.add_(0.1 * torch.randn_like(p))
    random_model.save_pretrained(folder)
    for rows, prompt, tokens in ((64, 0, 70), (64, 600, 600)):
        asked = [Request(list(range(20, 20 + prompt)) + r.prompt, r.seeds[:2]) for r in requests()]
        batch, trained = engine_and_trainer(folder, rows, asked, tokens)
        gap = (trained - batch.tokens["behavior_logprobs"]).abs()
        exact = stock_logprobs(load_stock(folder), batch)
        rounding = (trained - exact).abs()
        assert rounding.max() < 0.5, "the trainer computes this model"
        assert gap.mean() < rounding.mean(), (gap.mean(), rounding.mean())
        assert gap.max() < rounding.max(), (gap.max(), rounding.max())


def load_stock(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()


def test_packed_and_padded_passes_give_the_same_gradient(model, monkeypatch):
    from postgrad.config.compose import compose
    from postgrad.methods import find_method
    from postgrad.model.metrics import MetricAccumulator
    from postgrad.model.passes import layout
    from postgrad.model.policy import LocalPolicy
    from postgrad.types import Batch, Trajectory

    generator = torch.Generator().manual_seed(2)
    rows = [
        Trajectory(
            str(i),
            r.prompt,
            torch.randint(20, 2000, (5 + 9 * j,), generator=generator).tolist(),
            group=i,
        )
        for i, r in enumerate(requests())
        for j in range(4)
    ]
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.randn(batch.num_tokens, generator=generator)
    overrides = [
        f"model.path={model}",
        "data.train=arithmetic:1",
        "model.device=cuda",
        "model.dtype=float32",
        "training.token_budget=1500",
    ]
    config = compose(
        "grpo", [*overrides, "method.entropy_coef=0.01"], lambda name: find_method(name).Settings
    )
    grads = []
    for padded in (False, True):
        if padded:
            monkeypatch.setattr(layout, "supports_triton", lambda device: False)
        policy = LocalPolicy(config, load(model, "float32"), find_method("grpo")(config).objective)
        part = Batch(batch.prompt, batch.response, dict(batch.tokens), dict(batch.rows))
        policy.accumulate(
            policy.objective.prepare(part), policy.objective.view(1), MetricAccumulator()
        )
        grads.append({name: p.grad.clone() for name, p in policy.model.named_parameters()})
    for name, ours in grads[0].items():
        torch.testing.assert_close(
            ours, grads[1][name], rtol=2e-3, atol=2e-6 + 1e-4 * float(grads[1][name].abs().max())
        )


def test_sampled_tokens_follow_their_probabilities(model):
    """Chi-square test of 40,000 first tokens against the model's distribution."""
    from postgrad.rollout.native.engine import NativeEngine

    loaded = load(model, "float32")
    prompt = requests()[6].prompt
    done = NativeEngine(loaded, RolloutConfig(max_rows=2048)).generate(
        [Request(prompt, list(range(40_000)), 1)], Sampling(1.0, 1)
    )[0]
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in done]), minlength=2048).double()
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt], device="cuda")).logits[0, -1]
        p = logits.double().softmax(-1).cpu()
    expected = p * len(done)
    common = expected > 20
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected_counts = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_square = ((observed - expected_counts).square() / expected_counts).sum()
    freedom = len(expected_counts) - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5, (chi_square, freedom)
