"""`postgrad score FILE[,FILE...] key=value ...`"""

from postgrad.cli.arguments import Parser

DESCRIPTION = """\
Scores responses that a file already has, with the report of postgrad eval: avg@k, pass@k, maj@k."""

EPILOG = """settings:
  responses=COLUMN    the column of responses: a text or a list of texts;
                      without it: responses, response, generations, generation, ...
  verifier=math workers=2 limit=40 pass_score=1 out=FOLDER name=MODEL
                      the keys of training (reward.verifier ...) work too
  verifier=llm_judge reward.judge.model=URL#NAME
                      a language model scores the responses

A file is .parquet, .jsonl, .json, .csv or .tsv, with a problem per row as in training. Rows of the
same problem are joined. The files of postgrad generate and the result files of postgrad eval work.
Results: SET.jsonl, summary.json and report.md."""


def make_parser() -> Parser:
    parser = Parser("score FILE[,FILE ...] [responses=COLUMN] [key=value ...]", DESCRIPTION, EPILOG)
    parser.add_argument("files", metavar="FILE", help="file with problems and their responses")
    parser.add_overrides("settings, see below")
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)
    from postgrad.evaluation.report import table, warnings
    from postgrad.evaluation.score import read_score_settings, score_files

    config = read_score_settings(arguments.files, arguments.overrides)
    summary = score_files(config)
    print("\n".join([table(summary), *warnings(summary)]))
    sets = ", ".join(f"{name}.jsonl" for name in summary["sets"])
    print(f"results: {summary['folder']}/report.md, summary.json and {sets}")
    return 0
