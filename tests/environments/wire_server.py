"""A small server of OpenEnv's wire: GET /schema, and one WebSocket per session.

Its game answers a word with the word; the reward is its length, and two words end it. Some words
make the server misbehave.
"""

import http
import json
import socket
import threading
import time
from contextlib import contextmanager

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

WORD = {"properties": {"word": {"type": "string"}}, "required": ["word"]}
OPENENV_FIELDS = {"done": {"type": "boolean"}, "metadata": {}}  # part of every observation
SCHEMA = {
    "action": WORD,
    "observation": {"properties": {"echo": {"type": "string"}, **OPENENV_FIELDS}},
}


def step(text, reward=None, done=False):
    data = {"observation": {"echo": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code, message):
    return {"type": "error", "data": {"code": code, "message": message}}


def answer(message, words):
    """What the server sends for a message; `words` are those of the session so far."""
    if message["type"] == "reset":
        return step(f"hello {message['data']['episode_id']}")
    if message["type"] == "state":
        return {"type": "state", "data": {"words": words}}
    word = message["data"]["word"]
    words.append(word)
    if word == "hang":
        time.sleep(30)
    misbehavior = {
        "raise": error("EXECUTION_ERROR", "no such word"),
        "invalid": error("VALIDATION_ERROR", "not a word"),
        "nan": step(word, float("nan")),
        "no fields": {"type": "observation", "data": {"observation": "only a text"}},
        "other type": {"type": "state", "data": {}},
        "no data": {"type": "observation"},
        "no reward": step(word),
        "long": step("a" * 10_000_000, 1.0),
    }
    return misbehavior.get(word) or step(word, float(len(word)), len(words) == 2)


@contextmanager
def running(schema=SCHEMA, token="", sessions=8):
    """Serve in a thread; yields the address."""
    free = threading.Semaphore(sessions)

    def check(connection, request):
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "no token")
        if request.path == "/schema":
            return connection.respond(http.HTTPStatus.OK, json.dumps(schema))
        return None

    def play(websocket):
        if not free.acquire(blocking=False):
            websocket.send(json.dumps(error("CAPACITY_REACHED", f"{sessions} sessions run")))
            return
        words = []
        try:
            for text in websocket:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                if message.get("data", {}).get("word") == "crash":
                    websocket.socket.shutdown(socket.SHUT_RDWR)
                    return
                websocket.send(json.dumps(answer(message, words)))
        except ConnectionClosed:
            pass
        finally:
            free.release()

    with serve(play, "127.0.0.1", 0, process_request=check) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
