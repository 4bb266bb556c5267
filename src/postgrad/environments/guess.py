"""Guess the number: the smallest environment, and the example of docs/environments.md."""

import random
import re


class GuessTheNumber:
    """A secret number of 1 to `high`. The reward is 1 for finding it, less for each wrong guess."""

    def __init__(self, high: int = 20, cost: float = 0.1) -> None:
        self.high = high
        self.cost = cost

    def reset(self, problem) -> str:
        self.secret = random.Random(problem.uid).randint(1, self.high)
        return f"Guess my number from 1 to {self.high}. Reply with one number."

    def step(self, action: str) -> tuple[str, float, bool]:
        numbers = re.findall(r"\d+", action)
        if not numbers:
            return "Reply with one number.", -self.cost, False
        guess = int(numbers[-1])
        if guess == self.secret:
            return "Right!", 1.0, True
        return ("higher" if guess < self.secret else "lower"), -self.cost, False
