"""The GPU's decode step in Triton's interpreter on a CPU: same tokens as the plain engine."""

from pathlib import Path

import pytest
from interpreted import run_interpreted

from postgrad.model.load.tiny import make_tiny

pytestmark = pytest.mark.slow

# Blocks and pages have BLOCK tokens. A GPU uses 64; fewer take the interpreter less time.
BLOCKS = """
import os
from postgrad.model.passes import packing
BLOCK = int(os.environ["BLOCK"])
packing.BLOCK_M = packing.BLOCK_N = BLOCK  # the modules that are imported later copy it
"""
PROGRAM = """
import sys, torch
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.model.load.load import load
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.engine import NativeEngine

quantization = sys.argv[3] if len(sys.argv) > 3 else "none"
if quantization == "4bit":  # dequantized by the kernel
    from postgrad.model import quantized
    quantized.supports_triton = lambda device: True
    weight = quantized.quantize(torch.randn(3, 1536))
    assert torch.equal(weight.dequantize(), quantized.dequantize_reference(weight))
model = ModelConfig(path=sys.argv[1], dtype="float32", quantization=quantization)
loaded = load(model, torch.device("cpu"), 0)
adapted = len(sys.argv) > 2
if adapted:
    from postgrad.config.schema import LoraConfig
    from postgrad.model.kernels.install import install_kernels
    from postgrad.model.lora import add_adapters, adapter_parameters
    plain = load(model, torch.device("cpu"), 0)
    install_kernels(loaded.model)
    for one in (plain, loaded):  # as on a GPU: the kernels are there when the adapters come
        add_adapters(one.model, LoraConfig(rank=2), 0)
        with torch.no_grad():
            for i, p in enumerate(adapter_parameters(one.model).values()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
# Its numeric gate decides for both: that of a CPU cannot run a model with these kernels.
reference = NativeEngine(plain, RolloutConfig(max_rows=16)) if adapted else None
engine = NativeEngine(loaded, RolloutConfig(max_rows=16))
reference = reference or engine
long_prompt = [i * 7 % 16 for i in range(BLOCK + 6)]
asked = [
    Request([3, 7, 10, 5, 8, 15], [1, 2]), Request([1], [4], 2), Request(long_prompt, [6])
]
sampling = Sampling(0.9, 3)
sampled = reference.generate(asked, sampling)
from postgrad.model.kernels.install import install_kernels
if not adapted:
    install_kernels(loaded.model)
decoder = Decoder(loaded.model, engine.stop_ids)
engine.decoder, engine.stock_engine, engine.max_rows = decoder, None, 8
engine.cache_gib = 8 * decoder.page_bytes() / 2**30
paged = engine.generate(asked, sampling)
for a, b in zip(sampled, paged, strict=True):
    for x, y in zip(a, b, strict=True):
        assert x.tokens == y.tokens and x.finish == y.finish, (x, y)
        assert max(abs(p - q) for p, q in zip(x.logprobs, y.logprobs)) < 1e-4, (x, y)
if adapted:  # the packed training pass, forward and backward
    sys.path.insert(0, sys.argv[2])
    from tiny_runs import config_of, random_batch
    from postgrad.model.passes.layout import make_padded_micro_batches, make_packed_micro_batches
    from postgrad.model.policy import FrozenPolicy
    from postgrad.model.port import FULL
    batch, found = random_batch(2, groups=2, samples=2), []
    padded = make_padded_micro_batches(batch, 4096, 32)
    packed = make_packed_micro_batches(batch, 4096)
    for one, micro_batches in ((plain, padded), (loaded, packed)):
        policy = FrozenPolicy(config_of("grpo", sys.argv[1]), one)
        (micro,) = micro_batches
        where = batch.response.positions(torch.tensor(micro.rows))
        outputs = policy.forward(micro, batch.response.values[where], FULL)
        logprobs = torch.zeros(batch.num_tokens)
        logprobs[where] = outputs.logprobs
        logprobs.sum().backward()
        found.append([logprobs.detach()] + [p.grad for p in adapter_parameters(one.model).values()])
    assert all(float(g.abs().max()) > 1e-4 for g in found[0][1:])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
print("same")
"""


STREAM = """
import sys, torch
from postgrad.rollout.native import tables
tables.PREFILL_ROWS = 16  # the interpreter is slow; the other modules copy it
from postgrad.config.schema import ModelConfig, RolloutConfig
from postgrad.model.load.load import load
from postgrad.model.kernels.install import install_kernels
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native import store_pages
from postgrad.rollout.native.decoder import Decoder
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.streams import BatchedStream

loaded = load(ModelConfig(path=sys.argv[1], dtype="float32"), torch.device("cpu"), 0)
engine = NativeEngine(loaded, RolloutConfig(max_rows=8))
store_pages.STEPS_PER_SYNC = 1  # so that rows join while others decode
sampling = Sampling(0.9, 9, stop=("7",))
prompts = {"a": [3, 7, 10], "b": [1], "c": [i * 7 % 16 for i in range(BLOCK + 2)]}
limits = {"a": 3, "b": 6, "c": 9}  # the buffers for a and b are too short for c
joined_running_rows = []
prefilled, asked = [], []

def play(stream):
    turns = {key: [] for key in prompts}
    late = ["c"]
    with stream:
        for key in ("a", "b"):
            stream.add(Request(prompts[key], [4], limits[key]), [key])
        while stream.busy:
            for key, completion in stream.poll():
                turns[key].append(completion)
                if len(turns[key]) < 3:
                    text = list(prompts[key])
                    for turn in turns[key]:
                        text += [*turn.tokens, 5, 6]
                    asked.append(len(text) - 1)
                    stream.add(Request(text, [len(text)], limits[key]), [key])
                    if not isinstance(stream, BatchedStream):
                        joined_running_rows.append(len(stream.scheduler.running))
                if late:
                    stream.add(Request(prompts["c"], [8], limits["c"]), [late.pop()])
    return turns

plain = play(BatchedStream(engine, sampling))
install_kernels(loaded.model)
engine.decoder = Decoder(loaded.model, engine.stop_ids)
engine.cache_gib = 12 * engine.decoder.page_bytes() / 2**30
asked.clear()
loaded.model.base_model.register_forward_pre_hook(
    lambda module, args, kwargs: prefilled.append(kwargs["input_ids"].numel()), with_kwargs=True
)
paged = play(engine.open_stream(sampling, 3))
for key in prompts:
    for x, y in zip(plain[key], paged[key], strict=True):
        assert x.tokens == y.tokens and x.finish == y.finish, (key, x, y)
        assert max(abs(p - q) for p, q in zip(x.logprobs, y.logprobs)) < 1e-4, (x, y)
assert engine.model.training and max(joined_running_rows) > 0
assert 3 * sum(prefilled) < 2 * sum(asked), "earlier turns are not computed again"
prefilled.clear()
store_pages.PageStore.prefills_by_rows = True  # as where steps are captured
by_rows = play(engine.open_stream(sampling, 3))
assert not prefilled
for key in prompts:
    for x, y in zip(paged[key], by_rows[key], strict=True):
        assert x.tokens == y.tokens and x.finish == y.finish, (key, x, y)
        assert max(abs(p - q) for p, q in zip(x.logprobs, y.logprobs)) < 1e-5, (x, y)
print("same")
"""


def interpret(program: str, block: int, *arguments: str) -> None:
    """Run a program in Triton's interpreter with blocks and pages of this size."""
    run_interpreted(BLOCKS + program, *arguments, BLOCK=str(block))


def test_requests_that_join_a_paged_stream_get_the_tokens_of_separate_calls(tiny):
    interpret(STREAM, 16, str(tiny))


def test_paged_decoding_is_plain_decoding(tiny):
    interpret(PROGRAM, 64, str(tiny))


@pytest.mark.parametrize("quantization", ["none", "4bit"])
def test_adapters_are_in_the_decode_step_and_in_the_packed_pass(tiny, tmp_path, quantization):
    """LoRA: the joined projections of the kernels must not read past what the adapters add."""
    pytest.importorskip("peft")
    if quantization == "4bit":  # rows are whole blocks of 64 weights
        tiny = make_tiny(tmp_path / "tiny64", seed=1, width=64)
    interpret(PROGRAM, 16, str(tiny), str(Path(__file__).parent.parent), quantization)
