"""Pictures that environments and tools show: in the prompt, between turns, in the trainer."""

import json
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from PIL import Image
from tiny_runs import config_of
from tool_model import CALL, chat_model
from transformers import AutoTokenizer
from vision_models import CHARACTERS, load_vision_model, square

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.environments.calls import Call
from postgrad.environments.lookup import Environments
from postgrad.environments.port import EnvironmentFailure, read_shown
from postgrad.environments.session import Session
from postgrad.environments.tools import Toolbox
from postgrad.methods.support.responses import sampled_row
from postgrad.model.passes.support import vision_of
from postgrad.model.policy import FrozenPolicy
from postgrad.problem import Problem
from postgrad.rollout.conversations import Turns
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.hf import HfEngine
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.turns import run_turns
from postgrad.types import Batch

SCREEN = """
from PIL import Image

class Screen:
    def __init__(self, kind="picture"):
        self.kind = kind
        self.turn = 0

    def reset(self, problem):
        if self.kind not in ("picture", "path"):
            return self.kind  # a text
        return [{"type": "text", "text": "1="}, {"type": "image", "image": self._draw()}]

    def step(self, action):
        self.turn += 1
        if self.kind == "path":
            return [{"type": "image", "image": "/etc/passwd"}], 0.0, False
        if self.turn == 2:
            return "2+", 1.0, False
        return self._draw(), 1.0, self.turn == 4

    def _draw(self):
        return Image.new("RGB", (32, 16 * (1 + self.turn % 2)), (50 * self.turn, 0, 200))
"""
ONE_TOKEN = Sampling(1.0, 200, stop=(*CHARACTERS, "\n", "<pad>"))  # per turn


def make_turns(folder: Path, tokenizer, workers: int = 0, **options) -> Turns:
    (folder / "screen.py").write_text(SCREEN)
    config = EnvironmentConfig(f"{folder}/screen.py:Screen", options=options, workers=workers)
    return Turns(Environments(config, RolloutConfig()), Encoder(tokenizer, "chat", 4096), 4)


def play(turns: Turns, engine, num_rows: int = 6, text: str = ""):
    """Return the problem with a picture of its own, or of a text alone, and its sampled rows."""
    content = text or [{"type": "image"}, {"type": "text", "text": "1+2="}]
    images = () if text else (square("red", 48, 16),)
    problem = Problem("p", ({"role": "user", "content": content},), "", images=images)
    request = Request(turns.encoder.prompt(problem), list(range(num_rows)), images=images)
    (done,) = run_turns(engine, [request], [problem], ONE_TOKEN, turns)
    turns.close()
    return problem, done


@pytest.mark.parametrize(
    ("model_type", "engine", "workers"),
    [("qwen3_vl", "native", 2), ("gemma3", "native", 0), ("smolvlm", "hf", 0)],
)
def test_the_policy_and_the_trainer_see_what_the_environment_shows(
    model_type, engine, workers, tmp_path
):
    loaded = load_vision_model(tmp_path, model_type)
    make = {"native": NativeEngine, "hf": HfEngine}[engine]
    turns = make_turns(tmp_path, loaded.tokenizer, workers)
    problem, completions = play(turns, make(loaded, RolloutConfig()))
    whole = [one for one in completions if one.episode.failure is None and one.turns == 4]
    assert len(whole) >= 2, [(one.episode.failure, one.turns, one.finish) for one in completions]
    rows = [sampled_row(problem, [], [], one) for one in whole]
    processor = vision_of(loaded.model).processor
    for one, row in zip(whole, rows, strict=True):
        assert len(row.images) == 4, "those of the problem, of reset() and of two steps"
        tokens = [*row.prompt, *row.response]
        places = [token == processor.image_token_id for token in row.response]
        assert tokens.count(processor.image_token_id) >= processor.num_tokens(row.images)
        assert sum(places) >= processor.num_tokens(row.images[2:]) > 0
        shown = [place and not own for place, own in zip(places, row.loss_mask, strict=True)]
        assert sum(shown) == processor.num_tokens(row.images[2:])
        assert {"role": "user", "content": [{"type": "image"}]} in one.messages
    assert len({one.episode.states[1] for one in whole}) == 1
    batch = Batch.of(rows)
    policy = FrozenPolicy(config_of("grpo", tmp_path), loaded)
    gaps = batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]
    assert float(gaps[batch.tokens["loss_mask"]].abs().max()) < 1e-4
    batch.rows["images"] = [(*row.images[:2], square("green", *row.images[2].size)) for row in rows]
    others = batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]
    assert float(others[batch.tokens["loss_mask"]].abs().max()) > 1e-3


def test_a_picture_that_cannot_be_shown_is_a_failure(tmp_path):
    loaded = load_vision_model(tmp_path, "gemma3")
    engine = NativeEngine(loaded, RolloutConfig())
    _, done = play(make_turns(tmp_path, loaded.tokenizer, kind="path"), engine)
    assert all("step returned list as observ" in one.episode.failure.reason for one in done)
    turns = make_turns(tmp_path, loaded.tokenizer)
    _, done = play(turns, engine, 12)
    image_token = turns.encoder.image_token_id
    failed = [one for one in done if one.episode.failure]
    assert 0 < len(failed) < 12 and all(image_token in one.policy_tokens for one in failed)
    assert all("cannot be told" in one.episode.failure.reason for one in failed)


def test_a_placeholder_in_a_text_of_an_environment_is_a_failure_and_no_picture(tmp_path):
    loaded = load_vision_model(tmp_path, "gemma3")
    engine = NativeEngine(loaded, RolloutConfig())
    processor = vision_of(loaded.model).processor
    _, done = play(make_turns(tmp_path, loaded.tokenizer, kind=processor.placeholder), engine)
    assert all(one.episode.failure.kind == "picture" for one in done)
    # An image token in the text of a problem stands before the pictures that steps show.
    turns = make_turns(tmp_path, loaded.tokenizer, kind="1")
    _, done = play(turns, engine, text=f"1+{processor.image_token}")
    assert all("cannot be told" in one.episode.failure.reason for one in done)


def test_a_model_of_text_reads_the_texts_of_a_tool_with_pictures(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(chat_model(tmp_path / "text"))
    (tmp_path / "camera.py").write_text(
        "from PIL import Image\n"
        "def look():\n"
        "    'Look.'\n"
        "    picture = Image.new('RGB', (16, 16))\n"
        "    return [{'type': 'text', 'text': '1+'}, {'type': 'image', 'image': picture}]\n"
    )
    rollout = RolloutConfig(tools=[f"{tmp_path}/camera.py:look"])
    found = Environments(EnvironmentConfig(), rollout)
    encoder = Encoder(tokenizer, "chat", 4096, tools=found.schemas)
    call = tokenizer.encode(CALL, add_special_tokens=False)
    engine = FakeEngine(lambda prompt, seed: [*call, tokenizer.eos_token_id])
    problem = Problem("u", ({"role": "user", "content": "1"},), "")
    requests, turns = [Request([1], [7])], Turns(found, encoder, 2)
    ((done,),) = run_turns(engine, requests, [problem], Sampling(max_new_tokens=500), turns)
    turns.close()
    assert done.messages[1] == {"role": "tool", "content": "1+<image>"} and not done.images


def snap(count: int):
    """Take pictures.

    Args:
        count: how many
    """
    if not count:
        return [{"type": "text", "text": "none"}]
    picture = Image.new("RGB", (16, 16), "blue")
    return [{"type": "text", "text": "x" * 300}, *[{"type": "image", "image": picture}] * count]


def test_tools_answer_with_pictures_beside_their_messages(tmp_path):
    box = Toolbox([], max_chars=100).with_functions({"snap": snap})
    environments = Environments(EnvironmentConfig(), RolloutConfig())
    problem = Problem("u", (), "")
    session = Session(environments.spec_for(problem), problem, 0)
    session.toolbox = box
    seen = session.act("", [Call("snap", {"count": n}) for n in (2, 0)])
    text, *images = seen.messages[0]["content"]
    assert len(text["text"]) == 105 and images == [{"type": "image"}] * 2
    assert seen.messages[1] == {"role": "tool", "content": '[{"type": "text", "text": "none"}]'}
    assert len(seen.images) == 2 and seen.images[0].startswith("data:image/png;base64,")
    assert (seen.calls, seen.errors) == (2, 0)
    address = {"type": "image_url", "image_url": {"url": "https://host/a.png"}}
    box = box.with_functions({"find": lambda: [address]})
    assert box.answer(Call("find", {}), problem, {}) == json.dumps([address])
    for value, reason in (
        ([{"type": "image", "image": b"none"}], "not a picture"),
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "returned list"),
        ([{"type": "image", "image": square("red")}, {"type": "image", "image": "/a"}], "NoneType"),
        ([{"type": "image"}, 7], "returned list"),
        (7, "returned int"),
    ):
        with pytest.raises(EnvironmentFailure, match=reason):
            read_shown(value, "step")


@pytest.mark.slow
def test_an_mcp_server_answers_with_a_picture(tmp_path):
    pytest.importorskip("mcp")
    file = tmp_path / "camera.py"
    file.write_text(
        "from mcp.server import MCPServer\n"
        "from mcp.server.mcpserver import Image\n"
        "server = MCPServer('camera')\n"
        "@server.tool()\n"
        "def snap() -> list:\n"
        "    'Take a picture.'\n"
        f"    return ['here', Image(path={str(tmp_path / 'red.png')!r})]\n"
        "server.run()\n"
    )
    (tmp_path / "red.png").write_bytes(square("red").data)
    box = Toolbox([f"mcp:{sys.executable} {file}"], timeout_s=30)
    answer = box.answer(Call("snap", {}), Problem("u", (), ""), {})
    box.close()
    picture = {"type": "image", "image": square("red").data_url()}
    assert answer == [{"type": "text", "text": "here"}, picture]
