"""What the comparisons of compare.py share: workloads, models and the line of figures."""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPTS = 64
SAMPLES = 16
TOKENS = 256
# Measured on an H200: bytes per second, and bfloat16 operations per second.
BANDWIDTH = 4.3e12
ARITHMETIC = 790e12
INSTRUCTION = "\nReason step by step, and put the final answer in \\boxed{}."


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group, so that no system can skip a row."""
    return len(response) % 7 / 7


def report(name: str, **figures: float | str) -> None:
    """Print one line of figures that the parent process reads."""
    print("RESULT " + json.dumps({"name": name, **figures}), flush=True)


def model_folder(cache: Path, smollm2: str, which: str) -> str:
    """Return a model's folder; `qwen1.5b` has Qwen2.5-1.5B's shape and random weights."""
    if which == "smollm2":
        return smollm2
    folder = cache / "qwen1.5b"
    if not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=2,
        )
        with torch.device("cuda"):
            model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return str(folder)


def sums() -> list[dict]:
    """Return two-digit additions, the same for every system."""
    import random

    rng = random.Random(0)
    rows = []
    for _ in range(4000):
        a = rng.randrange(10, 100)
        b = rng.randrange(10, 100)
        question = f"What is {a} + {b}? Put the final answer in \\boxed{{}}."
        rows.append({"prompt": [{"role": "user", "content": question}], "truth": str(a + b)})
    return rows


def peak_gib() -> float:
    """Return the peak GPU memory of this process, including captured graphs."""
    import torch

    from postgrad.model.device import peak_memory_bytes

    return peak_memory_bytes(torch.device("cuda")) / 2**30


def random_prompts() -> list[list[int]]:
    import random

    random.seed(0)
    return [
        [random.randrange(10, 40000) for _ in range(random.randrange(80, 200))]
        for _ in range(PROMPTS)
    ]


def response_lengths(long_tail: bool) -> list[int]:
    """Return the tokens of each row: all equal, or most under 200 and one in twenty 2,048."""
    import random

    random.seed(1)
    rows = PROMPTS * SAMPLES
    if not long_tail:
        return [TOKENS] * rows
    return [2048 if random.random() < 0.05 else random.randrange(20, 200) for _ in range(rows)]
