"""Loading and saving: a bad path is a one-line error, a saved folder is a stock one."""

import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import make_family
from refused import refused
from tiny_runs import config_of, random_batch, stock_model, tree

from postgrad.cluster.host import build_host
from postgrad.config.schema import ModelConfig
from postgrad.errors import ConfigError, RunError
from postgrad.model.load import tiny as tiny_models
from postgrad.model.load.formats import Loaded, hub_is_reachable
from postgrad.model.load.load import (
    _keep_bars_on_terminals,
    load,
    load_tokenizer,
    model_hidden_size,
    resolve_path,
    save,
    save_weights,
    stop_ids,
)
from postgrad.model.load.tiny import tiny_tokenizer
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.hf import HfEngine
from postgrad.rollout.native.engine import NativeEngine

CPU = torch.device("cpu")


def settings(path, **more) -> ModelConfig:
    return ModelConfig(path=str(path), dtype="float32", device="cpu", threads=1, **more)


def test_a_local_folder_loads_with_model_and_tokenizer(tiny):
    loaded = load(settings(tiny), CPU)
    assert loaded.tokenizer.decode([3, 10, 4]) == "3+4" and stop_ids(loaded) == [17]
    assert model_hidden_size(settings(tiny)) == 32
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


def test_bfloat16_is_honoured(tiny):
    config = settings(tiny)
    config.dtype = "bfloat16"
    assert {p.dtype for p in load(config, CPU).model.parameters()} == {torch.bfloat16}


def test_dropout_is_off_while_the_model_trains(tmp_path):
    """Trainer and engine must compute the same policy."""
    import transformers

    from postgrad.model.load.tiny import tiny_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=18,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
        eos_token_id=17,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy = build_host(config_of("grpo", tmp_path)).policy
    batch = random_batch(1)
    assert torch.equal(policy.logprobs(batch)["logprobs"], policy.logprobs(batch)["logprobs"])


@pytest.mark.parametrize(
    "path",
    [
        "/no/such/folder",
        "./no-such-folder",
        "~/no-such-folder-here",
        "/no/such/model.gguf",
        "model.gguf",
        "no-such-org/no-such-model",
        "no-such-model",
    ],
)
def test_a_bad_path_is_a_one_line_error_that_names_it(path):
    for use in (load_tokenizer, model_hidden_size, lambda config: load(config, CPU)):
        with refused("unreadable", "model.path") as caught:
            use(settings(path))
        message = str(caught.value)
        assert message.startswith(f"model.path={path}")
        assert "\n" not in message


def test_an_unknown_name_fails_without_a_connection_where_no_hub_is_reachable(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("postgrad.model.load.load.hub_is_reachable", lambda: False)
    lookups = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: lookups.append(address))
    (tmp_path / "my-model").mkdir()
    suggestions = {
        "smolm2": "did you mean smollm2",
        "my-modl": "did you mean my-model",
        "qwxzj": "",
    }
    for name, suggestion in suggestions.items():
        with refused("unreadable", "model.path", shows=suggestion) as caught:
            load(settings(name), CPU)
        assert ("did you mean" in str(caught.value)) == bool(suggestion)
    assert lookups == []


def test_the_error_of_a_run_or_a_checkpoint_names_its_model(tiny, tmp_path):
    policy = tmp_path / "run" / "checkpoints" / "step-3" / "policy"
    shutil.copytree(tiny, policy)
    (policy.parent.parent / "latest").write_text("step-3\n")
    for folder in (tmp_path / "run", policy.parent):
        for use in (load_tokenizer, model_hidden_size, lambda config: load(config, CPU)):
            with refused("unreadable", "model.path") as caught:
                use(settings(folder))
            assert str(caught.value).endswith(f" {policy}")
    assert load(settings(policy), CPU)


def test_a_gguf_file_writes_no_bar_into_a_log(capfd):
    transformers_gguf = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    _keep_bars_on_terminals()
    assert list(transformers_gguf.tqdm([1, 2], desc="tensors")) == [1, 2]
    assert capfd.readouterr().err == ""


def test_the_error_names_the_missing_file(tiny, tmp_path):
    (tmp_path / "empty").mkdir()
    with refused("unreadable", "model.path"):
        load(settings(tmp_path / "empty"), CPU)
    shutil.copytree(tiny, tmp_path / "no-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    with refused("missing", "model.path"):
        load_tokenizer(settings(tmp_path / "no-tokenizer"))


@pytest.mark.parametrize("reachable", [True, False])
def test_the_hub_is_tried_at_its_own_port_or_at_the_proxy(reachable, monkeypatch):
    addresses = []

    def connect(address, timeout):
        addresses.append(address)
        if not reachable:
            raise ConnectionRefusedError
        return io.BytesIO()

    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://mirror:8080")
    assert hub_is_reachable() is reachable
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    assert hub_is_reachable() is reachable
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert hub_is_reachable() is reachable
    assert addresses == [("mirror", 8080), ("huggingface.co", 443), ("proxy", 3128)]


@pytest.mark.parametrize(
    "broken", ["empty folder", "no weights", "cut weights", "no tokenizer", "cut config"]
)
def test_a_broken_folder_is_a_one_line_error(tiny, tmp_path, broken):
    if broken != "empty folder":
        for file in tiny.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if broken == "no weights":
        (tmp_path / "model.safetensors").unlink()
    if broken == "cut weights":
        os.truncate(tmp_path / "model.safetensors", 1000)
    if broken == "cut config":
        os.truncate(tmp_path / "config.json", 50)
    if broken == "no tokenizer":
        for file in tmp_path.glob("tokenizer*"):
            file.unlink()
    with pytest.raises(ConfigError) as caught:
        load(settings(tmp_path), CPU)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_tiny_is_created_once_in_the_cache_and_differs_by_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    first = resolve_path("tiny", 0)
    weights = Path(first) / "model.safetensors"
    modified = weights.stat().st_mtime_ns
    assert resolve_path("tiny", 0) == first
    assert weights.stat().st_mtime_ns == modified
    second = resolve_path("tiny", 1)
    a, b = (stock_model(Path(path)) for path in (first, second))
    assert not torch.equal(a.model.embed_tokens.weight, b.model.embed_tokens.weight)
    assert sorted(map(str, tmp_path.iterdir())) == [first, second], "no partial folder remains"


def test_another_version_makes_its_own_tiny_models(tmp_path, monkeypatch):
    """One that an earlier version left in the cache may have another tokenizer."""
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    made = resolve_path("tiny", 0)
    other = tmp_path / "tiny.py"
    other.write_text(f"{Path(tiny_models.__file__).read_text()}\n# a change\n")
    monkeypatch.setattr(tiny_models, "__file__", str(other))
    assert resolve_path("tiny", 0) != made


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["tiny", "tiny_untied"])
def test_a_saved_checkpoint_is_a_stock_folder_with_equal_logits(folder, request, tmp_path):
    from transformers import AutoTokenizer

    source = request.getfixturevalue(folder)
    policy = build_host(config_of("grpo", source, "optimizer.lr=1e-2")).policy
    policy.update(random_batch(1), 1)
    policy.save(str(tmp_path))
    ids = torch.arange(12)[None]
    again = stock_model(tmp_path / "policy", torch.float32)
    with torch.no_grad():
        mine = policy.model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(
            again(input_ids=ids, use_cache=False).logits, mine, rtol=1e-5, atol=1e-5
        )
        assert not torch.allclose(
            stock_model(source, torch.float32)(input_ids=ids).logits, mine, atol=1e-3
        ), "the update changed the weights"
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").decode([3, 10, 4]) == "3+4"


def test_weights_that_are_saved_apart_have_the_buffers(tmp_path):
    """The router's bias is no parameter, and a stock folder has it."""
    model = make_family("deepseek_v3")
    model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.5)
    loaded = Loaded(model, tiny_tokenizer())
    save(loaded, tmp_path / "model")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_weights(loaded, weights, tmp_path / "weights")
    assert tree(tmp_path / "model") == tree(tmp_path / "weights")


def test_tokens_without_an_embedding_end_a_run_with_one_line(tiny):
    """Tokens that were added to the tokenizer alone; a GPU's pass would end the process."""
    config = config_of("grpo", tiny)
    host = build_host(config)
    batch = random_batch(0)
    batch.prompt.values[:] = 18
    with pytest.raises(RunError, match="vocabulary has 18 tokens"):
        host.policy.logprobs(batch)
    with pytest.raises(RunError, match="vocabulary has 18 tokens"):
        host.policy.update(batch, 1)
    for engine in (NativeEngine, HfEngine):
        with pytest.raises(RunError, match="the token 99"):
            engine(host.policy.loaded, config.rollout).generate(
                [Request([1, 99], [0])], Sampling(1.0, 2)
            )


def test_threads_load_models_at_the_same_time(tiny):
    """transformers' loading is not safe for threads: later models had no head."""
    with ThreadPoolExecutor(3) as pool:
        models = [
            loaded.model for loaded in pool.map(lambda _: load(settings(tiny), CPU), range(6))
        ]
    models.append(load(settings(tiny), CPU).model)
    for model in models:
        assert model.lm_head.weight is model.model.embed_tokens.weight
