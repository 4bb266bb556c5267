"""A server of the openenv package with two environments; prints its address.

python openenv_server.py FOLDER_OF_READY_FILE word|move
"""

import socket
import sys
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class WordAction(Action):
    word: str


class WordObservation(Observation):
    echo: str = ""
    length: int = 0


class WordState(State):
    words: list[str] = Field(default_factory=list)


class Words(Environment):
    """Echoes words; the reward is their length; "end" ends. The first word depends on the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = WordState(episode_id=episode_id)
        asked = kwargs["problem"]["messages"][0]["content"]
        return WordObservation(echo=f"{asked} {episode_id} {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.word == "raise":
            raise ValueError("no such word")
        if action.word == "hang":
            time.sleep(5)
        if action.word == "long":
            return WordObservation(echo="a" * 10_000_000)
        self._state.words.append(action.word)
        length = len(action.word)
        return WordObservation(
            echo=action.word, length=length, reward=float(length), done=action.word == "end"
        )

    @property
    def state(self):
        return self._state


class Move(Action):
    row: int
    column: int


class Board(Environment):
    """Takes moves of two numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **kwargs):
        return Observation()

    def step(self, action, timeout_s=None, **kwargs):
        return Observation(reward=10.0 * action.row + action.column, done=True)

    @property
    def state(self):
        return State()


KINDS = {"word": (Words, WordAction, WordObservation), "move": (Board, Move, Observation)}

if __name__ == "__main__":
    app = create_fastapi_app(*KINDS[sys.argv[2]], max_concurrent_envs=2)
    listener = socket.create_server(("127.0.0.1", 0))
    ready = Path(sys.argv[1]) / "address"
    ready.with_suffix(".new").write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")
    ready.with_suffix(".new").rename(ready)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
