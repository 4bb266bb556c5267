"""`postgrad export SOURCE OUT key=value ...`: a stock Hugging Face folder."""

from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad export SOURCE OUT [step=latest] [dtype=bfloat16] [shard_gib=5] [lora=merge]

Writes a folder that anyone's from_pretrained reads: weights as safetensors, configuration, generation settings, tokenizer.

  SOURCE       a run folder, a checkpoint, an adapter, a model folder, or verl's FSDP shards (the folder with
               model_world_size_W_rank_R.pt, its global_step_N, or the one above)
  step=        of a run: latest, best, or a number
  dtype=       float32, bfloat16 or float16; without it weights keep their type
  shard_gib=   a weight file holds at most so much
  lora=merge   adapters become part of the weights; lora=keep writes the adapter alone, in peft's format"""

KEYS = ("step", "dtype", "shard_gib", "lora")


def run(words: list[str]) -> int:
    if not words or "-h" in words or "--help" in words:
        print(HELP)
        return 0
    wanted = read(words)
    from postgrad.publish.export import export

    out = export(wanted, print)
    print(f"written: {out}")
    return 0


def read(words: list[str]) -> Any:
    """The words as what to export. Raises ConfigError."""
    given = dict(
        word.split("=", 1) for word in words if word.partition("=")[0] in KEYS and "=" in word
    )
    paths = [word for word in words if word.partition("=")[0] not in KEYS or "=" not in word]
    for word in paths:
        if "=" in word and not Path(word).exists():
            key = word.partition("=")[0]
            raise ConfigError(f"export does not know {key}; {did_you_mean(key, KEYS)}")
    if len(paths) != 2:
        raise ConfigError(
            f"export wants where from and where to: postgrad export SOURCE OUT; it got {' '.join(paths) or 'nothing'}"
        )
    from postgrad.publish.export import DTYPES, LORA, Wanted

    for key, known in (("dtype", tuple(DTYPES)), ("lora", LORA)):
        if key in given and given[key] not in known:
            raise ConfigError(
                f"{key}={given[key]} is not one of its values; {did_you_mean(given[key], known)}"
            )
    try:
        size = float(given.get("shard_gib", "5"))
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise ConfigError(
            f"shard_gib={given['shard_gib']} is not a size; write a number of GiB, e.g. shard_gib=5"
        )
    return Wanted(
        paths[0],
        Path(paths[1]),
        given.get("step", "latest"),
        given.get("dtype"),
        size,
        given.get("lora", "merge"),
    )
