"""`postgrad score FILE[,FILE...] key=value ...`"""


def score(files: str, *overrides: str) -> int:
    """Score responses that a file already has, with the report of postgrad eval: avg@k, pass@k,
    maj@k.

    Args:
        files [FILE[,FILE ...]]: files with problems and their responses
        overrides: settings, see below

    settings:
      responses=COLUMN    the column of responses: a text or a list of texts;
                          without it: responses, response, generations, generation, ...
      verifier=math workers=2 limit=40 pass_score=1 out=FOLDER name=MODEL
                          the keys of training (reward.verifier ...) work too
      verifier=llm_judge reward.judge.model=URL#NAME
                          a language model scores the responses

    A file is .parquet, .jsonl, .json, .csv or .tsv, with a problem per row as in training. Rows of
    the same problem are joined. The files of postgrad generate and the result files of postgrad
    eval work. Results: SET.jsonl, summary.json and report.md.
    """
    from postgrad.evaluation.report import table, warnings
    from postgrad.evaluation.score import read_score_settings, score_files

    summary = score_files(read_score_settings(files, list(overrides)))
    print("\n".join([table(summary), *warnings(summary)]))
    sets = ", ".join(f"{name}.jsonl" for name in summary["sets"])
    print(f"results: {summary['folder']}/report.md, summary.json and {sets}")
    return 0
