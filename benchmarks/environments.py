"""Times trajectories with slow environments: each continues alone, against lock-step.

    python benchmarks/environments.py [trajectories=256] [turns=4] [tokens=24] [slowest_s=2.0]

The model has random weights and 4 blocks of width 256. An environment sleeps 0 to `slowest_s` per
step, always the same for the same trajectory and turn. In lock-step every turn waits for the
slowest environment, and its prompt is computed again.
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
from postgrad.rollout.native.stream import StreamingNativeEngine
from postgrad.rollout.streams import WaveStream
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


class Prompts:
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
    """The engine without streams; every wave waits for all environments."""

    shares_weights = True

    def __init__(self, engine: StreamingNativeEngine) -> None:
        self.engine = engine

    def open_stream(self, sampling: Sampling, num_rows: int) -> WaveStream:
        return PatientStream(self.engine, sampling)


class PatientStream(WaveStream):
    @property
    def patience_s(self) -> float:
        return 60.0

    @patience_s.setter
    def patience_s(self, value: float) -> None: ...


def make_engine() -> StreamingNativeEngine:
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
    return StreamingNativeEngine(SimpleNamespace(model=model, tokenizer=tokenizer), RolloutConfig())


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
    longest_s = 0.0
    for seed in range(count):
        rng = random.Random(seed)
        longest_s = max(longest_s, sum(rng.random() * slowest_s for _ in range(num_turns)))
    for name, used in (("continues alone", engine), ("lock-step", LockStep(engine))):
        # The end of a turn is any token; a turn of random weights has about `tokens` of them.
        engine.stop_ids = torch.arange(0, VOCABULARY, int(options["tokens"]))
        turns = Turns(Environments(settings, RolloutConfig()), Prompts(), num_turns)
        run_turns(used, requests[:2], problems[:2], sampling, turns)  # starts the processes
        began = time.perf_counter()
        groups = run_turns(used, requests, problems, sampling, turns)
        seconds = time.perf_counter() - began
        tokens = sum(len(one.policy_tokens) for group in groups for one in group)
        print(f"{name}: {seconds:.1f} s, {tokens} sampled tokens", flush=True)
        turns.close()
    print(f"the longest trajectory sleeps {longest_s:.1f} s")


if __name__ == "__main__":
    main()
