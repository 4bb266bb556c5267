"""Every fast family on a GPU against the stock transformers model, at two sizes.

Gradients, decoding, and one training step with every optimizer and with LoRA, activation
checkpointing, captured graphs and plain passes. Run with: make test-gpu
"""

import importlib.util
import random

import pytest
import torch
from families import SumOfLogprobs, save_family

from postgrad.config.compose import compose
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.methods import find_method
from postgrad.model.load.gate import disagreement, stock_logprobs
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes.support import support_of
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
# Rows of up to 150 tokens cross the windows and several blocks of 64 keys.
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 70},
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 40,
    },
    "qwen3_moe": {},
}
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
WIDE_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
WIDE_MOE = {"num_experts": 8, "moe_intermediate_size": 768}
CASES = [(family, size) for family in FAMILIES for size in ("small", "wide")]
every_case = pytest.mark.parametrize(("family", "size"), CASES, ids=["-".join(c) for c in CASES])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by family and size, each written once."""
    made = {}

    def folder(family, size):
        if (family, size) not in made:
            changes = dict(FAMILIES[family])
            if size == "wide":
                changes |= WIDE | {"sharp": False}
                changes |= WIDE_GEMMA if family == "gemma3_text" else {}
                changes |= WIDE_MOE if family == "qwen3_moe" else {}
            root = tmp_path_factory.mktemp(f"{family}-{size}")
            made[family, size] = save_family(root, family, **changes)
        return made[family, size]

    return folder


def make_rows(seed=0) -> Batch:
    """Groups that share prompts, of 1 to 150 tokens."""
    rng = random.Random(seed)
    rows = []
    for group, prompt_tokens in enumerate((90, 3, 40)):
        prompt = [rng.randrange(16) for _ in range(prompt_tokens)]
        for index in range(3):
            response = [rng.randrange(16) for _ in range(rng.randint(1, 60))]
            advantages = {"advantages": [rng.uniform(-1, 1)] * len(response)}
            rows.append(Trajectory(f"p{group}", prompt, response, group, index, tokens=advantages))
    return Batch.of(rows)


def load_on_gpu(folder, dtype, **settings):
    return load(ModelConfig(path=str(folder), dtype=dtype, **settings), CUDA)


def load_stock(folder, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(CUDA).eval()


def make_config(folder, dtype, *overrides):
    fixed = [
        f"model.path={folder}",
        "data.train=arithmetic:1",
        "model.device=cuda",
        f"model.dtype={dtype}",
        "training.token_budget=400",
    ]
    return compose("grpo", [*fixed, *overrides], lambda name: find_method(name).Settings)


def our_gradients(folder, dtype, captured):
    """Return the float32 gradients of SumOfLogprobs by parameter, from our packed passes."""
    loaded = load_on_gpu(folder, dtype)
    assert support_of(loaded.model).passes == "packed"
    policy = LocalPolicy(make_config(folder, dtype), loaded, SumOfLogprobs())
    if captured:
        experts = loaded.model.config.model_type == "qwen3_moe"
        assert policy.graph_cache.enabled == (not experts or dtype == "bfloat16")
    policy.graph_cache.enabled &= captured
    policy.accumulate(make_rows(), FULL, MetricAccumulator())
    masters = policy.optimizer.masters
    return {name: masters[name].grad.float() for name, _ in loaded.model.named_parameters()}


def stock_gradients(folder, dtype):
    """Return the same gradients from the stock model, one row at a time, summed in float32."""
    model = load_stock(folder, dtype)
    batch = make_rows()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    advantages = batch.tokens["advantages"].split(batch.response.lengths.tolist())
    rows = zip(batch.prompt.split(), batch.response.split(), advantages, strict=True)
    for prompt, response, weights in rows:
        ids = torch.cat([prompt, response]).to(CUDA)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, response.to(CUDA)[:, None])[:, 0]
        model.zero_grad()
        (logprobs * weights.to(CUDA)).sum().backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad.float()
    return sums


@every_case
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_gradients_are_those_of_the_stock_model(folders, family, size, captured):
    folder = folders(family, size)
    expected = stock_gradients(folder, torch.float32)
    actual = our_gradients(folder, "float32", captured)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, theirs in expected.items():
        torch.testing.assert_close(
            actual[name], theirs, rtol=1e-3, atol=2e-4 * largest, msg=lambda text, n=name: n + text
        )


def cosine(a, b):
    x, y = (torch.cat([g[name].flatten() for name in sorted(b)]).double() for g in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


@every_case
def test_bfloat16_gradients_are_as_exact_as_those_of_the_stock_model(folders, family, size):
    """Both are compared with the float32 gradient by their cosine."""
    folder = folders(family, size)
    exact = stock_gradients(folder, torch.float32)
    theirs = cosine(stock_gradients(folder, torch.bfloat16), exact)
    for captured in (True, False):
        ours = cosine(our_gradients(folder, "bfloat16", captured), exact)
        assert ours > theirs - 0.02, (captured, ours, theirs)


@every_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_that_of_the_stock_model(folders, family, size, dtype):
    folder = folders(family, size)
    loaded = load_on_gpu(folder, dtype)
    engine = NativeEngine(loaded, RolloutConfig(max_rows=8))
    assert engine.decoder is not None and engine.stock_engine is None
    assert engine.decoder.captures == (family != "qwen3_moe" or dtype == "bfloat16")
    prompts = [[i * 7 % 16 for i in range(n)] for n in (90, 1, 65)]
    requests = [Request(prompt, [3 * i, 3 * i + 1]) for i, prompt in enumerate(prompts)]
    groups = engine.generate(requests, Sampling(1.0, 50))
    rows = []
    sampled = []
    for number, (request, completions) in enumerate(zip(requests, groups, strict=True)):
        for index, done in enumerate(completions):
            rows.append(Trajectory(f"p{number}", request.prompt, done.tokens, number, index))
            sampled += done.logprobs
    stock = load_stock(folder, getattr(torch, dtype))
    expected = stock_logprobs(stock, Batch.of(rows))
    assert not disagreement(torch.tensor(sampled), expected, getattr(torch, dtype))


OPTIONS = {
    "captured": [],
    "eager": [],
    "checkpointing": ["model.activation_checkpointing=true"],
    "fused": ["optimizer.kind=adamw_fused"],
    "offloaded": ["optimizer.kind=adamw_offloaded"],
    "8bit": ["optimizer.kind=adamw_8bit"],
    "lora": ["model.lora.rank=4"],
}
NEEDS = {"lora": "peft"}


@every_case
def test_one_training_step_with_every_option(folders, family, size):
    """The gradient norm depends on none of them, except LoRA, which trains other parameters."""
    folder = folders(family, size)
    batch = make_rows(seed=1)
    norms = {}
    for option, overrides in OPTIONS.items():
        if option in NEEDS and importlib.util.find_spec(NEEDS[option]) is None:
            continue
        config = make_config(folder, "bfloat16", "optimizer.lr=1e-3", *overrides)
        loaded = load(config.model, CUDA)
        if option == "lora":
            from postgrad.model.lora import add_adapters

            add_adapters(loaded.model, config.model.lora, seed=0)
        policy = LocalPolicy(config, loaded, find_method("grpo")(config).objective)
        if option == "eager":
            policy.graph_cache.enabled = False
        if option in ("lora", "checkpointing"):
            assert not policy.graph_cache.enabled
        before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
        metrics = policy.update(batch.select(range(len(batch))), 1)
        norms[option] = metrics["grad_norm"]
        changed = [n for n, p in loaded.model.named_parameters() if not torch.equal(p, before[n])]
        if option == "lora":
            assert changed and all(".lora_" in name for name in changed)
        else:
            assert len(changed) > len(before) // 2, option
        del policy, loaded, before
    for option, norm in norms.items():
        assert norm > 0, option
        if option != "lora":
            assert norm == pytest.approx(norms["captured"], rel=0.05), option
