"""Environments of the tests."""

import os
import signal
import time
from pathlib import Path


class Echo:
    """Says what it was told; the reward of a turn is its length. Ends after `turns` turns."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, problem, seed):
        self.seen = []
        return f"hello {problem.uid}"

    def step(self, action):
        self.seen.append(action)
        return f"you said {action}", float(len(action)), len(self.seen) == self.turns

    def score(self):
        return {"score": 0.5, "bonus": 0.25}

    def get_state(self):
        return {"seen": self.seen}


class Hostile:
    """Misbehaves in `step` as the action says."""

    def reset(self, problem):
        self.count = 0
        self.problem = problem

    def step(self, action):
        self.count += 1
        if action == "hang":
            time.sleep(1000)
        if action == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "leave":
            raise SystemExit("gone")
        if action == "raise":
            raise ValueError("no such move")
        if action == "long":
            return "a" * 10_000_000, 0.0, False
        if action == "nan":
            return "", float("nan"), False
        if action == "wrong":
            return "only a text"
        if action == "no reward":
            return "", None, True
        if action == "done as text":
            return "", 1.0, "false"
        if action == "swapped":
            return "", True, 0.5
        return f"step {self.count}", 1.0, False


class Wallet:
    """Has tools and no step."""

    def __init__(self, money: int = 10) -> None:
        self.money = money

    def reset(self, problem) -> None:
        pass

    def pay(self, amount: int) -> str:
        """Pay an amount of money.

        Args:
            amount: how much
        """
        self.money -= amount
        return f"{self.money} left"

    def score(self) -> float:
        return -self.money


class NoEnvironment:
    def step(self, action):
        return "", 0.0, True


class Board(Echo):
    """Its state is what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def get_state(self):
        if self.kind == "tuple keys":
            return {(0, 1): "x"}
        if self.kind == "circular":
            state: dict = {}
            state["itself"] = state
            return state
        return {"path": Path("/tmp"), 3: [1.5]}
