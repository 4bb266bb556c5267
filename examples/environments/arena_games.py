"""Games of TextArena: one player, or two players against an opponent.

    pip install textarena
    postgrad train grpo data.train=seeds:1000 rollout.max_turns=10 \
        environment=examples/environments/arena_games.py:Game \
        environment.options.game=GuessTheNumber-v0
    postgrad train grpo data.train=seeds:1000 \
        environment=examples/environments/arena_games.py:Game \
        environment.options.game=TicTacToe-v0 'environment.options.opponent="http://host:8000/v1#m"'

The opponent of a game for two is `random` (a legal move that the game lists), or a model behind a
server. For self-play, serve an earlier checkpoint of the run with `postgrad serve` and name it as
the opponent. Which side the policy plays depends on the problem, so both sides are trained.
"""

import hashlib
import os
import random
import re
import threading

import textarena

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
MAX_OPPONENT_TURNS = 10  # in a row; a game that needs more is stopped as a failure
# The games draw from Python's global random numbers. Each trajectory has its own state of them, so
# that it is the same whatever other trajectories do.
LOCK = threading.Lock()


class Game:
    """One game; the reward of the policy is the game's own, at the end."""

    def __init__(self, game: str, opponent: str = "random") -> None:
        self.name = game
        self.opponent = opponent

    def reset(self, problem, seed: int) -> str:
        start = int.from_bytes(hashlib.blake2b(problem.uid.encode(), digest_size=4).digest())
        self.opponent_random = random.Random(seed)
        # Without the wrapper that repeats all earlier messages: the conversation has them already.
        self.game = textarena.make(f"{self.name.removesuffix('-raw')}-raw")
        is_for_two = isinstance(self._new_game(start), textarena.TwoPlayerState)
        self.player = start % 2 if is_for_two else 0
        return self._play_until_own_turn(done=False)[0]

    def step(self, action: str) -> tuple[str, float, bool]:
        done, _ = self._with_own_random(self.game.step, action=action)
        text, done = self._play_until_own_turn(done)
        if not done:
            return text, 0.0, False
        rewards, info = self.game.close()
        reward = float((rewards or {}).get(self.player, 0.0))
        return str(info[self.player].get("reason", "")), reward, True

    def _new_game(self, start: int) -> object:
        """Begin with the same state for the same problem; returns the game's state object."""
        self.random_state = random.Random(start).getstate()
        for num_players in (1, 2):
            try:
                self._with_own_random(self.game.reset, num_players=num_players, seed=start)
                return self.game.state
            except (AssertionError, ValueError):
                if num_players == 2:
                    raise
        raise AssertionError("unreachable")

    def _play_until_own_turn(self, done: bool) -> tuple[str, bool]:
        """Let the opponent move; returns what the policy sees, and whether the game is over."""
        for _ in range(MAX_OPPONENT_TURNS):
            if done:
                return "", True
            player, messages = self.game.get_observation()
            text = "\n".join(str(said) for speaker, said, _ in messages if speaker != player)
            if player == self.player:
                return text, False
            done, _ = self._with_own_random(self.game.step, action=self._opponent_move(text))
        raise RuntimeError(f"{self.name}: the opponent made {MAX_OPPONENT_TURNS} turns in a row")

    def _opponent_move(self, text: str) -> str:
        if self.opponent != "random":
            return ask_model(self.opponent, text, self.opponent_random.randrange(2**31))
        moves = MOVE.findall(text.rpartition("Available Moves:")[2])
        return self.opponent_random.choice(moves) if moves else "[0]"

    def _with_own_random(self, function, **arguments):
        """Call a function of the game with this trajectory's random numbers."""
        with LOCK:
            shared = random.getstate()
            random.setstate(self.random_state)
            try:
                return function(**arguments)
            finally:
                self.random_state = random.getstate()
                random.setstate(shared)


def ask_model(address: str, text: str, seed: int) -> str:
    """Return the reply of a model behind an OpenAI-compatible server: URL#MODEL."""
    import httpx

    url, _, model = address.partition("#")
    token = os.environ.get("OPENAI_API_KEY", "")
    answer = httpx.post(
        f"{url}/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": text}], "seed": seed},
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=60.0,
    )
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]
