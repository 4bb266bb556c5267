"""Guess the number, an environment in one file: a class with `reset` and `step`.

    postgrad train grpo environment=examples/guess.py:Guess environment.options.high=50 \\
        rollout.max_turns=6 rollout.max_response_tokens=512 data.train=seeds:1000 model.path=MODEL
"""

import random
import re


class Guess:
    """A secret number of 1 to `high`. The reward is 1 for finding it, less for each wrong guess."""

    def __init__(self, high: int = 20, cost: float = 0.1):  # environment.options.*
        self.high = high
        self.cost = cost

    def reset(self, problem):  # the returned text ends the prompt
        self.secret = random.Random(problem.uid).randint(1, self.high)
        return f"Guess my number from 1 to {self.high}. Reply with one number."

    def step(self, action):  # the policy's turn, as text
        numbers = re.findall(r"\d+", action)
        if not numbers:
            return "Reply with one number.", -self.cost, False  # observation, reward, done
        guess = int(numbers[-1])
        if guess == self.secret:
            return "Right!", 1.0, True
        return ("higher" if guess < self.secret else "lower"), -self.cost, False
