"""`postgrad analyze entropy`: entropies against a slow reference, figures, the command."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from refused import refused
from tables import tabled
from tiny_runs import config_of, random_batch, rows_of, stock_model, stock_outputs, tree

from postgrad.analysis.data import evenly_spaced
from postgrad.analysis.entropy import (
    boundary_layer,
    internal_depth,
    measure,
    state_entropy,
    stats,
    summarize,
)
from postgrad.analysis.figures import flow_points, tick_layers
from postgrad.cli.main import main
from postgrad.model.load.load import load
from postgrad.model.load.tiny import tiny_tokenizer
from postgrad.phases import shown_by

LAYERS = 3


# ---- entropy of a state


def test_the_bias_of_the_head_is_added():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator)
    weight = torch.randn(7, 4, generator=generator)
    bias = torch.randn(7, generator=generator)
    expected = torch.distributions.Categorical(logits=hidden @ weight.T + bias).entropy()
    torch.testing.assert_close(state_entropy(hidden, weight, 2, 3, bias), expected)


@pytest.mark.parametrize(("tokens", "head"), [(1, 1), (2, 7), (3, 50), (512, 1 << 15)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 40.0])
def test_state_entropy_equals_categorical_for_any_chunk(tokens, head, scale):
    torch.manual_seed(0)
    hidden = torch.randn(5, 8) * scale
    weight = torch.randn(50, 8)
    entropy = state_entropy(hidden, weight, tokens, head)
    expected = torch.distributions.Categorical(
        logits=(hidden.double() @ weight.double().T)
    ).entropy()
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((entropy >= 0).all())
    assert float(entropy.max()) <= math.log(50) + 1e-5


def test_zero_logits_give_the_maximum_and_a_huge_logit_gives_zero():
    weight = torch.eye(7)
    torch.testing.assert_close(
        state_entropy(torch.zeros(2, 7), weight, head_chunk=3), torch.full((2,), math.log(7))
    )
    assert float(state_entropy(5000 * torch.eye(7)[:1], weight, head_chunk=3)) == 0.0


def test_shifting_all_logits_keeps_the_entropy():
    """States without norm have logits of thousands; only their differences matter."""
    weight = torch.cat([torch.ones(9, 1), torch.arange(9.0)[:, None] / 8], 1)
    one, other = state_entropy(torch.tensor([[0.0, 1.0], [4096.0, 1.0]]), weight, head_chunk=4)
    assert float(one) == pytest.approx(float(other), abs=1e-3)


# ---- policies inside a model


@pytest.fixture(scope="module")
def measured(tiny_untied):
    config = config_of("grpo", tiny_untied)
    model = load(config.model, torch.device("cpu")).model
    batch = random_batch(5, groups=4, samples=3)
    return batch, measure(model, batch, 64), model


def reference_states(model, prompt, response) -> dict[str, torch.Tensor]:
    """Returns every state that predicts a response token; runs the stock modules without hooks."""
    base = model.base_model
    ids = torch.tensor([[*prompt, *response]])
    predicting = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    mask = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
    states = {"layer/0": hidden}
    for number, block in enumerate(base.layers, 1):
        states[f"attention_in/{number}"] = block.input_layernorm(hidden)
        states[f"attention_out/{number}"] = block.self_attn(
            states[f"attention_in/{number}"], attention_mask=mask, position_embeddings=rotary
        )[0]
        after_attention = hidden + states[f"attention_out/{number}"]
        states[f"ffn_in/{number}"] = block.post_attention_layernorm(after_attention)
        states[f"ffn_out/{number}"] = block.mlp(states[f"ffn_in/{number}"])
        hidden = after_attention + states[f"ffn_out/{number}"]
        states[f"layer/{number}"] = hidden
    states["full"] = base.norm(hidden)
    return {name: values[0, predicting] for name, values in states.items()}


def test_every_entropy_equals_the_slow_reference(measured, tiny_untied):
    """Each module has the block's own norm before it and none after it.

    The first response token is included, and all entropies have the same order of tokens.
    """
    batch, entropies, _ = measured
    model = stock_model(tiny_untied)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        rows = [reference_states(model, prompt, response) for prompt, response in rows_of(batch)]
    assert set(entropies) == set(rows[0])
    assert len(entropies) == 5 * LAYERS + 2
    # `measure` orders the tokens differently than `rows`, so sorted values are compared. The
    # totals agree only if a token has the same index under every name.
    total = torch.zeros(1)
    expected_total = torch.zeros(1)
    for name, values in entropies.items():
        logits = [row[name] @ head.T for row in rows]
        expected = torch.distributions.Categorical(logits=torch.cat(logits)).entropy().detach()
        assert len(values) == batch.num_tokens
        torch.testing.assert_close(
            values.double().sort().values, expected.sort().values, rtol=1e-4, atol=1e-4, msg=name
        )
        total = total + values
        expected_total = expected_total + expected
    torch.testing.assert_close(
        total.double().sort().values, expected_total.sort().values, rtol=1e-4, atol=1e-3
    )


def test_norm_of_another_module_changes_the_entropy(measured, tiny_untied):
    """The final norm on a module's output, or another block's norm on its input, is detected."""
    batch, _, _ = measured
    model = stock_model(tiny_untied)
    head = model.get_output_embeddings().weight

    def mean(states):
        return float(torch.distributions.Categorical(logits=states @ head.T).entropy().mean())

    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for block in model.base_model.layers:  # initial norms are all equal
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.mul_(1 + 2 * torch.rand(norm.weight.shape, generator=generator))
        prompt, response = rows_of(batch)[0]
        states = reference_states(model, prompt, response)
        for name in ("attention_out/2", "ffn_out/2", "layer/2"):
            assert abs(mean(states[name]) - mean(model.base_model.norm(states[name]))) > 1e-2, name
        blocks = model.base_model.layers
        own = mean(blocks[1].input_layernorm(states["layer/1"]))
        other = mean(blocks[2].input_layernorm(states["layer/1"]))
        assert abs(own - other) > 1e-4


def test_module_outputs_sum_to_the_state_and_changes_to_the_total(measured):
    batch, entropies, model = measured
    prompt, response = rows_of(batch)[0]
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(
        model.config._name_or_path, attn_implementation="eager"
    )
    with torch.no_grad():
        states = reference_states(stock, prompt, response)
        hidden = stock(
            input_ids=torch.tensor([[*prompt, *response]]), output_hidden_states=True
        ).hidden_states
    total = states["layer/0"]
    for number in range(1, LAYERS + 1):
        total = total + states[f"attention_out/{number}"] + states[f"ffn_out/{number}"]
    torch.testing.assert_close(total, states[f"layer/{LAYERS}"], rtol=1e-5, atol=1e-5)
    predicting = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    torch.testing.assert_close(states["layer/2"], hidden[2][0, predicting], rtol=1e-4, atol=1e-4)
    report = summarize(entropies, 0.05)
    changes = sum(layer["layer"]["change"]["mean"] for layer in report["layers"])
    first = report["layers"][0]["layer"]["input"]["mean"]
    last = report["layers"][-1]["layer"]["output"]["mean"]
    assert changes == pytest.approx(last - first, abs=1e-5)
    assert report["full_policy"]["mean"] != pytest.approx(last, abs=1e-2), (
        "the state before the final norm is not the policy"
    )


def test_token_budget_changes_only_the_order(measured):
    batch, entropies, model = measured
    counts: list[int] = []
    with shown_by(lambda _, done, total: counts.append(done)):
        again = measure(model, batch, 9)
    assert counts == sorted(counts) and counts[-1] == batch.num_tokens
    assert len(counts) > len(model.model.layers), "each block of several passes is reported"
    for name, values in entropies.items():
        torch.testing.assert_close(
            again[name].sort().values, values.sort().values, rtol=1e-4, atol=1e-5
        )


def test_statistics_are_over_tokens():
    values = torch.tensor([4.0, 1.0, 2.0, 9.0])
    std = float(np.sqrt((0 + 9 + 4 + 25) / 4))
    expected = {"mean": 4.0, "std": std, "min": 1.0, "max": 9.0, "median": 3.0}
    assert stats(values) == pytest.approx(expected)


def test_unsupported_blocks_are_refused(tmp_path):
    """Granite scales the outputs of its modules; OLMo 2 has no input norm."""
    import transformers as t

    shape = {"vocab_size": 18, "hidden_size": 16, "intermediate_size": 24}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = t.GraniteForCausalLM(t.GraniteConfig(**shape, residual_multiplier=0.2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    with refused("unsupported", "model", shows="block 1"):
        measure(model, random_batch(1), 64)
    with refused("unsupported", "model", shows="input_layernorm"):
        measure(t.Olmo2ForCausalLM(t.Olmo2Config(**shape)), random_batch(1), 64)


# ---- boundary layer


def test_the_internal_policy_is_never_the_whole_model():
    assert [internal_depth(number, 28) for number in (1, 27, 28)] == [1, 27, 27]
    assert internal_depth(1, 1) == 1


def test_boundary_layer_of_known_curves():
    qwen = [2.0, 3.0, 2.5, 2.0, 1.5, 0.8, *[0.05, -0.1] * 10, *[-1.0, -4.0] * 5]
    llama = [*[0.04, 0.06] * 13, 0.03, -0.2]
    assert boundary_layer(qwen) == 6 and len(qwen) == 36
    assert boundary_layer(llama) == 27 and len(llama) == 28
    assert boundary_layer(qwen, tolerance=0.0) == 25
    assert boundary_layer(qwen, tolerance=0.4) == 5 - 1
    with refused("unsupported"):
        boundary_layer([-1.0, -0.5])


# ---- figures


def made_up_report(num_layers: int) -> dict:
    def module(value):
        return {"input": {"mean": value}, "output": {"mean": value + 1}, "change": {"mean": 1.0}}

    layers = [
        {"number": n, "layer": module(n - 1), "attention": module(n), "ffn": module(10 * n)}
        for n in range(1, num_layers + 1)
    ]
    return {
        "model": "tiny",
        "rows": 2,
        "tokens": 9,
        "num_layers": num_layers,
        "layers": layers,
        "full_policy": {"mean": 0.25},
        "boundary_layer": None,
    }


@pytest.mark.parametrize("num_layers", [1, 28, 40])
def test_flow_has_one_point_per_module(num_layers):
    points = flow_points(made_up_report(num_layers))
    assert [p.x for p in points] == list(range(3 * num_layers + 1))
    assert points[-1].entropy == 0.25 and points[-1].kind == "layer"
    kinds = [p.kind for p in points]
    assert kinds == ["layer", "attention", "ffn"] * num_layers + ["layer"]
    for block in range(num_layers):
        assert [p.entropy for p in points[3 * block : 3 * block + 3]] == [
            block,
            block + 2,
            10 * (block + 1) + 1,
        ]
    numbers = tick_layers(num_layers)
    assert numbers[0] == 1
    assert max(numbers) <= num_layers
    assert len(numbers) <= 21


def test_captions_say_model_tokens_and_what_a_point_means():
    from postgrad.analysis.figures import CHANGE_STYLES, FLOW_MEANING, _change_meaning, caption

    report = made_up_report(4) | {"model": "/data/$x/runs/a", "rows": 1200, "tokens": 45678}
    text = caption(report, FLOW_MEANING)
    assert text.startswith("$x/runs/a, 1,200 responses with 45,678 tokens. A point is the mean ent")
    no_boundary = report | {"boundary_layer": None}
    for module in CHANGE_STYLES:
        assert "output minus input" in _change_meaning(report, [module])
        has_line = "Dotted" in _change_meaning(report | {"boundary_layer": 2}, [module])
        assert has_line == (module == "ffn")
        assert "Dotted" not in _change_meaning(no_boundary, [module])


@pytest.mark.slow
def test_figures_of_forty_layers_are_drawn(tmp_path):
    from postgrad.analysis.figures import draw

    files = draw(made_up_report(40), tmp_path)
    names = ("entropy_flow", "ffn_change", "attention_change", "layer_change", "changes")
    assert [f.name for f in files] == [
        f"{name}.{ending}" for name in names for ending in ("png", "pdf")
    ]
    assert all(f.read_bytes()[:4] == (b"\x89PNG" if f.suffix == ".png" else b"%PDF") for f in files)


# ---- command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """Returns a run folder with the rollouts of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    (folder / "rollouts").mkdir(parents=True)
    for step, seed in ((1, 1), (2, 2)):
        rows = rows_of(random_batch(seed))
        kind = pa.list_(pa.int64())
        table = {
            "prompt": pa.array([p for p, _ in rows], kind),
            "response": pa.array([r for _, r in rows], kind),
        }
        pq.write_table(
            pa.table({**table, "reward": [0.5] * len(rows)}),
            folder / "rollouts" / f"step-{step:06d}.parquet",
        )
    return folder


def analyze(model, *overrides: str) -> int:
    return main(["analyze", "entropy", str(model), "device=cpu", "threads=1", *overrides])


@pytest.fixture
def no_figures(monkeypatch):
    """Skips the figures: drawing takes seconds and has its own test."""
    monkeypatch.setattr("postgrad.analysis.run.draw", lambda report, folder: [])


def read_report(folder) -> dict:
    return json.loads((folder / "entropy.json").read_text())


@pytest.mark.slow
def test_run_folder_is_read_at_its_latest_step(tiny_untied, run_folder, capsys):
    assert analyze(tiny_untied, f"data={run_folder}", "rows=0") == 0
    out = capsys.readouterr().out
    folder = run_folder / "eval" / "entropy"
    report = read_report(folder)
    batch = random_batch(2)
    assert report["tokens"] == batch.num_tokens
    assert report["rows"] == len(batch)
    assert report["num_layers"] == LAYERS
    assert "measuring entropies" in out and str(folder) in out
    assert f"{report['tokens']} tokens" in out
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", *[".pdf"] * 5, *[".png"] * 5]
    assert report["ceiling"] == pytest.approx(math.log(18))
    assert report["settings"]["data"] == str(run_folder)
    with torch.no_grad():
        expected = stock_outputs(stock_model(tiny_untied), batch)[1]
    assert report["full_policy"]["mean"] == pytest.approx(float(expected.mean()), abs=1e-4)


def test_rows_and_step_select_the_data(no_figures, tiny, run_folder, tmp_path):
    assert analyze(tiny, f"data={run_folder}", "rows=2", "step=1", f"out={tmp_path}") == 0
    lengths = [len(response) for _, response in evenly_spaced(rows_of(random_batch(1)), 2)]
    report = read_report(tmp_path)
    assert report["rows"] == 2
    assert report["tokens"] == sum(lengths)


def test_evaluation_results_are_read(no_figures, tiny, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    lines = [
        {"prompt": "3+4=", "tokens": [7, 17], "response": "7"},
        {"prompt": "(1+2)*3=", "tokens": [9, 9, 17], "response": "99"},
    ]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert analyze(tiny, f"data={file}", f"out={tmp_path / 'out'}") == 0
    assert read_report(tmp_path / "out")["tokens"] == 5
    assert tokenizer.decode(tokenizer.encode("3+4=")) == "3+4="
    file.write_text(json.dumps({"prompt": "three", "tokens": [1]}) + "\n")
    assert analyze(tiny, f"data={file}", f"out={tmp_path / 'no'}") == 2
    assert f"{file}, line 1" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@tabled("overrides, message")
def test_bad_input_gives_one_line_and_writes_nothing(
    overrides, message, tiny, run_folder, tmp_path, monkeypatch, capsys
):
    kind = pa.list_(pa.int64())
    for name, response in (("foreign", [99]), ("empty", [])):
        columns = {"prompt": pa.array([[1]], kind), "response": pa.array([response], kind)}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    paths = {
        "MODEL": tiny,
        "RUN": run_folder,
        "FOREIGN": tmp_path / "foreign.parquet",
        "EMPTY": tmp_path / "empty.parquet",
    }
    for name, path in paths.items():
        overrides = [override.replace(name, str(path)) for override in overrides]
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path), tree(run_folder)
    assert main(["analyze", *overrides]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert (tree(tmp_path), tree(run_folder)) == before


def test_rows_are_evenly_spaced():
    assert evenly_spaced(list(range(10)), 3) == [0, 3, 6]
    assert evenly_spaced([1, 2], 5) == [1, 2]
    assert evenly_spaced([1, 2], 0) == [1, 2]


def test_help(capsys):
    assert main(["analyze", "--help"]) == 0
    assert "postgrad analyze entropy MODEL" in capsys.readouterr().out
