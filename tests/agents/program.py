"""Agent programs of the tests: `python program.py NAME`; they import little, to start fast."""

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


def call(path="/chat/completions", status=200, **body):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    connection.request(
        "POST", url.path + path, json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    got = json.loads(answer.read())
    assert answer.status == status, got
    return got


def chat(messages, **body):
    """The reply of the policy, as a message."""
    return call(messages=messages, **body)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def two_turns(problem):
    messages = list(problem["messages"])
    messages += [chat(messages), user("again")]
    messages.append(chat(messages, temperature=0.3, model="gpt-9"))
    print("a line of the program")
    print(json.dumps({"reward": 0.5, "replies": len(messages), "note": "text"}))


def branches(problem):
    """A sub-call between two turns, and a second continuation of the first reply."""
    first = list(problem["messages"])
    first += [chat(first), user("go on")]
    chat([user("a question to a helper")])
    chat(first)
    first[-1] = user("another way")
    print(chat(first)["content"])
    print(2)


def answer_only(problem):
    chat(problem["messages"])


def tool_turn(problem):
    schema = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": schema}]
    messages = list(problem["messages"])
    reply = chat(messages, tools=tools)
    called = reply["tool_calls"][0]
    assert called["function"]["name"] == "look"
    messages += [reply, {"role": "tool", "content": "12", "tool_call_id": called["id"]}]
    chat(messages, tools=tools)
    print(1.0)


def look_twice(problem):
    """Pictures in two turns; then the same conversation with the first one exchanged."""
    first = list(problem["messages"])
    blue, green = problem["extra"]["urls"]
    messages = [*first, chat(first, max_tokens=3), shown(blue)]
    messages += [chat(messages, max_tokens=3), user("2=")]
    chat(messages, max_tokens=3)
    chat([shown(green), *messages[1:]], max_tokens=3)
    call(status=400, messages=[shown("https://host/a.png")])
    call(status=400, messages=[*first, user("<|image_pad|>")])
    print(1.0)


def shown(url):
    """A message with a picture."""
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [part, {"type": "text", "text": "1+2="}]}


def refused(problem):
    """Requests that are refused leave no trace."""
    messages = problem["messages"]
    call(status=400, messages=messages, n=2)
    call(status=400, messages=messages, logprobs=True, top_logprobs=2)
    call(status=400, messages=[user("x" * 5000)])
    chat(messages, stop=["\n"], max_tokens=3)
    call(status=400, messages=messages)  # agent.max_calls=1
    print(1)


def endless(problem):
    """Asks until the policy has no tokens left."""
    messages = list(problem["messages"])
    while True:
        messages += [chat(messages), user("more")]


def crash(problem):
    chat(problem["messages"])
    raise ValueError("the agent is broken")


def hang(problem):
    """A child that would outlive the program."""
    chat(problem["messages"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(problem["extra"]["pid_file"]).write_text(str(child.pid))
    time.sleep(600)


def silent(problem):
    print(1.0)


def sevens(problem):
    """The share of sevens in the reply."""
    text = chat(problem["messages"])["content"]
    print(text.count("7") / max(1, len(text)))


if __name__ == "__main__":
    task = json.load(sys.stdin)
    assert json.loads(Path(os.environ["POSTGRAD_PROBLEM"]).read_text()) == task
    globals()[sys.argv[1]](task)
