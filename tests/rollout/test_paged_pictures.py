"""Rollouts with pictures over pages, in Triton's interpreter: those of the slots, in float32."""

from pathlib import Path

import pytest
from interpreted import run_interpreted

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from types import SimpleNamespace
import torch
sys.path.insert(0, sys.argv[1])
from postgrad.model.passes import packing
packing.BLOCK_M = packing.BLOCK_N = 16  # also the tokens of a page; the other modules copy it
from postgrad.rollout.native import tables
tables.PREFILL_ROWS = 16
from pathlib import Path
from postgrad.config.schema import RolloutConfig
from postgrad.model.kernels.install import install_kernels
from postgrad.model.passes.attention import NAME
from postgrad.model.passes.support import set_attention
from postgrad.model.passes.support import vision_of
from postgrad.rollout.engine import Sampling
from postgrad.rollout.native.decoder import Decoder, unsupported_reason
from postgrad.rollout.native.engine import NativeEngine, NativeStream
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.store_pages import PageStore
from vision_models import load_vision_model, requests_with_pictures, square

sampling = Sampling(0.9, 4)
loaded = load_vision_model(Path(sys.argv[3]), sys.argv[2])
requests = requests_with_pictures(loaded)
slots = NativeEngine(loaded, RolloutConfig())
assert slots.stock_engine is None
processor = vision_of(loaded.model).processor
image_token = processor.image_token_id
text = processor.expand(processor.placeholder, [square("green")])
shown = loaded.tokenizer.encode(text)  # a picture between two turns


def run(stream):
    # Rows of a group share their prompt; each row's second turn continues in its own pages.
    found = {}
    with stream:
        for number, request in enumerate(requests):
            stream.add(request, [(number, 0), (number, 1)][: len(request.seeds)])
        while stream.busy:
            for key, done in stream.poll():
                if (key, 1) in found:
                    continue
                if (key, 0) not in found:
                    found[key, 0] = done
                    request = requests[key[0]]
                    own = [1 if one == image_token else one for one in done.tokens]
                    turn = [5, 9, 2] if own != done.tokens else [5, *shown, 9, 2]
                    prompt = [*request.prompt, *done.tokens, *turn]
                    images = (*request.images, *[square("green")] * (len(turn) > 3))
                    stream.add(type(request)(prompt, [7], images=images), [key])
                else:
                    found[key, 1] = done
    return found


requests = [type(r)(r.prompt, r.seeds[:2], images=r.images) for r in requests]
expected = run(slots.open_stream(sampling, 4))
model = loaded.model
set_attention(model, NAME)
install_kernels(model)
assert not unsupported_reason(model), unsupported_reason(model)
decoder = Decoder(model, slots.stop_ids)
store = PageStore(decoder, 4, lambda: 60 * decoder.page_bytes(), 512, joins=True)
PageStore.prefills_by_rows = True  # as where decode steps are captured
engine = SimpleNamespace(
    model=model, tokenizer=None, max_context=512, weights_version=0, step=Scheduler.step
)
found = run(NativeStream(engine, sampling, store, store))
assert found.keys() == expected.keys() and len(found) == 4 * len(requests)
for key in expected:
    assert found[key].tokens == expected[key].tokens, key
    ours, theirs = (torch.tensor(one[key].logprobs) for one in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
assert found[(0, 0), 0].logprobs != found[(1, 0), 0].logprobs  # equal ids, another picture
print("same")
"""


@pytest.mark.parametrize(
    "model_type", ["qwen3_vl", pytest.param("smolvlm", marks=pytest.mark.nightly)]
)
def test_pages_give_the_tokens_of_slots(model_type, tmp_path):
    run_interpreted(PROGRAM, Path(__file__).parents[1], model_type, tmp_path)
