"""Seconds of a phase-1 step of BuPO at a quarter of the depth, compared with the full policy.

    python benchmarks/bupo_update.py [--device cuda] [--layers 24] [--width 512] [--rows 16] ...

A step here is old log-probs and one update, on the same batch for both. The model is a Qwen3 of the
given shape with random weights, so nothing is downloaded. Prints the median of the repeats, the
ratio of the times, and the ratio expected from the matrix products of blocks and head alone.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.model.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.model.tiny import tiny_tokenizer
from postgrad.types import Batch, Trajectory


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", default="", help="float32 or bfloat16; default: bfloat16 on cuda"
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--length", type=int, default=128, help="tokens per response")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_model(a: argparse.Namespace, folder: Path) -> Path:
    config = Qwen3Config(
        vocab_size=a.vocabulary,
        hidden_size=a.width,
        intermediate_size=3 * a.width,
        num_hidden_layers=a.layers,
        num_attention_heads=a.width // 64,
        num_key_value_heads=max(1, a.width // 128),
        head_dim=64,
        tie_word_embeddings=True,
        eos_token_id=17,
        pad_token_id=16,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_batch(a: argparse.Namespace) -> Batch:
    """Return groups of four rows of equal length; all have an advantage, so all are computed."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(a.rows):
        ids = torch.randint(a.vocabulary, (a.prompt + a.length,), generator=generator).tolist()
        prompt = rows[-1].prompt if number % 4 else ids[: a.prompt]
        columns = {"advantages": [1.0 if number % 2 else -1.0] * a.length}
        group = number // 4
        response = ids[a.prompt :]
        rows.append(Trajectory(f"p{group}", prompt, response, group, number % 4, tokens=columns))
    return Batch.of(rows)


def median_seconds(work, device: str, repeats: int) -> float:
    """Return the median seconds of the calls after one warm-up call.

    On a CPU it counts processor time, because the machine may be shared.
    """
    seconds = []
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(repeats + 1):
        begin = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - begin)
    return statistics.median(seconds[1:])


def measure(a: argparse.Namespace, folder: Path, phase_one_steps: int) -> dict[str, float]:
    dtype = a.dtype or ("bfloat16" if a.device == "cuda" else "float32")
    overrides = [
        f"model.path={folder}",
        f"model.device={a.device}",
        f"model.dtype={dtype}",
        "data.train=arithmetic:1",
        "name=bench",
        f"method.num_blocks={max(1, a.layers // 4)}",
        f"method.phase_one_steps={phase_one_steps}",
        "training.updates_per_step=1",
        f"training.token_budget={a.rows * (a.prompt + a.length)}",
    ]
    config = compose("bupo", overrides, lambda name: find_method(name).Settings)
    method = find_method("bupo")(config)
    policy = LocalPolicy(config, load(config.model, torch.device(a.device)), method)
    batch = make_batch(a)
    batch.rows["phase"] = [1 if phase_one_steps else 2] * len(batch)
    old = median_seconds(lambda: policy.logprobs(batch, method.view(1)), a.device, a.repeats)
    update = median_seconds(
        lambda: policy.update(batch.select(range(len(batch))), 1), a.device, a.repeats
    )
    return {"old_logprobs_s": old, "update_s": update, "both_s": old + update}


def main() -> None:
    a = parse_arguments()
    # Products per token: about 3 · width² of attention and 9 · width² of the MLP in each block.
    block = 12 * a.width**2
    head = a.width * a.vocabulary
    expected = (a.layers // 4 * block + head) / (a.layers * block + head)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(a, Path(folder))
        full = measure(a, model, 0)
        phase_one = measure(a, model, 30)
    ratio = {name: phase_one[name] / full[name] for name in full}
    print(
        f"{a.layers} blocks of width {a.width}, vocabulary {a.vocabulary}, "
        f"{a.rows} rows of {a.prompt} + {a.length}, {a.device}, "
        f"{torch.get_num_threads()} threads, num_blocks={a.layers // 4}"
    )
    for name in full:
        print(
            f"  {name:<16} full {full[name]:8.3f}   phase 1 {phase_one[name]:8.3f}   "
            f"ratio {ratio[name]:.2f} ({1 / ratio[name]:.1f}x faster)"
        )
    print(f"  ratio of the matrix products of a forward pass: {expected:.2f}")
    figures = {"full": full, "phase_one": phase_one, "ratio": ratio, "expected_ratio": expected}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
