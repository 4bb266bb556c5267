"""The GPU's decode step and packed attention on a CPU, run by Triton's interpreter: same tokens as the plain engine."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")]

PROGRAM = """
import sys, torch
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.model.load import load
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.native.paged import PagedRun

loaded = load(ModelConfig(path=sys.argv[1], dtype="float32"), torch.device("cpu"), 0)
engine = NativeEngine(loaded, RolloutConfig(max_rows=16))
asked = [Request([3, 7, 10, 5, 8, 15], [1, 2]), Request([1], [4], 2), Request([i * 7 % 16 for i in range(70)], [6])]
sampling = Sampling(0.9, 3)
plain = engine.generate(asked, sampling)
from postgrad.model.kernels.blocks import install
install(loaded.model)
decoder = Decoder(loaded.model, engine.stop)
with torch.no_grad():
    paged = PagedRun(decoder, asked, sampling, 8, 8 * decoder.page_bytes(), engine.max_context).finish()
for a, b in zip(plain, paged, strict=True):
    for x, y in zip(a, b, strict=True):
        assert x.tokens == y.tokens and x.finish == y.finish, (x, y)
        assert max(abs(p - q) for p, q in zip(x.logprobs, y.logprobs)) < 1e-4, (x, y)
print("same")
"""


def test_paged_decoding_is_plain_decoding(tiny):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]
