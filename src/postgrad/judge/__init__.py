"""Language models that score responses: one response at a time, or against a reference answer.

May import config, problem and errors.
"""
