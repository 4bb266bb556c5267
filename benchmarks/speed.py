"""Measure the rows of the speed table on one GPU, beside other systems, and write the tables of
docs/results.md and README.md.

    python benchmarks/speed.py run speed.jsonl --smollm2 FOLDER            # every row, every system
    python benchmarks/speed.py run speed.jsonl --rows rollout-4b step-4b --systems postgrad vllm
    python benchmarks/speed.py run compare.jsonl --systems postgrad --code old=../old new=.
    python benchmarks/speed.py show compare.jsonl
    python benchmarks/speed.py table        # from benchmarks/results: speed.jsonl and others.json

Each measurement is a process of its own. A rollout, a step or an update is timed three times after
a warm-up. Systems alternate within a row, --rounds times; the table shows medians. With --code,
Postgrad is measured from several checkouts, each with its own speed.py. A row that has a result in
the file is not measured again, so the same command continues after --limit-s. Failures are written
with the end of their log.

Models have Qwen3's shapes and random weights, which never end a response: every row has its full
length. `rollout-135m` and `tail-135m` take SmolLM2-135M-Instruct from --smollm2. `longest-METHOD`
searches the longest row that trains within 79 GiB with Gemma 3's shape, one step per length.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "speed.jsonl"
OTHERS = HERE / "results" / "others.json"  # rows of README's table that other commands measure
PAGE = HERE.parent / "docs" / "results.md"
README = HERE.parent / "README.md"
MARKS = "<!-- rows of speed.py -->\n", "<!-- end of rows -->"
BANDWIDTH = 4.3e12  # bytes per second and bfloat16 operations per second, measured on an H200
ARITHMETIC = 790e12
VOCABULARY = {"gemma-1b": 262_144, "smollm2": 40_000}  # of others 151,936, of tiny ones 512
CONTEXT = {"gemma-1b": 1 << 20, "gemma-tiny": 128}  # of others 131,072 tokens
SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, tied embeddings
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "1.7b": (2048, 6144, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
    "vl-2b": (2048, 6144, 28, 16, 8, True),  # of Qwen3-VL-2B, which also has a vision tower
    "vl-4b": (2560, 9728, 36, 32, 8, True),
    "gemma-1b": (1152, 6912, 26, 4, 1, True),
    "tiny": (64, 128, 2, 2, 1, True),  # to try a row on a CPU
    "gemma-tiny": (64, 128, 6, 2, 1, True),
    "vl-tiny": (64, 128, 2, 2, 1, True),
}
TOWERS = {  # depth, hidden size, intermediate size, heads, blocks whose states are added
    "vl-2b": (24, 1024, 4096, 16, [5, 11, 17]),
    "vl-4b": (24, 1024, 4096, 16, [5, 11, 17]),
    "vl-tiny": (2, 32, 64, 2, [0, 1]),
}
PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
PATCH = 16  # pixels of a patch's side; four patches are one token
HEAD_DIM = 128
RESPONSES = {"sft": ["completion"], "kto": ["completion"], "dpo": ["chosen", "rejected"]}
LORA = "model.lora.rank=16"
# A child whose torch has no more memory than that of a GPU of {} GiB.
LIMITED_MEMORY = """
import torch
if torch.cuda.is_available():
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, {} * 2**30 / total))
from postgrad.cli.main import main
raise SystemExit(main())
"""


@dataclass(frozen=True)
class Row:
    """One piece of work, the same for every system.

    Args:
        work: rollout, grpo, sft, dpo or kto.
        lengths: "full", or how the tokens of each response vary: "uniform" (100 to `tokens`, and
            prompts of 100 to `prompt`), "tail" (one in twenty has all, the others 20 to 200),
            "log-normal" (median a quarter of `tokens`).
        settings: of Postgrad's run.
        picture: pixels of the side of the picture that each prompt begins with; 0: none.
        peers: systems of peers.py that do the same work.
        within_gib: search the longest row that trains within this memory; `tokens` is the first
            length.
    """

    title: str
    work: str
    shape: str
    problems: int
    samples: int
    tokens: int
    prompt: int = 100
    lengths: str = "full"
    settings: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    steps: int = 3
    picture: int = 0
    within_gib: int = 0

    @property
    def rows(self) -> int:
        return self.problems * self.samples


ENGINES = ("vllm", "sglang")
OFFLOADED = "optimizer.kind=adamw_offloaded"
RECOMPUTE = "model.activation_checkpointing=true"
LONG = (RECOMPUTE, "model.kept_attention_blocks=0", "data.shuffle=false")
GIVEN = (*LONG, f"method={HERE / 'random_responses.py'}:RandomResponses")  # samples nothing
ROWS = {
    "rollout-135m": Row("rollout, SmolLM2-135M", "rollout", "smollm2", 64, 16, 256, peers=ENGINES),
    "tail-135m": Row("rollout, SmolLM2-135M", "rollout", "smollm2", 64, 16, 2048, 100, "tail"),
    "rollout-0.6b": Row(
        "rollout, 0.6B", "rollout", "0.6b", 256, 1, 1024, 1024, "uniform", peers=ENGINES
    ),
    "rollout-1.7b": Row("rollout, 1.7B", "rollout", "1.7b", 128, 8, 512, peers=ENGINES),
    "rollout-4b": Row("rollout, 4B", "rollout", "4b", 32, 8, 1024, peers=ENGINES),
    "tail-1.7b": Row(
        "rollout, 1.7B", "rollout", "1.7b", 64, 8, 4096, 100, "log-normal", peers=ENGINES
    ),
    "step-0.6b": Row("GRPO step, 0.6B", "grpo", "0.6b", 64, 16, 512, peers=("trl", "verl")),
    "step-1.7b": Row("GRPO step, 1.7B", "grpo", "1.7b", 64, 16, 512, peers=("trl", "verl")),
    "step-4b": Row("GRPO step, 4B", "grpo", "4b", 32, 8, 1024, peers=("trl", "verl")),
    "step-4b-lora": Row(
        "GRPO step, 4B, LoRA 16", "grpo", "4b", 32, 8, 1024, settings=(LORA,), peers=("unsloth",)
    ),
    "step-8b": Row(
        "GRPO step, 8B, Adam's state on the host",
        "grpo",
        "8b",
        16,
        8,
        512,
        settings=(OFFLOADED,),
        peers=("trl", "verl"),
    ),
    "step-vl-2b": Row(
        "GRPO step, Qwen3-VL-2B, a picture of 512 x 512",
        "grpo",
        "vl-2b",
        32,
        8,
        512,
        picture=512,
        peers=("trl",),
    ),
    # As many tokens as with the picture: 256 of it, and two beside it.
    "step-vl-2b-text": Row("GRPO step, Qwen3-VL-2B", "grpo", "vl-2b", 32, 8, 512, 358),
    "step-vl-4b": Row(
        "GRPO step, Qwen3-VL-4B, a picture of 512 x 512",
        "grpo",
        "vl-4b",
        32,
        8,
        512,
        picture=512,
        peers=("trl",),
    ),
    "step-vl-4b-text": Row("GRPO step, Qwen3-VL-4B", "grpo", "vl-4b", 32, 8, 512, 358),
    "row-0.6b-16k": Row(
        "training, 0.6B, LoRA 16", "sft", "0.6b", 1, 1, 16_284, settings=(LORA, RECOMPUTE)
    ),
    "row-0.6b-65k": Row(
        "training, 0.6B, LoRA 16", "sft", "0.6b", 1, 1, 65_436, settings=(LORA, RECOMPUTE)
    ),
    "sft-0.6b-8k": Row("SFT, 0.6B", "sft", "0.6b", 1, 1, 8_092, settings=(RECOMPUTE,)),
    "sft-0.6b-16k": Row("SFT, 0.6B", "sft", "0.6b", 1, 1, 16_284, settings=(RECOMPUTE,)),
    "longest-grpo": Row("GRPO", "grpo", "gemma-1b", 1, 2, 130_972, settings=GIVEN, within_gib=79),
    "longest-sft": Row("SFT", "sft", "gemma-1b", 1, 1, 130_972, settings=LONG, within_gib=79),
    "longest-kto": Row("KTO", "kto", "gemma-1b", 2, 1, 65_436, settings=LONG, within_gib=79),
    "longest-dpo": Row("DPO", "dpo", "gemma-1b", 1, 1, 65_436, settings=LONG, within_gib=79),
}
TRY_ROWS = {  # seconds on a CPU
    "try-rollout": Row("rollout, tiny", "rollout", "tiny", 2, 4, 8, 10, peers=("vllm",)),
    "try-tail": Row("rollout, tiny", "rollout", "tiny", 2, 4, 32, 10, "tail"),
    "try-step": Row("GRPO step, tiny", "grpo", "tiny", 2, 2, 8, 10, peers=("trl",), steps=1),
    "try-step-vl": Row(
        "GRPO step, tiny", "grpo", "vl-tiny", 2, 2, 8, 10, steps=1, picture=256, peers=("trl",)
    ),
    "try-row": Row("training, tiny", "sft", "tiny", 1, 1, 64, 10, settings=(LORA,), steps=1),
}
TRY_ROWS |= {
    f"try-{name}": replace(row, shape="gemma-tiny", prompt=10, tokens=54)
    for name, row in ROWS.items()
    if row.within_gib
}
ALL_ROWS = ROWS | TRY_ROWS
SHORT_TABLE = ("rollout-135m", "rollout-4b", "step-4b", "row-0.6b-16k")  # README's
PUBLISHED = {  # what other projects say of one H100
    "row-0.6b-16k": "prime-rl on an H100: 13,340 tokens/s, 5.1 GiB",
    "row-0.6b-65k": "prime-rl on an H100: 9,970 tokens/s, 11.5 GiB",
    "sft-0.6b-8k": "prime-rl on an H100: 26,000 tokens/s",
    "sft-0.6b-16k": "prime-rl on an H100: 25,500 tokens/s",
    "longest-grpo": "TRL 1.15: 114,688 tokens, scoring only",
    "longest-sft": "TRL 1.15: 107,520 tokens",
    "longest-kto": "TRL 1.15: 63,488 tokens",
    "longest-dpo": "TRL 1.15: 59,392 tokens",
}


# ---- models and data, the same for every system


def vocabulary_size(shape: str) -> int:
    """Return the number of tokens that a model of this shape knows."""
    return VOCABULARY.get(shape, 512 if "tiny" in shape else 151_936)


def context_length(shape: str) -> int:
    """Return the most tokens that a row of a model of this shape may have."""
    return CONTEXT.get(shape, 131_072)


def make_model(folder: Path, shape: str, with_weights: bool = True) -> Path:
    """Write a Qwen3 model of this shape with random weights and a word-level tokenizer, once."""
    if shape == "smollm2":
        return folder / "smollm2"
    target = folder / (f"qwen3-{shape}" if with_weights else f"qwen3-{shape}-empty")
    if (target / "tokenizer.json").is_file():
        return target
    import torch
    from transformers import Gemma3ForCausalLM, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

    sees = shape.startswith("vl-")
    config = make_vision_config(shape) if sees else make_config(shape)
    if with_weights:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.set_default_dtype(torch.float32 if "tiny" in shape else torch.bfloat16)
            kind = Gemma3ForCausalLM if shape.startswith("gemma-") else Qwen3ForCausalLM
            model = Qwen3VLForConditionalGeneration if sees else kind
            model(config).save_pretrained(target)
            torch.set_default_dtype(torch.float32)
    else:
        config.architectures = ["Qwen3VLForConditionalGeneration" if sees else "Qwen3ForCausalLM"]
        config.dtype = "bfloat16"
        config.save_pretrained(target)
    write_tokenizer(target, vocabulary_size(shape), sees)
    return target


def make_config(shape: str) -> Any:
    """Return the transformers configuration of a Qwen3 or Gemma 3 model of this shape."""
    from transformers import Gemma3TextConfig, Qwen3Config

    hidden, intermediate, layers, heads, key_heads, tied = SHAPES[shape]
    kind, head_dim, more = Qwen3Config, HEAD_DIM, {}
    if shape.startswith("gemma-"):
        kind, head_dim, more = Gemma3TextConfig, 256, {"sliding_window": 512}
    return kind(
        vocab_size=vocabulary_size(shape),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=context_length(shape),
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        **more,
    )


def make_vision_config(shape: str) -> Any:
    """Return the transformers configuration of Qwen3-VL with the tower of its small sizes."""
    from transformers import Qwen3VLConfig

    text = make_config(shape).to_dict() | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
        }
    }
    for name in ("model_type", "architectures", "dtype", "tie_word_embeddings"):
        text.pop(name, None)
    depth, hidden, intermediate, heads, added = TOWERS[shape]
    tower = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "patch_size": PATCH,
        "out_hidden_size": SHAPES[shape][0],
        "deepstack_visual_indexes": added,
        "num_position_embeddings": 2304,
    }
    first = vocabulary_size(shape) - len(PICTURE_TOKENS)
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = {name: first + number for number, name in enumerate(names)}
    tied = SHAPES[shape][5]
    return Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **ids)


def write_tokenizer(target: Path, size: int, sees: bool = False) -> None:
    """Write a word-level tokenizer of this many words: one word is one token.

    One that `sees` places pictures, and stands beside the files of a processor.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *(f"w{i}" for i in range(2, size))]
    start, image, end, video = PICTURE_TOKENS
    named: dict[str, str] = {}
    template = None
    if sees:
        words[-len(PICTURE_TOKENS) :] = PICTURE_TOKENS
        named = {"image_token": image, "video_token": video}
        template = (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            f"{{% for p in m.content %}}{{% if p.type == 'image' %}}{start}{image}{end}"
            "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        )
        pixels = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": PATCH,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        }
        (target / "preprocessor_config.json").write_text(json.dumps(pixels))
        (target / "processor_config.json").write_text("{}")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", extra_special_tokens=named
    )
    if sees:
        fast.add_tokens([start, end], special_tokens=True)
        fast.chat_template = template
    fast.save_pretrained(target)


def make_prompts(row: Row, count: int) -> list[list[int]]:
    """Return random prompts as token ids."""
    rng = random.Random(0)
    size = vocabulary_size(row.shape) - len(PICTURE_TOKENS)
    lengths = [
        rng.randint(100, row.prompt) if row.lengths == "uniform" else row.prompt
        for _ in range(count)
    ]
    return [[rng.randrange(2, size) for _ in range(length)] for length in lengths]


def response_lengths(row: Row) -> list[int]:
    """Return the tokens of each response, the same for every system."""
    rng = random.Random(1)
    if row.lengths == "uniform":
        return [rng.randint(100, row.tokens) for _ in range(row.rows)]
    if row.lengths == "tail":
        return [
            row.tokens if rng.random() < 0.05 else rng.randint(20, 200) for _ in range(row.rows)
        ]
    if row.lengths == "log-normal":
        median = row.tokens / 4
        return [
            max(1, min(row.tokens, round(median * rng.lognormvariate(0.0, 0.8))))
            for _ in range(row.rows)
        ]
    return [row.tokens] * row.rows


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group, so that no system can skip a row."""
    return len(response) % 7 / 7


# ---- Postgrad


def measure_rollout(row: Row, folder: Path) -> dict[str, Any]:
    """Time the native engine alone: three rollouts with log-probs after a warm-up."""
    import torch

    from postgrad.config.schema import ModelConfig, RolloutConfig
    from postgrad.model.device import choose_device, peak_memory_bytes, synchronize
    from postgrad.model.load.load import load
    from postgrad.rollout.engine import Request, Sampling
    from postgrad.rollout.native.engine import NativeEngine

    start = time.perf_counter()
    device = choose_device("auto")
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    loaded = load(ModelConfig(path=str(make_model(folder, row.shape)), dtype=dtype), device)
    engine = NativeEngine(loaded, RolloutConfig(max_rows=row.rows))
    if engine.decoder is not None:  # no token ends a row
        engine.decoder.stop_ids = torch.tensor([1 << 30], dtype=torch.int32, device=device)
    lengths = response_lengths(row)
    requests: list[Request] = []
    for number, prompt in enumerate(make_prompts(row, row.problems)):
        seeds = list(range(number * row.samples, (number + 1) * row.samples))
        if row.lengths == "full":
            requests.append(Request(prompt, seeds))
        else:
            requests += [Request(prompt, [seed], lengths[seed]) for seed in seeds]
    seconds: list[float] = []
    for _ in range(4):
        synchronize(device)
        begin = time.perf_counter()
        engine.generate(requests, Sampling(1.0, row.tokens))
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": seconds[1:],
        "first_s": seconds[0],
        "start_s": time.perf_counter() - start - sum(seconds),
        "memory_gib": peak_memory_bytes(device) / 2**30,
    }


def measure_training(row: Row, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run `postgrad train` for a few steps after a warm-up and return their seconds.

    The run is killed after its last measured step, before it saves a checkpoint.
    """
    runs = Path(tempfile.mkdtemp(dir=folder))
    log = runs / "log"
    with log.open("w") as out:
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, *program(row), "train", *run_settings(row, folder, runs)],
            stdout=out,
            stderr=out,
        )
        try:
            metrics = runs / "run" / "metrics.jsonl"
            while child.poll() is None and len(read_steps(metrics)) <= row.steps:
                if time.monotonic() - start > limit_s:
                    break
                time.sleep(0.1)
            ended = child.poll()
            start_s = time.monotonic() - start
        finally:
            child.kill()
            child.wait()
    lines = read_steps(metrics)
    if len(lines) <= row.steps:
        reason = "time limit" if ended is None else f"exit code {ended}"
        return {"failed": f"{reason}: {log.read_text()[-1500:]}"}
    steady = lines[1:]
    stages = [key for key in steady[0] if key.startswith("stage/")]
    timed = "stage/update_s" if row.work == "sft" else "step_s"
    return {
        "seconds": [line[timed] for line in steady],
        "first_s": lines[0]["step_s"],
        "start_s": start_s - sum(line["step_s"] for line in lines),
        "memory_gib": max(line["memory_gib"] for line in steady),
        "gap_mean": max(line.get("engine/gap_mean", 0.0) for line in steady),
        "gap_max": max(line.get("engine/gap_max", 0.0) for line in steady),
        "stages": {key: statistics.median(line[key] for line in steady) for key in stages},
    }


def program(row: Row) -> list[str]:
    """Return what Python runs: Postgrad, with less memory if a longest row is searched."""
    if row.within_gib:
        return ["-c", LIMITED_MEMORY.replace("{}", str(row.within_gib))]
    return ["-m", "postgrad.cli.main"]


def measure_longest(row: Row, folder: Path, limit_s: float) -> dict[str, Any]:
    """Double the length of a row until a step runs out of memory, then bisect to a sixteenth.

    After the time limit the longest row that has trained is the result.
    """
    end = time.monotonic() + limit_s
    best: dict[str, Any] = {}
    fits, fails, tokens = 0, 0, row.prompt + row.tokens
    while tokens <= context_length(row.shape) and (not fails or fails - fits > fails // 16):
        tried = replace(row, tokens=tokens - row.prompt, steps=1)
        result = measure_training(tried, folder, end - time.monotonic())
        failed = result.get("failed", "")
        if not failed:
            fits, best = tokens, result
        elif "out of memory" in failed and tokens // 2 > row.prompt:
            fails = tokens
        elif failed.startswith("time limit") and fits:
            break
        else:
            return {"failed": f"{tokens} tokens: {failed}", "fits": fits, "fails": fails}
        tokens = (fits + fails) // 2 if fails else 2 * fits
    return {**best, "tokens": fits, "fails": fails}


def run_settings(row: Row, folder: Path, runs: Path) -> list[str]:
    """Return the recipe and the settings of Postgrad's run."""
    common = [
        f"model.path={make_model(folder, row.shape)}",
        f"data.train={write_problems(row, folder)}",
        f"data.template={'chat' if row.shape.startswith('vl-') else 'plain'}",
        f"data.max_prompt_tokens={row.prompt + picture_tokens(row)}",
        f"training.problems_per_step={row.problems}",
        "training.steps=1000",
        "training.checkpoint_every=1000",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        f"rollout.max_response_tokens={row.tokens}",
        f"runs={runs}",
        "name=run",
        *row.settings,
    ]
    if not any(word.startswith("optimizer.kind=") for word in common):
        common.append("optimizer.kind=adamw_fused")
    if row.work != "grpo":
        return [row.work, *common]
    reward = f"reward.verifier={Path(__file__).resolve()}:length_reward"
    return ["grpo", *common, reward, f"rollout.samples={row.samples}"]


def write_problems(row: Row, folder: Path) -> Path:
    """Write problems of random words for all steps, with responses or pictures."""
    count = (row.steps + 2) * row.problems
    name = f"{row.work}-{row.shape}-{count}-{row.prompt}-{row.tokens}-{row.picture}"
    file = folder / f"{name}.jsonl"
    rng = random.Random(2)
    size = vocabulary_size(row.shape)
    with file.open("w") as out:
        for number, prompt in enumerate(make_prompts(row, count)):
            words = " ".join(f"w{i}" for i in prompt)
            line: dict[str, Any] = {"prompt": words, "ground_truth": "0"}
            if row.picture:
                line["prompt"] = f"<image>{words}"
                line["images"] = [str(draw_picture(folder / f"{name}-{number}.png", row, rng))]
            # The first step of a search only makes the optimizer's state.
            is_short = row.within_gib and number < row.problems
            for key in RESPONSES.get(row.work, ()):
                # The end-of-text token is the last one of the response.
                tokens = 8 if is_short else row.tokens
                reply = (f"w{rng.randrange(2, size)}" for _ in range(tokens - 1))
                line[key] = " ".join(reply)
            if row.work == "kto":
                line["label"] = number % 2 == 0
            out.write(json.dumps(line) + "\n")
    return file


def draw_picture(file: Path, row: Row, rng: random.Random) -> Path:
    """Write a picture of colored squares."""
    from PIL import Image

    squares = Image.frombytes("RGB", (8, 8), rng.randbytes(3 * 64))
    squares.resize((row.picture, row.picture), Image.Resampling.NEAREST).save(file)
    return file


def picture_tokens(row: Row) -> int:
    """Return the tokens of a prompt's picture, with the two beside it."""
    return (row.picture // (2 * PATCH)) ** 2 + 2 if row.picture else 0


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl that describe a training step."""
    if not file.is_file():
        return []
    complete = [line for line in file.read_text().splitlines() if line.endswith("}")]
    return [line for line in map(json.loads, complete) if "step_s" in line]


def measure(row: Row, folder: Path, limit_s: float) -> dict[str, Any]:
    """Return Postgrad's figures of a row."""
    if row.work == "rollout":
        return measure_rollout(row, folder)
    if row.within_gib:
        return measure_longest(row, folder, limit_s)
    return measure_training(row, folder, limit_s)


# ---- running rows


def plan_runs(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (row, system, command) in the order of measuring: systems alternate within a row."""
    code = [word.split("=", 1) for word in args.code]
    for name in args.rows:
        ours = [(f"postgrad-{label}", Path(path)) for label, path in code]
        if not ours:
            ours = [("postgrad", HERE.parent)]
        for _ in range(args.rounds):
            if "postgrad" in args.systems:
                for system, checkout in ours:
                    script = checkout.resolve() / "benchmarks" / "speed.py"
                    yield name, system, [str(script), "one", name]
            for peer in ALL_ROWS[name].peers:
                if peer in args.systems:
                    yield name, peer, [str(HERE / "peers.py"), peer, name]


def run_rows(args: argparse.Namespace) -> None:
    """Measure every row, one process after the other, and append each result to the file."""
    end = time.monotonic() + args.limit_s
    counts: dict[tuple[str, str], int] = {}
    for result in read_results([args.out]):
        key = (result["row"], result["system"])
        counts[key] = counts.get(key, 0) + 1
    for name, system, command in plan_runs(args):
        if counts.get((name, system), 0) > 0:
            counts[name, system] -= 1
            continue
        left = end - time.monotonic()
        if left < 20:
            print(f"no time left for {name} of {system}", flush=True)
            return
        limit_s = min(left, args.each_s)
        result = run_one(command, args.folder, limit_s, Path(command[0]).parents[1] / "src")
        line = json.dumps({"row": name, "system": system, **result})
        print(line[:400], flush=True)
        with args.out.open("a") as out:
            out.write(line + "\n")


def run_one(command: list[str], folder: Path, limit_s: float, src: Path) -> dict[str, Any]:
    """Run one measurement in its own process and return what it printed behind `RESULT `."""
    path = os.pathsep.join(filter(None, [str(src), os.environ.get("PYTHONPATH", "")]))
    words = [sys.executable, *command, "--folder", str(folder), "--limit-s", str(limit_s - 10)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {limit_s:.0f} s"}
    finally:
        # An engine's own processes may outlive their parent and hold the GPU's memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = [x for x in output.splitlines() if x.startswith("RESULT ")]
    if not lines:
        return {"failed": (errors or output).strip()[-1500:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def read_results(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results in the files; a line that was cut is left out."""
    lines = [line for f in files if f.is_file() for line in f.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


# ---- the table


def parameters(shape: str) -> int:
    """Return the weights of a shape, the embedding counted once if it is the head, too."""
    if shape == "smollm2":
        return 134_515_008
    hidden, intermediate, layers, heads, key_heads, tied = SHAPES[shape]
    block = hidden * HEAD_DIM * (2 * heads + 2 * key_heads) + 3 * hidden * intermediate
    return layers * block + (1 if tied else 2) * vocabulary_size(shape) * hidden


def token_cache_bytes(shape: str) -> int:
    """Return the bytes of keys and values of one token in bfloat16."""
    if shape == "smollm2":
        return 4 * 30 * 3 * 64
    return 4 * SHAPES[shape][2] * SHAPES[shape][4] * HEAD_DIM


def rollout_limit_s(row: Row) -> float:
    """Return the seconds to read the weights once per step, and each row's cache per token."""
    lengths = response_lengths(row)
    prompts = make_prompts(row, row.problems)
    total = 2 * parameters(row.shape) * max(lengths)
    for number, length in enumerate(lengths):
        # A shared prompt is read once per group.
        prompt = len(prompts[number // row.samples]) / (row.samples if row.lengths == "full" else 1)
        total += token_cache_bytes(row.shape) * (prompt + length / 2) * length
    return total / BANDWIDTH


def update_limit_s(row: Row) -> float:
    """Return the seconds of forward and backward products and attention, nothing recomputed."""
    _, _, layers, heads, _, _ = SHAPES[row.shape]
    tokens = row.problems * (row.prompt + row.samples * row.tokens)
    pairs = row.rows * (row.prompt + row.tokens / 2) * row.tokens
    products = (4 if LORA in row.settings else 6) * parameters(row.shape) * tokens
    return (products + 14 * pairs * heads * HEAD_DIM * layers) / ARITHMETIC


def limit_s(row: Row) -> float:
    """Return the least seconds that memory and arithmetic allow for a row."""
    if row.work == "rollout":
        return rollout_limit_s(row)
    if row.work == "sft":
        return update_limit_s(row)
    return rollout_limit_s(row) + update_limit_s(row)


def format_seconds(row: Row, seconds: float) -> str:
    """Return tokens per second of a rollout or an update, seconds of a step."""
    if row.work == "grpo":
        return f"{seconds:.1f} s"
    tokens = sum(response_lengths(row)) if row.work == "rollout" else row.prompt + row.tokens
    return f"{tokens / seconds:,.0f} tokens/s"


def format_figure(row: Row, results: Sequence[dict[str, Any]]) -> str:
    """Return the speed, or the longest row, of results that have not failed."""
    if row.within_gib:
        return f"{max(result['tokens'] for result in results):,} tokens"
    return format_seconds(row, statistics.median(s for r in results for s in r["seconds"]))


def describe(row: Row) -> str:
    """Return the work and its size."""
    if row.within_gib:
        return f"longest row of {row.title}, Gemma 3 1B, batch 1, {row.within_gib} GiB"
    if row.work == "sft":
        return f"{row.title}, one row of {row.prompt + row.tokens:,} tokens"
    lengths = {
        "full": f"{row.tokens:,} tokens",
        "uniform": f"100 to {row.tokens:,} tokens in and out",
        "tail": f"20 to 200 tokens, one in twenty {row.tokens:,}",
        "log-normal": f"log-normal lengths up to {row.tokens:,}",
    }[row.lengths]
    return f"{row.title}, {row.problems} x {row.samples}, {lengths}"


def make_cell(row: Row, results: Sequence[dict[str, Any]], ours: float | None) -> str:
    """Return a system's median with its memory, and its time as a multiple of ours."""
    measured = [result for result in results if "seconds" in result]
    if not measured:
        reason = results[-1]["failed"].strip().splitlines()[-1][:80] if results else ""
        return f"failed: {reason}" if reason else "not measured"
    parts = [format_figure(row, measured)]
    if memory := max(result.get("memory_gib") or 0.0 for result in measured):
        parts.append(f"{memory:.1f} GiB")
    if without := [s for r in measured for s in r.get("seconds_without_logprobs", ())]:
        parts.append(f"without log-probs {format_seconds(row, statistics.median(without))}")
    text = ", ".join(parts)
    if ours is not None:
        ratio = statistics.median(s for r in measured for s in r["seconds"]) / ours
        text = f"{measured[-1].get('label', measured[-1]['system'])}: {text} ({ratio:.2f})"
    return text


def median_seconds(results: Sequence[dict[str, Any]]) -> float | None:
    """Return the median of all timed repetitions, or None."""
    seconds = [s for result in results for s in result.get("seconds", ())]
    return statistics.median(seconds) if seconds else None


def make_cells(name: str, results: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return Postgrad's cell of a row, and that of the other systems."""
    row = ROWS[name]
    found = [result for result in results if result["row"] == name]
    ours = [result for result in found if result["system"] == "postgrad"]
    base = median_seconds(ours)
    others = [
        make_cell(row, [r for r in found if r["system"] == peer], base or 1.0)
        for peer in row.peers
        if any(r["system"] == peer for r in found)
    ]
    if name in PUBLISHED:
        others.append(f"published, {PUBLISHED[name]}")
    return make_cell(row, ours, None), "; ".join(others) or "-"


def join_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first row is the head."""
    head, *body = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def make_table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of every row that has a result; results of an earlier commit name it."""
    table = [("work", "Postgrad", "limit", "others (their time / ours)")]
    for name, row in ROWS.items():
        found = [result for result in results if result["row"] == name]
        if not found:
            continue
        ours, others = make_cells(name, results)
        commits = dict.fromkeys(result["commit"] for result in found if "commit" in result)
        work = describe(row) + "".join(f" (commit {commit})" for commit in commits)
        limit = "-" if row.within_gib else format_seconds(row, limit_s(row))
        table.append((work, ours, limit, others))
    return join_table(table)


def make_short_table(results: Sequence[dict[str, Any]], others: Sequence[dict[str, str]]) -> str:
    """Return README's table: some rows, and what other commands measured."""
    table = [("work", "Postgrad", "others (their time / ours)")]
    table += [(describe(ROWS[name]), *make_cells(name, results)) for name in SHORT_TABLE]
    table += [(other["work"], other["postgrad"], other["others"]) for other in others]
    return join_table(table)


def write_table(page: Path, table: str) -> None:
    """Write the table between the page's two marks."""
    before, mark, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise SystemExit(f"{page} has no place for the table: {MARKS[0].strip()}")
    page.write_text(f"{before}{mark}{table}\n{end}{after}")


def print_comparison(results: Sequence[dict[str, Any]]) -> None:
    """Print the median of each system and its spread, row by row."""
    for name in dict.fromkeys(result["row"] for result in results):
        for system in dict.fromkeys(r["system"] for r in results if r["row"] == name):
            found = [r for r in results if r["row"] == name and r["system"] == system]
            found = [r for r in found if "seconds" in r]
            if not found:
                print(f"{name:14} {system:18} failed")
                continue
            seconds = sorted(s for r in found for s in r["seconds"])
            memory = max(r.get("memory_gib") or 0.0 for r in found)
            middle = statistics.median(seconds)
            spread = f"{seconds[0]:.3f} to {seconds[-1]:.3f}"
            figure = format_figure(ALL_ROWS[name], found)
            print(f"{name:14} {system:18} {middle:.3f} s ({spread}) {figure}, {memory:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure rows")
    run.add_argument("out", type=Path, help="file of results")
    run.add_argument("--rows", nargs="+", choices=sorted(ALL_ROWS), default=list(ROWS))
    run.add_argument("--systems", nargs="+", default=["postgrad", *ENGINES, "trl", "unsloth"])
    run.add_argument("--code", nargs="+", default=[], metavar="LABEL=CHECKOUT")
    run.add_argument("--rounds", type=int, default=1, help="how often the systems alternate")
    run.add_argument("--limit-s", type=float, default=3600.0, help="seconds for all rows")
    run.add_argument("--each-s", type=float, default=400.0, help="seconds for one measurement")
    run.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct")
    one = commands.add_parser("one", help="measure one row of this checkout (used by run)")
    one.add_argument("row", choices=sorted(ALL_ROWS))
    one.add_argument("--limit-s", type=float, default=400.0)
    for command in (run, one):
        command.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    commands.add_parser("table", help="write the tables of docs/results.md and README.md")
    commands.add_parser("show", help="print medians").add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        if args.smollm2 and not (args.folder / "smollm2").exists():
            (args.folder / "smollm2").symlink_to(args.smollm2.resolve())
        run_rows(args)
    elif args.command == "one":
        row = ALL_ROWS[args.row]
        print("RESULT " + json.dumps(measure(row, args.folder, args.limit_s)), flush=True)
    elif args.command == "table":
        results = read_results([RESULTS])
        write_table(PAGE, make_table(results))
        write_table(README, make_short_table(results, json.loads(OTHERS.read_text())))
    else:
        print_comparison(read_results([args.out]))


if __name__ == "__main__":
    main()
