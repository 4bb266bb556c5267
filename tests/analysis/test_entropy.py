"""`postgrad analyze entropy`: entropies against a slow reference through the stock model, boundary layer, figures, command."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from world import config_of, random_batch, rows_of, stock_model, stock_outputs, tree

from postgrad.analysis.data import spread
from postgrad.analysis.entropy import boundary_layer, measure, state_entropy, stats, summarize
from postgrad.analysis.figures import flow_points, ticks
from postgrad.cli.main import main
from postgrad.errors import ConfigError
from postgrad.model.load import load
from postgrad.model.tiny import tiny_tokenizer

LAYERS = 3


# ---- the entropy of a state


@pytest.mark.parametrize(("tokens", "head"), [(1, 1), (2, 7), (3, 50), (512, 1 << 15)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 40.0])
def test_chunks_do_not_change_the_entropy_and_it_is_categoricals(tokens, head, scale):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8) * scale, torch.randn(50, 8)
    found = state_entropy(hidden, weight, tokens, head)
    expected = torch.distributions.Categorical(
        logits=(hidden.double() @ weight.double().T)
    ).entropy()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((found >= 0).all()) and float(found.max()) <= math.log(50) + 1e-5


def test_zero_logits_give_the_ceiling_and_a_huge_one_gives_nothing():
    weight = torch.eye(7)
    torch.testing.assert_close(
        state_entropy(torch.zeros(2, 7), weight, head_chunk=3), torch.full((2,), math.log(7))
    )
    assert float(state_entropy(5000 * torch.eye(7)[:1], weight, head_chunk=3)) == 0.0


def test_a_shift_of_all_logits_loses_no_digits():
    """Un-normed states have logits of thousands; the entropy must come from their differences."""
    weight = torch.cat([torch.ones(9, 1), torch.arange(9.0)[:, None] / 8], 1)
    one, other = state_entropy(torch.tensor([[0.0, 1.0], [4096.0, 1.0]]), weight, head_chunk=4)
    assert float(one) == pytest.approx(float(other), abs=1e-3)


# ---- the policies inside a model


@pytest.fixture(scope="module")
def measured(tiny_untied):
    config = config_of("grpo", tiny_untied)
    model = load(config.model, torch.device("cpu")).model
    batch = random_batch(5, groups=4, samples=3)
    return batch, measure(model, batch, 64), model


def inside(model, prompt, response) -> dict[str, torch.Tensor]:
    """Every state at the positions that predict the response, by running the stock parts one after the other, without hooks."""
    base, ids = model.base_model, torch.tensor([[*prompt, *response]])
    here = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    hidden = base.embed_tokens(ids)
    rotary = base.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    mask = torch.full((ids.shape[1],) * 2, -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
    out = {"layer/0": hidden}
    for number, block in enumerate(base.layers, 1):
        out[f"attention_in/{number}"] = block.input_layernorm(hidden)
        out[f"attention_out/{number}"] = block.self_attn(
            out[f"attention_in/{number}"], attention_mask=mask, position_embeddings=rotary
        )[0]
        between = hidden + out[f"attention_out/{number}"]
        out[f"ffn_in/{number}"] = block.post_attention_layernorm(between)
        out[f"ffn_out/{number}"] = block.mlp(out[f"ffn_in/{number}"])
        hidden = out[f"layer/{number}"] = between + out[f"ffn_out/{number}"]
    out["full"] = base.norm(hidden)
    return {name: states[0, here] for name, states in out.items()}


def test_every_entropy_equals_the_slow_reference(measured, tiny_untied):
    """Each module with the block's own norms before it and none behind it, the first response token included, all in one order."""
    batch, found, _ = measured
    model = stock_model(tiny_untied)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        rows = [inside(model, prompt, response) for prompt, response in rows_of(batch)]
    assert set(found) == set(rows[0]) and len(found) == 5 * LAYERS + 2
    order = torch.tensor([0.0])
    for name, values in found.items():
        expected = torch.cat(
            [torch.distributions.Categorical(logits=row[name] @ head.T).entropy() for row in rows]
        ).detach()
        assert len(values) == batch.num_tokens
        torch.testing.assert_close(
            values.double().sort().values, expected.sort().values, rtol=1e-4, atol=1e-4, msg=name
        )
        order = order + values
    whole = sum(
        torch.cat(
            [torch.distributions.Categorical(logits=row[name] @ head.T).entropy() for row in rows]
        ).detach()
        for name in found
    )
    torch.testing.assert_close(
        order.double().sort().values, whole.sort().values, rtol=1e-4, atol=1e-3
    )


def test_norms_matter_where_they_stand(measured, tiny_untied):
    """A final norm on a module's output, or another block's norm on its input, is another number."""
    batch, _, _ = measured
    model = stock_model(tiny_untied)
    head = model.get_output_embeddings().weight

    def mean(states):
        return float(torch.distributions.Categorical(logits=states @ head.T).entropy().mean())

    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for block in model.base_model.layers:  # norms fresh from their initialization are all alike
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.mul_(1 + 2 * torch.rand(norm.weight.shape, generator=generator))
        prompt, response = rows_of(batch)[0]
        states = inside(model, prompt, response)
        for name in ("attention_out/2", "ffn_out/2", "layer/2"):
            assert abs(mean(states[name]) - mean(model.base_model.norm(states[name]))) > 1e-2, name
        blocks = model.base_model.layers
        assert (
            abs(
                mean(blocks[1].input_layernorm(states["layer/1"]))
                - mean(blocks[2].input_layernorm(states["layer/1"]))
            )
            > 1e-4
        )


def test_the_states_add_up_and_so_do_the_changes(measured):
    batch, found, model = measured
    prompt, response = rows_of(batch)[0]
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(
        model.config._name_or_path, attn_implementation="eager"
    )
    with torch.no_grad():
        states = inside(stock, prompt, response)
        hidden = stock(
            input_ids=torch.tensor([[*prompt, *response]]), output_hidden_states=True
        ).hidden_states
    total = states["layer/0"] + sum(
        states[f"{kind}_out/{n}"] for n in range(1, LAYERS + 1) for kind in ("attention", "ffn")
    )
    torch.testing.assert_close(total, states[f"layer/{LAYERS}"], rtol=1e-5, atol=1e-5)
    here = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    torch.testing.assert_close(states["layer/2"], hidden[2][0, here], rtol=1e-4, atol=1e-4)
    report = summarize(found, 0.05)
    changes = sum(layer["layer"]["change"]["mean"] for layer in report["layers"])
    first, last = (
        report["layers"][0]["layer"]["input"]["mean"],
        report["layers"][-1]["layer"]["output"]["mean"],
    )
    assert changes == pytest.approx(last - first, abs=1e-5)
    assert report["full_policy"]["mean"] != pytest.approx(last, abs=1e-2), (
        "the raw top state is not the policy"
    )


def test_the_budget_changes_nothing_but_the_order(measured):
    batch, found, model = measured
    again = measure(model, batch, 9)
    for name, values in found.items():
        torch.testing.assert_close(
            again[name].sort().values, values.sort().values, rtol=1e-4, atol=1e-5
        )


def test_statistics_are_over_tokens():
    values = torch.tensor([4.0, 1.0, 2.0, 9.0])
    expected = {
        "mean": 4.0,
        "std": float(np.sqrt((0 + 9 + 4 + 25) / 4)),
        "min": 1.0,
        "max": 9.0,
        "median": 3.0,
    }
    assert stats(values) == pytest.approx(expected)


def test_a_block_that_does_more_than_add_is_refused(tmp_path):
    """Granite scales what it adds."""
    import transformers as t

    shape = {
        "vocab_size": 18,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    model = t.GraniteForCausalLM(t.GraniteConfig(**shape, residual_multiplier=0.2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1)
    with pytest.raises(
        ConfigError, match=r"GraniteForCausalLM: block 1 does more than add attention and FFN"
    ):
        measure(model, random_batch(1), 64)
    with pytest.raises(
        ConfigError, match=r"the blocks of Olmo2ForCausalLM have no input_layernorm"
    ):
        measure(t.Olmo2ForCausalLM(t.Olmo2Config(**shape)), random_batch(1), 64)


# ---- the boundary layer


def test_the_boundary_layer_of_known_shapes():
    qwen = [2.0, 3.0, 2.5, 2.0, 1.5, 0.8, *[0.05, -0.1] * 10, *[-1.0, -4.0] * 5]
    llama = [*[0.04, 0.06] * 13, 0.03, -0.2]
    assert boundary_layer(qwen) == 6 and len(qwen) == 36
    assert boundary_layer(llama) == 27 and len(llama) == 28
    assert boundary_layer(qwen, tolerance=0.0) == 25, "the tolerance says what is about zero"
    assert boundary_layer(qwen, tolerance=0.4) == 5 - 1
    with pytest.raises(ConfigError, match=r"no layer's FFN raises the entropy"):
        boundary_layer([-1.0, -0.5])


# ---- the figures


def made_up(num_layers: int) -> dict:
    def told(value):
        return {"input": {"mean": value}, "output": {"mean": value + 1}, "change": {"mean": 1.0}}

    layers = [
        {"number": n, "layer": told(n - 1), "attention": told(n), "ffn": told(10 * n)}
        for n in range(1, num_layers + 1)
    ]
    return {
        "num_layers": num_layers,
        "layers": layers,
        "full_policy": {"mean": 0.25},
        "boundary_layer": None,
    }


@pytest.mark.parametrize("num_layers", [1, 28, 40])
def test_the_flow_has_a_point_for_every_place(num_layers):
    points = flow_points(made_up(num_layers))
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
    assert (
        ticks(num_layers)[0] == 1
        and max(ticks(num_layers)) <= num_layers
        and len(ticks(num_layers)) <= 21
    )


def test_figures_of_forty_layers_are_drawn(tmp_path):
    from postgrad.analysis.figures import draw

    files = draw(made_up(40), tmp_path)
    names = ("entropy_flow", "ffn_change", "attention_change", "layer_change", "changes")
    assert [f.name for f in files] == [
        f"{name}.{ending}" for name in names for ending in ("png", "pdf")
    ]
    assert all(f.read_bytes()[:4] == (b"\x89PNG" if f.suffix == ".png" else b"%PDF") for f in files)


# ---- the command


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """What a run leaves of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
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
def undrawn(monkeypatch):
    """Drawing takes seconds and is tested once."""
    monkeypatch.setattr("postgrad.analysis.run.draw", lambda report, folder: [])


def told_by(folder) -> dict:
    return json.loads((folder / "entropy.json").read_text())


def test_a_run_folder_is_read_by_step(tiny_untied, run_folder, capsys):
    assert analyze(tiny_untied, f"data={run_folder}", "rows=0") == 0
    out = capsys.readouterr().out
    folder = run_folder / "eval" / "entropy"
    report = told_by(folder)
    batch = random_batch(2)
    assert (
        report["tokens"] == batch.num_tokens
        and report["rows"] == len(batch)
        and report["num_layers"] == LAYERS
    )
    assert "entropies: " in out and f"{report['tokens']} tokens" in out and str(folder) in out
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", *[".pdf"] * 5, *[".png"] * 5]
    assert report["ceiling"] == pytest.approx(math.log(18)) and report["settings"]["data"] == str(
        run_folder
    )
    with torch.no_grad():
        expected = stock_outputs(stock_model(tiny_untied), batch)[1]
    assert report["full_policy"]["mean"] == pytest.approx(float(expected.mean()), abs=1e-4)


def test_rows_and_step_choose_what_is_read(undrawn, tiny, run_folder, tmp_path):
    assert analyze(tiny, f"data={run_folder}", "rows=2", "step=1", f"out={tmp_path}") == 0
    lengths = [len(response) for _, response in spread(rows_of(random_batch(1)), 2)]
    assert told_by(tmp_path)["rows"] == 2 and told_by(tmp_path)["tokens"] == sum(lengths)


def test_problems_are_answered_first_and_the_ids_are_stored(
    undrawn, tiny, tmp_path, monkeypatch, capsys
):
    """The stored ids give the same report again, to the digit."""
    monkeypatch.chdir(tmp_path)
    overrides = (
        "data=arithmetic:1",
        "rows=6",
        "samples=2",
        "max_response_tokens=5",
        "template=plain",
        "out=first",
    )
    assert analyze(tiny, *overrides) == 0
    assert "sampling 6 responses" in capsys.readouterr().out
    stored = pq.read_table("first/responses.parquet")
    assert stored.num_rows == 6 and {len(set(map(tuple, stored["prompt"].to_pylist())))} == {3}
    assert analyze(tiny, "data=first/responses.parquet", "rows=0") == 0
    first, again = told_by(tmp_path / "first"), told_by(tmp_path / f"entropy-{tiny.name}")
    assert {k: first[k] for k in ("tokens", "layers", "full_policy")} == {
        k: again[k] for k in ("tokens", "layers", "full_policy")
    }
    assert not (tmp_path / f"entropy-{tiny.name}" / "responses.parquet").exists()


def test_results_of_an_evaluation_are_read(undrawn, tiny, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    lines = [
        {"prompt": "3+4=", "tokens": [7, 17], "response": "7"},
        {"prompt": "(1+2)*3=", "tokens": [9, 9, 17], "response": "99"},
    ]
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert analyze(tiny, f"data={file}", f"out={tmp_path / 'out'}") == 0
    assert told_by(tmp_path / "out")["tokens"] == 5
    assert tokenizer.decode(tokenizer.encode("3+4=")) == "3+4="
    file.write_text(json.dumps({"prompt": "three", "tokens": [1]}) + "\n")
    assert analyze(tiny, f"data={file}", f"out={tmp_path / 'no'}") == 2
    assert (
        "not made of this model's tokens" in capsys.readouterr().err
        and not (tmp_path / "no").exists()
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["entropy"], "which model?"),
        (["entrpy", "tiny"], "analyze does not know entrpy; did you mean entropy?"),
        (["entropy", "MODEL"], "data is not set"),
        (["entropy", "MODEL", "data=nothing.parquet"], "nothing.parquet"),
        (["entropy", "MODEL", "data=RUN", "step=7"], "step=7: "),
        (["entropy", "MODEL", "data=RUN", "tolerance=2"], "tolerance=2.0 is out of range"),
        (
            ["entropy", "MODEL", "data=RUN", "tolerence=0.1"],
            "unknown key tolerence; did you mean tolerance?",
        ),
        (
            ["entropy", "MODEL", "data=FOREIGN"],
            "holds token 99, the model has 18; they come from another tokenizer",
        ),
        (["entropy", "MODEL", "data=EMPTY"], "has no response with tokens in it"),
        (["entropy", "MODEL", "data=RUN", "out=FOREIGN"], "is a file; choose another out=FOLDER"),
        (["entropy", "/no/such/model", "data=RUN"], "no such folder"),
    ],
)
def test_wrong_input_is_one_line_and_nothing_is_written(
    overrides, message, tiny, run_folder, tmp_path, monkeypatch, capsys
):
    kind = pa.list_(pa.int64())
    pq.write_table(
        pa.table({"prompt": pa.array([[1]], kind), "response": pa.array([[99]], kind)}),
        tmp_path / "foreign.parquet",
    )
    pq.write_table(
        pa.table({"prompt": pa.array([[1]], kind), "response": pa.array([[]], kind)}),
        tmp_path / "empty.parquet",
    )
    places = {
        "MODEL": tiny,
        "RUN": run_folder,
        "FOREIGN": tmp_path / "foreign.parquet",
        "EMPTY": tmp_path / "empty.parquet",
    }
    for name, place in places.items():
        overrides = [word.replace(name, str(place)) for word in overrides]
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path), tree(run_folder)
    assert main(["analyze", *overrides]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert (tree(tmp_path), tree(run_folder)) == before


def test_rows_are_spread_over_the_data():
    assert (
        spread(list(range(10)), 3) == [0, 3, 6]
        and spread([1, 2], 5) == [1, 2]
        and spread([1, 2], 0) == [1, 2]
    )


def test_help(capsys):
    assert (
        main(["analyze", "--help"]) == 0
        and "postgrad analyze entropy MODEL" in capsys.readouterr().out
    )
