"""`postgrad export SOURCE OUT key=value ...`: writes a Hugging Face model folder."""

from pathlib import Path
from typing import Literal

from postgrad.cli.arguments import Positive


def export(
    source: str,
    out: Path,
    *,
    step: str = "latest",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_gib: Positive = 5.0,
    lora: Literal["merge", "keep"] = "merge",
) -> int:
    """Write a folder that from_pretrained reads: weights as safetensors, configuration, generation
    settings and tokenizer.

    Args:
        source: run folder, checkpoint, adapter, model folder, or verl's FSDP shards (the folder
            with model_world_size_W_rank_R.pt, its global_step_N, or the folder above)
        out: folder to write; must be new or empty
        step: checkpoint of a run: latest, best or a number
        dtype: type of the weights; without it they keep their type
        shard_gib: largest weight file, in GiB
        lora: merge adds adapters to the weights; keep writes the adapter alone, in peft's format
    """
    from postgrad.publish.export import ExportRequest
    from postgrad.publish.export import export as write_export

    request = ExportRequest(source, out, step, dtype, shard_gib, lora)
    print(f"written: {write_export(request, print)}")
    return 0
