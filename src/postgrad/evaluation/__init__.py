"""Evaluation: a model answers problems, verifiers score the responses, and a report is written.

May import training and everything below it. Only the command line, the web page and
postgrad.analysis import it. Validation during training shares rollout/respond.py with run.py.

    settings     the settings of `postgrad eval`
    model        finds the model: run folder, checkpoint, model folder, hub id
    plan         checks everything before anything is written
    folder       the result folder, and how an interrupted evaluation continues
    run          generates, scores and writes batch by batch
    generate     `postgrad generate`: responses without scores
    responses    reads files of responses
    score        `postgrad score`: scores the responses of files
    winrate      win rates of pairwise comparisons, raw and length-controlled
    pivot        `postgrad eval table`: many evaluations, models by sets
    compare      the paired difference of two evaluations
    report       tables and report.md
    progress     progress in the terminal
    alpaca       writes responses in the format of AlpacaEval
    data_check   `postgrad data check`: does the verifier accept the gold answers?
"""
