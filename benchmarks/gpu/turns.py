"""Times conversations of several turns whose pages are kept, against prompts computed again.

    python benchmarks/gpu/turns.py [--rows 256] [--turns 8] [--prompt 1024] [--tokens 64]
                                   [--observation 64] [--blocks 28]

The model has random weights in the shape of Qwen2.5-1.5B. A turn has about `--tokens` sampled
tokens, and `--observation` tokens follow it at once. Prints for both the seconds, the sampled
tokens and the tokens that prefill passes computed. On a CPU, use small numbers.
"""

import argparse
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from postgrad.config.schema import RolloutConfig
from postgrad.model.device import supports_triton
from postgrad.model.passes.attention import register_attention
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.stream import StreamingNativeEngine

VOCABULARY = 151_936


def make_engine(num_blocks: int, num_rows: int) -> StreamingNativeEngine:
    """Return an engine of a random model on the GPU, or on the CPU if there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=num_blocks,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY - 1,
    )
    with device:
        model = Qwen2ForCausalLM(config)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    model.set_attn_implementation(register_attention())
    if supports_triton(device):
        from postgrad.model.passes.kernels.install import install_kernels

        install_kernels(model)
    loaded: Any = SimpleNamespace(
        model=model, tokenizer=SimpleNamespace(eos_token_id=VOCABULARY - 1)
    )
    return StreamingNativeEngine(loaded, RolloutConfig(max_rows=num_rows))


def play(engine: StreamingNativeEngine, options: argparse.Namespace, keeps: bool) -> int:
    """Let all conversations run; returns the number of sampled tokens."""
    limit = options.turns * (2 * options.tokens + options.observation)
    ends = tuple(range(0, VOCABULARY, options.tokens))
    sampling = Sampling(1.0, limit, stop_ids=ends)
    observation = list(range(1, options.observation + 1))
    texts = [[key + 1] * options.prompt for key in range(options.rows)]
    num_turns = [0] * options.rows
    num_sampled = 0
    with engine.open_stream(sampling, options.rows) as stream:
        for key, text in enumerate(texts):
            stream.add(Request(list(text), [key], limit), [key])
        while stream.busy:
            for key, completion in stream.poll():
                num_sampled += len(completion.tokens)
                num_turns[key] += 1
                texts[key] += [*completion.tokens, *observation]
                left = limit - (len(texts[key]) - options.prompt)
                if not keeps or num_turns[key] == options.turns or left < 1:
                    stream.forget(key)
                if num_turns[key] < options.turns and left > 0:
                    seed = 1000 * key + num_turns[key]
                    stream.add(Request(list(texts[key]), [seed], left), [key])
    return num_sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("rows", 256),
        ("turns", 8),
        ("prompt", 1024),
        ("tokens", 64),
        ("observation", 64),
        ("blocks", 28),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    engine = make_engine(options.blocks, options.rows)
    computed: list[int] = []
    engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(
            kwargs["input_ids"].numel() if kwargs["input_ids"].shape[1] > 1 else 0
        ),
        with_kwargs=True,
    )
    play(engine, options, keeps=True)  # compiles kernels and captures graphs
    for name, keeps in (("kept", True), ("computed again", False)):
        computed.clear()
        began = time.perf_counter()
        num_sampled = play(engine, options, keeps)
        seconds = time.perf_counter() - began
        rate = num_sampled / seconds
        print(
            f"{name}: {seconds:.2f} s, {num_sampled} sampled tokens ({rate:.0f}/s), "
            f"{sum(computed)} prefilled tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
