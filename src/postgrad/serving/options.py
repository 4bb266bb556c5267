"""The options of `postgrad serve` with their defaults."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """Options of one server. 0 means: chosen by the model and the machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str = ""
    name: str = ""  # names of the models, separated by commas
    servers: str = ""  # file that lists running servers
    reload_below: str = ""  # folder from which POST /v1/reload may load weights
    queue: int = 1024  # completions that may wait
    rows: int = 0  # completions decoded at the same time
    context: int = 0  # longest prompt plus response, in tokens
    time_limit: int = 600  # seconds per request
    grace: int = 10  # seconds for running requests when the server stops
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
