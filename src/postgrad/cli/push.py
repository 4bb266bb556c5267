"""`postgrad push FOLDER|RUN user/name`: uploads a model to a hub."""

from postgrad.cli.arguments import Parser, true_or_false
from postgrad.errors import ConfigError

DESCRIPTION = """\
Uploads a model folder to the Hugging Face hub, or to the server that HF_ENDPOINT names. Uses the
token in HF_TOKEN, or the one of `hf auth login`."""

EPILOG = """\
The model card (README.md) is written from the run folder: base model, method, data, settings,
metrics and config.yaml. An existing README.md in the folder is uploaded unchanged.
If the connection breaks, the same command continues; files that arrived are not sent again."""


def make_parser() -> Parser:
    parser = Parser(
        "push FOLDER|RUN user/name [private=true] [step=latest] [branch=NAME] [lora=merge]",
        DESCRIPTION,
        EPILOG,
    )
    parser.add_argument(
        "source",
        metavar="FOLDER|RUN",
        help="model folder (postgrad export writes one), checkpoint or run folder",
    )
    parser.add_argument("name", metavar="user/name", help="repository on the hub")
    parser.add_setting(
        "private",
        type=true_or_false,
        default=True,
        metavar="true|false",
        help="whether a new repository is private (default true); an existing one is not changed",
    )
    parser.add_setting(
        "step",
        default="latest",
        help="checkpoint of a run: latest, best or a number; all: every checkpoint to a branch "
        "step-N, and the last one to main",
    )
    parser.add_setting("branch", default="", help="branch of the repository; default: main")
    parser.add_setting(
        "lora",
        choices=("merge", "keep"),
        default="merge",
        metavar="merge|keep",
        help="for a run with model.lora.rank: merge (the default) uploads the full model, "
        "keep only the adapter",
    )
    parser.add_argument(
        "--card", action="store_true", help="print the model card and upload nothing"
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.publish.card import model_card
    from postgrad.publish.push import find_upload, find_uploads, push

    if arguments.step == "all":
        if arguments.branch or arguments.card:
            raise ConfigError("step=all names its own branches; remove branch= and --card")
        uploads = find_uploads(arguments.source, arguments.lora)
        targets = [(one, f"step-{one.step}") for one in uploads] + [(uploads[-1], "")]
        for one, branch in targets:
            print(f"pushed: {push(one, arguments.name, arguments.private, print, branch)}")
        return 0
    upload = find_upload(arguments.source, arguments.step, arguments.lora)
    if arguments.card:
        print(model_card(arguments.name, upload.folder, upload.run, upload.step))
        return 0
    address = push(upload, arguments.name, arguments.private, print, arguments.branch)
    print(f"pushed: {address}")
    return 0
