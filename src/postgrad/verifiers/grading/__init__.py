"""Grading: the built-in verifiers, each a function of one response and its problem.

- answers.py: finding the answer in a response; the verifiers that need nothing else.
- choice.py: multiple choice.
- equality.py, numbers.py, closed_form.py: whether two answers are equal, by text and by number.
- math.py, algebra.py: equality by computer algebra.
- r1_zero.py: rewards of the CS336 assignment, fast and slow.
- form.py: format and length.
- code.py: programs against tests, in the sandbox.
- reasoning_gym.py, environment.py: scores of generators and of environments.

Only child processes import math.py, algebra.py, r1_zero.py, reasoning_gym.py and code.py.
"""
