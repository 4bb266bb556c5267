"""A server of the tiny model, and the official client for it."""

import openai
import pytest
from serve_process import LOOK, live, openai_client
from tool_model import KNOWS_TOOLS, chat_model


@pytest.fixture(scope="module")
def server(tiny):
    with live(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as made:
        yield made


@pytest.fixture(scope="module")
def tool_client(tmp_path_factory):
    """A client of a server whose model can call a tool."""
    model = chat_model(tmp_path_factory.mktemp("model"), KNOWS_TOOLS)
    with openai_client(model) as made:
        yield made


@pytest.fixture(scope="module")
def called(tool_client):
    """(seed, choice) of a response that is exactly a call and the end."""
    asked = {"model": "", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
    for seed in range(1000, 40000, 128):
        given = asked | {"n": 128, "tools": [LOOK], "seed": seed}
        for choice in tool_client.chat.completions.create(**given).choices:
            if choice.finish_reason == "tool_calls":
                return seed, choice
    raise AssertionError("no response was a call")
