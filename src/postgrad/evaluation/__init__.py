"""Evaluation: a model answers problems, verifiers judge, and what comes out can be put into a paper.

settings.py are the keys of `postgrad eval`; model.py finds the model; plan.py looks at everything before anything is written;
folder.py is the result's folder and how it is continued; run.py does the work; metrics.py, winrate.py (two answers compared), compare.py
(two models) and report.py say what it means; alpaca.py writes answers as AlpacaEval's tool reads them.
May touch training and below; nothing but the command line and the page imports it. Validation during training uses
rollout/respond.py, as run.py does.
"""
