"""Language models that score responses: by a rating, or by comparison with a reference answer.

- templates.py: the prompts for the judge and the monitor.
- llm.py: LlmJudge asks a model for a rating of each response and stores the ratings.
- pairwise.py: PairJudge asks a model which of two answers is better.
- rubric.py: RubricJudge asks a model to rate each criterion of a problem's rubric.
- monitor.py: metrics of ratings that were predicted from the thought alone.

May import config, problem and errors. The model is a function that answers prompts; which engine or
server runs it is decided in methods/support/judging.py.
"""
