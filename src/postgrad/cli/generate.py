"""`postgrad generate MODEL data=SET[,SET...] out=FILE key=value ...`"""

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Writes a model's responses to problems to a data file, without scoring them. The same command
continues after it was stopped. postgrad score FILE scores the file."""

EPILOG = """settings:
  data=SET[,SET ...]  problem files in any format that training reads
  out=FILE            FILE.parquet or FILE.jsonl: one row per problem, the problem in verl's schema,
                      and the columns responses, finishes and lengths, each a list
  n=16 temperature=0.6 top_p=0.95 max_response_tokens=2048 limit=40 engine=vllm seed=1
                      the keys of postgrad eval; without n, decoding is greedy"""


def make_parser() -> Parser:
    parser = Parser(
        "generate MODEL data=SET[,SET ...] out=FILE [key=value ...]", DESCRIPTION, EPILOG
    )
    parser.add_argument("model", metavar="MODEL", help="as of postgrad eval")
    parser.add_overrides("settings, see below")
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.evaluation.generate import generate_file, make_generate_plan
    from postgrad.evaluation.model import find_model
    from postgrad.evaluation.progress import make_progress
    from postgrad.evaluation.settings import full_key, read_settings

    for override in arguments.overrides:
        if full_key(override.partition("=")[0]).startswith("reward."):
            raise ConfigError(f"{override} has no effect: postgrad generate scores nothing")
    target = find_model(arguments.model)
    settings = read_settings(target.path, arguments.overrides, target.config, "generate")
    plan = make_generate_plan(settings, target)
    num_responses = generate_file(plan, make_progress())
    print(f"{num_responses} responses: {settings.out}")
    return 0
