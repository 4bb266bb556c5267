"""Times trajectories with slow environments: each continues alone, against lock-step.

    python benchmarks/environments.py [trajectories=256] [turns=4] [tokens=24] [slowest_s=2.0]

The model has random weights and 4 blocks of width 256. An environment sleeps 0 to `slowest_s` per
step, always the same for the same trajectory and turn. In lock-step every turn waits for the
slowest environment; once with the keys and values of earlier turns, once without, as with an engine
that computes each prompt again. All three sample the same tokens.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments.lookup import Environments
from postgrad.model.passes.attention import register_attention
from postgrad.problem import Problem
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.rollout.streams import BatchedStream, Finished, Stream
from postgrad.rollout.turns import Turns, run_turns

VOCABULARY = 1000
ENVIRONMENT = """
import random, time

class Slow:
    def __init__(self, slowest_s):
        self.slowest_s = slowest_s

    def reset(self, problem, seed):
        self.random = random.Random(seed)

    def step(self, action):
        time.sleep(self.random.random() * self.slowest_s)
        return "x", 0.0, False
"""


class Encoder:
    """Token ids in place of texts: an observation is 16 tokens."""

    max_prompt_tokens = 4096
    tokenizer = None

    def encode(self, problem: Problem) -> list[int]:
        return [int(problem.uid) % 900 + 1] * 64

    def decode(self, ids: list[int]) -> str:
        return "x"

    def decode_turn(self, ids: list[int]) -> str:
        return "x"

    def encode_after_turn(self, messages: list, end: int) -> list[int]:
        return list(range(1, 17))


class LockStep:
    """The engine in lock-step; `keeps` says whether it keeps keys and values between turns."""

    shares_weights = True

    def __init__(self, engine: NativeEngine, keeps: bool) -> None:
        self.engine = engine
        self.keeps = keeps

    def open_stream(self, sampling: Sampling, num_rows: int) -> Stream:
        if self.keeps:
            return PatientStream(self.engine.open_stream(sampling, num_rows))
        return PatientStream(BatchedStream(self.engine, sampling))


class PatientStream:
    """A stream that ends all its rows before it returns one, and begins when all are there."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.batch_wait_s = 60.0
        self.add = stream.add
        self.forget = stream.forget

    def __enter__(self) -> "PatientStream":
        self.stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)

    @property
    def busy(self) -> bool:
        return self.stream.busy

    def poll(self) -> list[Finished]:
        finished: list[Finished] = []
        while self.stream.busy:
            finished += self.stream.poll()
        return finished


def make_engine() -> NativeEngine:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=VOCABULARY - 1,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(register_attention())
    tokenizer = SimpleNamespace(eos_token_id=VOCABULARY - 1)
    return NativeEngine(SimpleNamespace(model=model, tokenizer=tokenizer), RolloutConfig())


def sleep_times(count: int, num_turns: int, slowest_s: float) -> list[list[float]]:
    """Return the seconds that each trajectory's environment sleeps, per turn."""
    rngs = [random.Random(seed) for seed in range(count)]  # as reset() above makes them
    return [[rng.random() * slowest_s for _ in range(num_turns)] for rng in rngs]


def main() -> None:
    options = {"trajectories": "256", "turns": "4", "tokens": "24", "slowest_s": "2.0"}
    options |= dict(word.split("=", 1) for word in sys.argv[1:])
    count, num_turns = int(options["trajectories"]), int(options["turns"])
    limit = num_turns * (int(options["tokens"]) + 16)
    file = Path(tempfile.mkdtemp()) / "slow.py"
    file.write_text(ENVIRONMENT)
    slowest_s = float(options["slowest_s"])
    settings = EnvironmentConfig(f"{file}:Slow", {"slowest_s": slowest_s}, workers=2)
    engine = make_engine()
    requests = [Request([1], [seed]) for seed in range(count)]
    problems = [Problem(str(i), ({"role": "user", "content": ""},), "") for i in range(count)]
    sampling = Sampling(max_new_tokens=limit, temperature=1.0)
    sleeps = sleep_times(count, num_turns, slowest_s)
    modes = {
        "each continues alone": engine,
        "lock-step": LockStep(engine, keeps=True),
        "lock-step, prompts computed again": LockStep(engine, keeps=False),
    }
    for name, used in modes.items():
        # The end of a turn is any token; a turn of random weights has about `tokens` of them.
        engine.stop_ids = torch.arange(0, VOCABULARY, int(options["tokens"]))
        turns = Turns(Environments(settings, RolloutConfig()), Encoder(), num_turns)
        run_turns(used, requests[:2], problems[:2], sampling, turns)  # starts the processes
        began, cpu_began = time.perf_counter(), time.process_time()
        groups = run_turns(used, requests, problems, sampling, turns)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        tokens = sum(len(one.policy_tokens) for group in groups for one in group)
        print(f"{name}: {seconds:.1f} s, {cpu_s:.1f} s of CPU, {tokens} sampled tokens", flush=True)
        turns.close()
    print(f"the longest trajectory sleeps {max(map(sum, sleeps)):.1f} s")
    in_turn = sum(map(max, zip(*sleeps, strict=True)))
    print(f"the slowest environment of each turn sleeps {in_turn:.1f} s in all")


if __name__ == "__main__":
    main()
