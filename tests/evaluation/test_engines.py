"""The responses of an evaluation do not depend on the engine."""

import pytest
from openai_server import serve
from tiny_runs import config_of

from postgrad.cli.main import main
from postgrad.cluster.engines import engine_config, load_engine
from postgrad.data.encode.encoder import Encoder
from postgrad.model.load.load import load_tokenizer


@pytest.mark.slow
def test_greedy_responses_are_equal_for_every_engine(tiny, tmp_path, capsys):
    config = config_of("grpo", tiny)
    prompts = Encoder(load_tokenizer(config.model), "plain")
    overrides = [
        "data=arithmetic:2:digits:test",
        "limit=10",
        "template=plain",
        "max_response_tokens=4",
        "model.device=cpu",
        "threads=1",
    ]
    with serve(engine=load_engine(engine_config(config)).engine, prompts=prompts) as served:
        for engine in ("native", "hf", "http"):
            url = [f"url={served.address}"] if engine == "http" else []
            more = [f"engine={engine}", *url, f"out={tmp_path / engine}"]
            assert main(["eval", str(tiny), *overrides, *more]) == 0
        assert len(served.asked) == 10
    results = {file.parent.name: file.read_bytes() for file in tmp_path.glob("*/*.jsonl")}
    assert sorted(results) == ["hf", "http", "native"] and len(set(results.values())) == 1
    assert main(["eval", str(tiny), *overrides, "engine=http", f"out={tmp_path / 'none'}"]) == 2
    assert "rollout.url" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
