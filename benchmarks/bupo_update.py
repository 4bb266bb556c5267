"""Time of a phase-1 step of BuPO at a quarter of the depth beside the full policy's: old log-probs and one update.

    python benchmarks/bupo_update.py [--device cuda] [--layers 24 --width 512 --vocabulary 32768 --rows 16 --length 128]

A Qwen3 of the given shape with random weights, so nothing is downloaded; the same batch for both. Prints the median of the repeats, the
share of time, and the share that the blocks and the head would take if only their matrix products counted.
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", default="", help="float32 or bfloat16; by default what suits the device"
    )
    for name, value in (
        ("layers", 24),
        ("width", 512),
        ("vocabulary", 32768),
        ("rows", 16),
        ("prompt", 64),
        ("length", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
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
    """Groups of four rows of equal length, with an advantage each, so that every row is computed."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(a.rows):
        ids = torch.randint(a.vocabulary, (a.prompt + a.length,), generator=generator).tolist()
        prompt = rows[-1].prompt if number % 4 else ids[: a.prompt]
        columns = {"advantages": [1.0 if number % 2 else -1.0] * a.length}
        rows.append(
            Trajectory(
                f"p{number // 4}", prompt, ids[a.prompt :], number // 4, number % 4, tokens=columns
            )
        )
    return Batch.of(rows)


def timed(work, device: str, repeats: int) -> float:
    """Median seconds, after one call that does not count: of the processor on the CPU, as the machine may be shared, else of the clock."""
    out = []
    clock = time.perf_counter if device == "cuda" else time.process_time
    for _ in range(repeats + 1):
        begin = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        out.append(clock() - begin)
    return statistics.median(out[1:])


def measure(a: argparse.Namespace, folder: Path, phase_one_steps: int) -> dict[str, float]:
    dtype = a.dtype or ("bfloat16" if a.device == "cuda" else "float32")
    overrides = [
        *(
            f"model.path={folder}",
            f"model.device={a.device}",
            f"model.dtype={dtype}",
            "data.train=arithmetic:1",
            "name=bench",
        ),
        *(
            f"method.num_blocks={max(1, a.layers // 4)}",
            f"method.phase_one_steps={phase_one_steps}",
            "training.updates_per_step=1",
        ),
        f"training.token_budget={a.rows * (a.prompt + a.length)}",
    ]
    config = compose("bupo", overrides, lambda name: find_method(name).Settings)
    method = find_method("bupo")(config)
    policy = LocalPolicy(config, load(config.model, torch.device(a.device)), method)
    batch = make_batch(a)
    batch.rows["phase"] = [1 if phase_one_steps else 2] * len(batch)
    old = timed(lambda: policy.logprobs(batch, method.view(1)), a.device, a.repeats)
    update = timed(lambda: policy.update(batch.select(range(len(batch))), 1), a.device, a.repeats)
    return {"old_logprobs_s": old, "update_s": update, "both_s": old + update}


def main() -> None:
    a = arguments()
    block, head = (
        12 * a.width**2,
        a.width * a.vocabulary,
    )  # products a token: about 3 width^2 of attention, 9 of the FFN
    expected = (a.layers // 4 * block + head) / (a.layers * block + head)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(a, Path(folder))
        full, inside = measure(a, model, 0), measure(a, model, 30)
    share = {name: inside[name] / full[name] for name in full}
    shape = f"{a.layers} blocks of width {a.width}, vocabulary {a.vocabulary}, {a.rows} rows of {a.prompt} + {a.length}"
    print(f"{shape}, {a.device}, {torch.get_num_threads()} threads, num_blocks={a.layers // 4}")
    for name in full:
        print(
            f"  {name:<16} full {full[name]:8.3f}   phase 1 {inside[name]:8.3f}   share {share[name]:.2f} ({1 / share[name]:.1f}x faster)"
        )
    print(f"  share of the matrix products of a forward pass: {expected:.2f}")
    print(
        json.dumps({"full": full, "phase_one": inside, "share": share, "expected_share": expected})
    )


if __name__ == "__main__":
    main()
