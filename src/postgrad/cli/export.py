"""`postgrad export SOURCE OUT key=value ...`: writes a Hugging Face model folder."""

from pathlib import Path

from postgrad.cli.arguments import Parser, positive_number

DESCRIPTION = """\
Writes a folder that from_pretrained reads: weights as safetensors, configuration, generation
settings and tokenizer."""

DTYPES = ("float32", "bfloat16", "float16")


def make_parser() -> Parser:
    parser = Parser(
        "export SOURCE OUT [step=latest] [dtype=bfloat16] [shard_gib=5] [lora=merge]", DESCRIPTION
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="run folder, checkpoint, adapter, model folder, or verl's FSDP shards (the folder "
        "with model_world_size_W_rank_R.pt, its global_step_N, or the folder above)",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; must be new or empty")
    parser.add_setting(
        "step", default="latest", help="checkpoint of a run: latest, best or a number"
    )
    parser.add_setting(
        "dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"type of the weights: {', '.join(DTYPES)}; without it they keep their type",
    )
    parser.add_setting(
        "shard_gib",
        type=positive_number,
        default=5.0,
        metavar="5",
        help="largest weight file, in GiB",
    )
    parser.add_setting(
        "lora",
        choices=("merge", "keep"),
        default="merge",
        metavar="merge|keep",
        help="merge adds adapters to the weights; keep writes the adapter alone, in peft's format",
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.publish.export import ExportRequest, export

    request = ExportRequest(
        arguments.source,
        Path(arguments.out),
        arguments.step,
        arguments.dtype,
        arguments.shard_gib,
        arguments.lora,
    )
    print(f"written: {export(request, print)}")
    return 0
