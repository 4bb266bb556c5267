"""Every architecture: our passes, gradients and decoding give the numbers of the stock model."""

import random
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SumOfLogprobs, make_family, save_family
from jsonl import write_jsonl
from refused import refused
from tiny_runs import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.errors import ConfigError
from postgrad.model.load import gate as gate_module
from postgrad.model.load.context import NO_LIMIT, context_length
from postgrad.model.load.formats import Loaded
from postgrad.model.load.gate import Gate, stock_logprobs
from postgrad.model.load.load import disable_dropout, load
from postgrad.model.lora import adapter_parameters, add_adapters
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.passes import head as head_module
from postgrad.model.passes.attention import NAME, register_attention
from postgrad.model.passes.head import Head
from postgrad.model.passes.row_attention import RowGroup
from postgrad.model.passes.support import (
    Support,
    eval_mode,
    in_captured_family,
    set_support,
    support_of,
)
from postgrad.model.policy import FrozenPolicy, LocalPolicy
from postgrad.model.port import FULL
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.hf import HfEngine
from postgrad.rollout.native import store_slots
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

CPU = torch.device("cpu")
PACKED = {
    "cohere2",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "mistral",
    "olmo3",
    "starcoder2",
    "ernie4_5",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "hunyuan_v1_dense",
    "llama",
    "ministral3",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
}
ROWS = {  # recurrent layers, or attention with code of its own
    "codegen",
    "gptj",
    "qwen3_5_text",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
    "falcon_h1",
    "granitemoehybrid",
    "mamba2",
}


FREQUENT = {  # one of each kind of attention, position, head and layer; the others are nightly
    "deepseek_v3",
    "falcon_h1",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "gptj",
    "granite",
    "llama",
    "mamba2",
    "phi",
    "qwen3_moe",
    "qwen3_next",
}
FAMILY_PARAMS = [
    pytest.param(name, marks=pytest.mark.slow if name in FREQUENT else pytest.mark.nightly)
    for name in FAMILIES
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by type, each written once."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("families")

    def folder(model_type):
        if model_type not in made:
            made[model_type] = save_family(root / model_type, model_type)
        return made[model_type]

    return folder


def load_folder(folder: Path) -> Loaded:
    return load(ModelConfig(path=str(folder), device="cpu", dtype="float32"), CPU)


def stock_model(folder: Path):
    """Load the model as transformers does, with the attention that computes all of its terms."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model.eval()


def shared_rows(seed: int = 0, num_groups: int = 3) -> Batch:
    """Groups that share prompts; many rows exceed a window of 8 tokens."""
    rng = random.Random(seed)
    rows: list[Trajectory] = []
    for group in range(num_groups):
        prompt = [rng.randrange(16) for _ in range(rng.randint(1, 14))]
        for index in range(3):
            response = [rng.randrange(16) for _ in range(rng.randint(1, 15))]
            advantages = {"advantages": [rng.uniform(-1, 1)] * len(response)}
            rows.append(Trajectory(f"p{group}", prompt, response, group, index, tokens=advantages))
    return Batch.of(rows)


@pytest.mark.parametrize("model_type", FAMILY_PARAMS)
def test_passes_give_the_log_probs_of_the_stock_model(model_type, folders):
    loaded = load_folder(folders(model_type))
    config = config_of("grpo", folders(model_type), "training.token_budget=64")
    batch = shared_rows()
    ours = FrozenPolicy(config, loaded).logprobs(batch)["logprobs"]
    torch.testing.assert_close(
        ours, stock_logprobs(stock_model(folders(model_type)), batch), atol=1e-4, rtol=0
    )
    expected = "packed" if model_type in PACKED else "shared"
    assert support_of(loaded.model).passes == ("rows" if model_type in ROWS else expected)


@pytest.mark.parametrize("model_type", FAMILY_PARAMS)
def test_gradients_are_those_of_the_stock_model(model_type, folders):
    batch = shared_rows(seed=1)
    loaded = load_folder(folders(model_type))

    config = config_of("grpo", folders(model_type), "training.token_budget=64")
    policy = LocalPolicy(config, loaded, SumOfLogprobs())
    policy.accumulate(batch, FULL, MetricAccumulator())
    ours = {name: p.grad for name, p in loaded.model.named_parameters()}
    stock = stock_model(folders(model_type))
    loss = torch.zeros(())
    rows = zip(
        batch.prompt.split(),
        batch.response.split(),
        batch.tokens["advantages"].split(batch.response.lengths.tolist()),
        strict=True,
    )
    for prompt, response, advantages in rows:
        logits = stock(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        loss = loss + (logprobs.gather(1, response[:, None])[:, 0] * advantages).sum()
    loss.backward()
    largest = max(float(p.grad.abs().max()) for p in stock.parameters() if p.grad is not None)
    for name, parameter in stock.named_parameters():
        mine = ours[name]
        theirs = parameter.grad
        if theirs is None:
            assert mine is None or float(mine.abs().max()) == 0, name
            continue
        assert mine is not None, name
        torch.testing.assert_close(mine, theirs, atol=1e-4 * largest, rtol=1e-3, msg=name)


@pytest.mark.parametrize("model_type", FAMILY_PARAMS)
def test_the_engine_samples_from_the_stock_model(model_type, folders):
    engine = NativeEngine(load_folder(folders(model_type)), RolloutConfig(max_rows=3))
    check_sampled(engine, folders(model_type))


def check_sampled(engine, folder):
    requests = [Request([5, 6, 7, 8, 9, 10, 11], [1, 2]), Request([9, 9, 3], [3, 4, 5])]
    groups = engine.generate(requests, Sampling(1.0, 20))
    rows: list[Trajectory] = []
    sampled: list[float] = []
    for number, (request, completions) in enumerate(zip(requests, groups, strict=True)):
        for index, done in enumerate(completions):
            rows.append(Trajectory(f"p{number}", request.prompt, done.tokens, number, index))
            sampled += done.logprobs
    expected = stock_logprobs(stock_model(folder), Batch.of(rows))
    torch.testing.assert_close(torch.tensor(sampled), expected, atol=1e-4, rtol=0)
    assert len(sampled) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["grpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("sft", "dpo"))]
)
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "gemma3_text", "gpt_oss", "nemotron_h"])
def test_training_changes_the_model(recipe, model_type, folders, tmp_path):
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a)}
        for a in range(1, 5)
        for b in range(1, 3)
    ]
    data = tmp_path / "pairs.jsonl"
    write_jsonl(data, *pairs)
    sizes = [
        "training.steps=2",
        "training.problems_per_step=4",
        "rollout.max_response_tokens=6",
        "optimizer.lr=1e-3",
        f"runs={tmp_path}",
    ]
    if recipe == "dpo":
        sizes.append(f"data.train={data}")
    if recipe == "grpo":
        reward = tmp_path / "reward.py"
        reward.write_text("def score(response, problem):\n    return float(len(response) % 3)\n")
        sizes += ["rollout.samples=4", f"reward.verifier={reward}:score"]
    result = train(config_of(recipe, folders(model_type), *sizes), Reporter())
    assert result.step == 2
    policy = tmp_path / "test" / "checkpoints" / "step-2" / "policy"
    trained = dict(stock_model(policy).named_parameters())
    before = dict(stock_model(folders(model_type)).named_parameters())
    assert any(not torch.equal(trained[name], before[name]) for name in before)


def test_a_broken_mask_is_caught_by_the_gate(folders, monkeypatch, tmp_path):
    """A mask that lets a response see its neighbors must not reach training."""
    from postgrad.model.passes import layout

    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    assert support_of(load_folder(folders("gpt_oss")).model).passes == "shared"
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "second"))
    causal = lambda part: torch.ones(part.shape[1], part.shape[1]).bool().tril()[None, None]  # noqa: E731
    monkeypatch.setattr(layout, "_bundle_mask", causal)
    support = support_of(load_folder(folders("gpt_oss")).model)
    assert support.passes == "rows" and "nats" in support.reasons[-1]


def model_with_large_logits():
    """A model in bfloat16 whose logits are as large as those of trained models."""
    model = make_family("llama").bfloat16()
    with torch.no_grad():
        model.model.norm.weight.mul_(30)
    return model


def test_rounding_of_large_logits_does_not_refuse_a_pass(tmp_path):
    register_attention()
    gate = Gate(model_with_large_logits(), tmp_path)
    gate.measure()
    support = gate.decide()
    assert gate.batch is not None
    assert support.passes == "packed", support.reasons
    mean, largest = support.rounding
    assert mean > gate_module.MEAN_TOLERANCE[torch.bfloat16]
    ours = gate_module.our_logprobs(gate.model.eval(), gate.batch, "packed")
    assert gate_module.disagreement(ours, gate.stock, torch.bfloat16), "more than the fixed bounds"
    cached = Gate(model_with_large_logits(), tmp_path).verdict
    assert cached is not None and cached[2] == (mean, largest)


def test_a_broken_mask_is_caught_where_logits_are_large(monkeypatch, tmp_path):
    from postgrad.model.passes import layout

    register_attention()
    causal = lambda part: torch.ones(part.shape[1], part.shape[1]).bool().tril()[None, None]  # noqa: E731
    monkeypatch.setattr(layout, "_bundle_mask", causal)
    gate = Gate(model_with_large_logits(), tmp_path)
    gate.measure()
    assert gate.batch is not None
    with eval_mode(gate.model):
        gate.model.set_attn_implementation(NAME)
        broken = gate_module.our_logprobs(gate.model, gate.batch, "shared")
    assert gate_module.disagreement(broken, gate.stock, torch.bfloat16, gate.rounding)


def test_a_forgotten_window_is_caught_by_the_gate(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(RowGroup, "windowed_mask", lambda group, window: group.mask)
    support = support_of(load_folder(folders("olmo3")).model)
    assert support.passes == "shared" and "nats" in support.reasons[0]


def test_a_model_that_no_pass_reproduces_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(gate_module, "our_logprobs", lambda model, batch, kind: torch.zeros(999))
    monkeypatch.setattr(gate_module, "disagreement", lambda *_: "far apart")
    register_attention()
    gate = Gate(make_family("llama"), tmp_path)
    gate.measure()
    with refused("unsupported", "model.path"):
        gate.decide()


def test_the_verdict_is_cached_by_architecture(monkeypatch, tmp_path):
    register_attention()
    first = Gate(make_family("qwen3"), tmp_path)
    first.measure()
    first.decide()
    monkeypatch.setattr(gate_module, "stock_logprobs", lambda *_: pytest.fail("measured again"))
    again = Gate(make_family("qwen3", seed=1), tmp_path)
    again.measure()
    assert again.decide() == support_of(first.model)
    other = Gate(make_family("qwen3", num_hidden_layers=1), tmp_path)
    assert other.verdict is None


def test_mistral_without_a_window_is_packed(tmp_path):
    folder = save_family(tmp_path, "mistral", sliding_window=None)
    loaded = load_folder(folder)
    batch = shared_rows(seed=4)
    assert support_of(loaded.model).passes == "packed" and in_captured_family(loaded.model)
    ours = FrozenPolicy(config_of("grpo", folder), loaded).logprobs(batch)["logprobs"]
    torch.testing.assert_close(ours, stock_logprobs(stock_model(folder), batch), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [4, 8, 64])
def test_windows_of_any_length_are_applied(window):
    register_attention()
    stock = make_family("mistral", sliding_window=window).eval()
    batch = shared_rows(seed=2)
    expected = stock_logprobs(stock, batch)
    model = make_family("mistral", sliding_window=window)
    model.set_attn_implementation(NAME)
    ours = gate_module.our_logprobs(model, batch, "shared")
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    if window < 64:
        wrong = make_family("mistral", sliding_window=window + 1).eval()
        assert (stock_logprobs(wrong, batch) - expected).abs().max() > 1e-3


# ---- the table of docs/machines.md

PAGE = Path(__file__).parents[2] / "docs" / "machines.md"
BEGIN = "<!-- families: written by tests/model/test_families.py -->\n"
END_MARK = "<!-- end of families -->"


def lora_works(folder: Path) -> bool:
    """Return whether adapters leave the log-probs as they are and get a gradient."""
    loaded = load_folder(folder)
    batch = shared_rows(seed=3)
    config = config_of("grpo", folder, "model.lora.rank=2")
    before = FrozenPolicy(config, loaded).logprobs(batch)["logprobs"]
    try:
        add_adapters(loaded.model, config.model.lora, seed=0)
    except (ConfigError, ValueError, TypeError, AttributeError):
        return False
    policy = LocalPolicy(config, loaded, SumOfLogprobs())
    after = policy.logprobs(batch)["logprobs"]
    policy.accumulate(batch, FULL, MetricAccumulator())
    adapters = adapter_parameters(loaded.model).values()
    learns = any(p.grad is not None and bool(p.grad.abs().max() > 0) for p in adapters)
    return learns and bool(torch.allclose(before, after, atol=1e-5))


def families_table(folders) -> str:
    """Return the table of docs/machines.md, from what load() and the engine choose."""
    in_vllm = set((Path(__file__).parent / "vllm_architectures.txt").read_text().split("\n"))
    types: dict[tuple[str, ...], list[str]] = {}
    for model_type in sorted(FAMILIES):
        loaded = load_folder(folders(model_type))
        passes = support_of(loaded.model).passes
        engine = NativeEngine(loaded, RolloutConfig(max_rows=3))
        decoding = "native" if engine.stock_engine is None else "transformers"
        captured = passes == "packed" and in_captured_family(loaded.model)
        cuda = "native, captured graphs" if captured else decoding
        lora = "yes" if lora_works(folders(model_type)) else "no"
        vllm = "yes" if type(loaded.model).__name__ in in_vllm else "no"
        types.setdefault((passes, decoding, cuda, lora, vllm), []).append(f"`{model_type}`")
    lines = [
        "| model types | training passes | decoding on a CPU | on CUDA | LoRA | in vLLM 0.32 |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in types.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.nightly
def test_the_table_of_the_docs_is_what_the_code_does(folders, request):
    """Run with --write-docs to write the table."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    written, tail = rest.split(END_MARK, 1)
    table = families_table(folders)
    if request.config.getoption("--write-docs"):
        PAGE.write_text(head + BEGIN + table + END_MARK + tail)
        return
    assert written == table


def test_damaged_weights_are_refused_and_leave_no_verdict(tiny, tmp_path):
    """The verdict of the gate is kept for the architecture, so other weights would inherit it."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with refused("damaged", "model.path"):
        Gate(model, tmp_path).measure()
    assert not list(tmp_path.rglob("*.json"))


def tiny_of(model_type: str, **settings):
    """A tiny model of a type that is not among FAMILIES."""
    config = AutoConfig.for_model(model_type, vocab_size=18, bos_token_id=None, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def decided(model, cache: Path):
    register_attention()
    gate = Gate(model, cache)
    gate.measure()
    return gate.decide()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_passes_without_the_bias_of_the_head_are_refused(scale, monkeypatch, tmp_path):
    """With a bias of zero the numbers agree, but it would not be trained."""
    model = make_family("phi")
    with torch.no_grad():
        model.lm_head.bias.mul_(scale)
    assert decided(model, tmp_path / "with").passes == "packed"
    monkeypatch.setattr(head_module, "head_of", lambda model: Head(model.lm_head.weight))
    with refused("unsupported", "model.path"):
        decided(model, tmp_path / "without")


def test_an_engine_without_the_bias_of_the_head_is_noticed(monkeypatch, folders):
    """The comparison with the stock model would pass if the bias were too small to be seen."""
    engine = NativeEngine(load_folder(folders("phi")), RolloutConfig(max_rows=3))
    # After the numeric gate, which would have noticed it.
    monkeypatch.setattr(store_slots, "head_of", lambda model: Head(model.lm_head.weight))
    with pytest.raises(AssertionError):
        check_sampled(engine, folders("phi"))


def test_top_log_probs_have_the_bias_of_the_head(folders):
    batch = shared_rows()
    policy = FrozenPolicy(config_of("grpo", folders("phi")), load_folder(folders("phi")))
    top = policy.top_logprobs(batch, 18)  # every id
    ours = top["logprobs"][top["ids"] == batch.response.values[:, None]]
    stock = stock_logprobs(stock_model(folders("phi")), batch)
    torch.testing.assert_close(ours, stock, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["phi", "gptj", "codegen"])
def test_a_run_trains_and_saves_the_bias_of_the_head(model_type, folders, tmp_path):
    sizes = ["training.steps=2", "training.problems_per_step=4", "optimizer.lr=1e-3"]
    train(config_of("sft", folders(model_type), *sizes, f"runs={tmp_path}"), Reporter())
    saved = tmp_path / "test" / "checkpoints" / "step-2" / "policy"
    change = stock_model(saved).lm_head.bias - stock_model(folders(model_type)).lm_head.bias
    assert 1e-4 < change.abs().max().item() < 1e-2


def test_a_row_that_transformers_sets_to_zero_is_refused(tmp_path):
    """A tied head would lose a trained row whenever the checkpoint is loaded."""
    with refused("damaged", "model.path"):
        load_folder(save_family(tmp_path / "tied", "youtu", pad_token_id=16))
    untied = {"pad_token_id": 16, "tie_word_embeddings": False}
    load_folder(save_family(tmp_path / "untied", "youtu", **untied))


def test_passes_without_a_learned_mask_are_not_used(tmp_path):
    """Doge adds a learned term to the attention scores; it is constant in a new model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = tiny_of("doge", num_hidden_layers=1, num_key_value_heads=2, **sizes)
    support = decided(model, tmp_path)
    assert support.passes == "shared" and "self_attn.A" in support.reasons[0]


def test_noise_of_routers_is_switched_off(tmp_path):
    model = make_family("mixtral", router_jitter_noise=0.3).train()
    disable_dropout(model)
    assert decided(model, tmp_path).passes == "packed"


def test_a_model_with_random_routing_in_training_mode_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 4, "num_local_experts": 4}
    model = tiny_of("phimoe", num_hidden_layers=1, **experts, **sizes)
    with refused("unsupported", "model.path"):
        decided(model, tmp_path)


def test_a_model_that_differs_in_training_mode_is_refused(tmp_path):
    """Dropout that stays on, as in a class with a name of its own for the rate."""
    model = make_family("llama").train()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, _, output: torch.dropout(output, 0.5, module.training)
    )
    with refused("unsupported", "model.path"):
        decided(model, tmp_path)


def test_a_model_that_generate_samples_wrongly_is_refused(folders):
    """The cached states of transformers' RWKV are not those of its forward pass."""
    model = tiny_of("rwkv", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    register_attention()
    set_support(model, Support("rows"))
    model.generation_config.eos_token_id = 17
    loaded = Loaded(model, load_folder(folders("llama")).tokenizer)
    with refused("unsupported", "rollout.engine"):
        HfEngine(loaded, RolloutConfig())


def test_context_of_models_without_positions():
    lengths = {"mamba2": NO_LIMIT, "bloom": NO_LIMIT, "gpt2": 1024, "mpt": 2048, "llama": 2048}
    for model_type, length in lengths.items():
        assert context_length(AutoConfig.for_model(model_type)) == length


@pytest.mark.parametrize(
    ("kind", "options"), [("deepseek_v32", {"index_topk": 48}), ("doge", {"keep_window_size": 48})]
)
def test_rows_end_before_a_model_chooses_among_its_keys(kind, options):
    """Beyond it, the stock decode and the stock pass over a row give other log-probs."""
    config = AutoConfig.for_model(kind, max_position_embeddings=512, **options)
    assert context_length(config) == 48


def test_context_ends_where_rotary_positions_change_with_the_length():
    """Beyond it, a long row would change the log-probs of short rows in the same pass."""
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0}
    rotary |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rotary["original_max_position_embeddings"] = 32
    model = make_family("phi3", rope_parameters=rotary, original_max_position_embeddings=32)
    assert context_length(model.config) == 32
    assert context_length(make_family("phi3").config) == 512


def test_a_window_as_long_as_the_context_is_not_exceeded():
    for window, context, longest in ((64, 64, 20), (64, 66, 66), (64, 4096, 71)):
        model = make_family("mistral", sliding_window=window, max_position_embeddings=context)
        batch = gate_module.probe_rows(model)
        assert int((batch.prompt.lengths + batch.response.lengths).max()) == longest
