"""A server of the tiny model, and the official client for it."""

import openai
import pytest
from serve_process import live


@pytest.fixture(scope="module")
def server(tiny):
    with live(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as made:
        yield made
