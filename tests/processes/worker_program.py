"""The program of the children in test_supervisor.py: it does what its items say."""

import ctypes
import json
import os
import subprocess
import time
from pathlib import Path

from postgrad.processes.channel import Channel, to_json
from postgrad.processes.program import run_child


def main(channel: Channel) -> None:
    while (message := channel.receive()) is not None:
        for item, command, *arguments in json.loads(message):
            if command == "die before the start":
                os._exit(4)
            channel.send(to_json(["start", item]))
            if command == "leave":
                channel.send(to_json(["bye"]))
                os._exit(0)
            if command == "nap":
                time.sleep(0.5)
            if command == "import":
                channel.send(to_json(["pause", item, "a package"]))
                time.sleep(2)
                channel.send(to_json(["start", item]))
            if command == "sleep":
                time.sleep(1000)
            if command == "exit":
                os._exit(7)
            if command == "segfault":
                ctypes.string_at(0)
            if command == "close everything":
                os.closerange(3, 100)
                time.sleep(1000)
            if command == "grandchild":
                Path(*arguments).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
                time.sleep(1000)
            channel.send(to_json(["done", item, len(str(arguments)), os.getpid()]))


if __name__ == "__main__":
    run_child(main)
