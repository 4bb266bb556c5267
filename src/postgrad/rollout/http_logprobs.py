"""Log-probs of given tokens from a model behind a server: a teacher that this run does not load.

Two forms of /v1/completions are understood. vLLM: `prompt_logprobs=K` returns, per token of the
prompt, a table by token id. OpenAI's older form: `echo=true` with `logprobs=K` returns the prompt's
tokens with their log-probs. The first call finds out which one the server has. Log-probs are at
temperature 1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import RunError, Unsupported
from postgrad.pictures import Picture
from postgrad.rollout.http import TOKEN_ID_PREFIX, ids_with_pictures, only_choice
from postgrad.rollout.http_client import Address, ModelClient, RequestRefused
from postgrad.types import Batch

VLLM = "prompt_logprobs"
ECHO = "echo"

# The log-prob of one token, and the most likely tokens at its position by id.
TokenTable = tuple[float, dict[int, float]]


class HttpLogprobs:
    """The log-probs of a frozen model behind a server, one call per row.

    Args:
        address: the server and its model.
        wait_s: time limit for all calls of a batch, in seconds.
        concurrency: largest number of calls at the same time.

    Raises:
        ConfigError: the server does not answer, has no such model, or gives no log-probs of
            prompts.
    """

    def __init__(self, address: Address, wait_s: float = 600.0, concurrency: int = 32) -> None:
        self.client = ModelClient(address, wait_s, concurrency)
        self.max_context = self.client.check()
        self.form = self._find_form()

    def logprobs(self, batch: Batch) -> dict[str, Tensor]:
        """Return (tokens,) `logprobs` of the response tokens."""
        tables = self._score(batch, 0)
        return {"logprobs": torch.tensor([own for own, _ in tables], dtype=torch.float32)}

    def top_logprobs(self, batch: Batch, num_top: int) -> dict[str, Tensor]:
        """Return (tokens, num_top) `ids` of the most likely tokens and their `logprobs`."""
        ids: list[list[int]] = []
        values: list[list[float]] = []
        for _, table in self._score(batch, num_top):
            best = sorted(table.items(), key=lambda item: -item[1])[:num_top]
            if len(best) < num_top:
                raise RunError(
                    f"{self.client.address.url} gave {len(best)} tokens per position where "
                    f"{num_top} were asked; lower method.top_k"
                )
            ids.append([token for token, _ in best])
            values.append([value for _, value in best])
        return {"ids": torch.tensor(ids), "logprobs": torch.tensor(values, dtype=torch.float32)}

    def _score(self, batch: Batch, num_top: int) -> list[TokenTable]:
        """Return the tables of all response tokens of the batch, in order."""
        images = batch.rows.get("images") or [()] * len(batch)
        rows = [
            (prompt.tolist(), response.tolist(), shown)
            for prompt, response, shown in zip(
                batch.prompt.split(), batch.response.split(), images, strict=True
            )
        ]

        def score(
            row: tuple[list[int], list[int], tuple[Picture, ...]], deadline: float
        ) -> list[TokenTable]:
            prompt, response, shown = row
            ids = [*prompt, *response]
            if self.max_context is not None and len(ids) >= self.max_context:
                raise RunError(
                    f"a row of {len(ids)} tokens exceeds the context of {self.max_context} at "
                    f"{self.client.address.url}; lower rollout.max_response_tokens"
                )
            try:
                tables = self._ask(self.form, ids, num_top, deadline, shown)
            except RequestRefused as error:
                raise RunError(
                    f"{self.client.address.url} answered {error.status}: {error}"
                ) from error
            if tables is None:
                raise RunError(
                    f"{self.client.address.url} gave no log-probs for a row of {len(ids)} tokens"
                )
            return tables[len(prompt) :]

        per_row = self.client.map(score, rows, "a row of log-probs")
        return [table for tables in per_row for table in tables]

    def _find_form(self) -> str:
        """Return the form that the server answers, tried on a row of two tokens."""
        refusals: list[str] = []

        def ask(form: str, deadline: float) -> Any:
            return self._ask(form, [0, 1], 0, deadline)

        for form in (VLLM, ECHO):
            try:
                (tables,) = self.client.map(ask, [form], "a row of log-probs")
            except (RequestRefused, RunError) as error:
                refusals.append(f"{form}: {error}")
                continue
            if tables is not None:
                return form
            refusals.append(f"{form}: no such field in the answer")
        raise Unsupported(
            f"{self.client.address.url} gives no log-probs of prompts ({'; '.join(refusals)}); "
            "a teacher needs a server with prompt_logprobs (vLLM) or echo with logprobs",
            at=self.client.address.url,
        )

    def _ask(
        self,
        form: str,
        ids: Sequence[int],
        num_top: int,
        deadline: float,
        pictures: tuple[Picture, ...] = (),
    ) -> list[TokenTable] | None:
        """Return one table per token (the first has no log-prob), or None without log-probs."""
        body: dict[str, Any] = {
            "model": self.client.address.model,
            "prompt": ids_with_pictures(ids, pictures) if pictures else list(ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "return_tokens_as_token_ids": True,
        }
        if form == VLLM:
            body["prompt_logprobs"] = num_top
        else:
            body |= {"echo": True, "logprobs": num_top}
        answer = self.client.call("POST", "/completions", body, deadline)
        choice = only_choice(answer, self.client.address.url)
        read = read_vllm if form == VLLM else read_echo
        return read(choice, ids)


def read_vllm(choice: dict[str, Any], ids: Sequence[int]) -> list[TokenTable] | None:
    """Return the tables of vLLM's `prompt_logprobs`: per token a dict by token id, null first."""
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(ids):
        return None
    tables: list[TokenTable] = [(0.0, {})]
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        if not isinstance(entry, dict):
            return None
        table = {int(key): _logprob(value) for key, value in entry.items()}
        if token not in table:
            return None
        tables.append((table[token], table))
    return tables


def read_echo(choice: dict[str, Any], ids: Sequence[int]) -> list[TokenTable] | None:
    """Return the tables of an echoed prompt; top tokens only if they are named token_id:N."""
    logprobs = choice.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    # The answer also has the tokens that were generated after the prompt.
    if not isinstance(values, list) or len(values) < len(ids):
        return None
    if any(value is None for value in values[1 : len(ids)]):
        return None
    tops = logprobs.get("top_logprobs") or [None] * len(values)
    tables: list[TokenTable] = [(0.0, {})]
    for value, top in zip(values[1 : len(ids)], tops[1 : len(ids)], strict=True):
        table = {
            int(name.removeprefix(TOKEN_ID_PREFIX)): float(logprob)
            for name, logprob in (top or {}).items()
            if name.startswith(TOKEN_ID_PREFIX)
        }
        tables.append((float(value), table))
    return tables


def _logprob(value: Any) -> float:
    """Return the number of an entry: vLLM writes an object with `logprob`."""
    return float(value["logprob"] if isinstance(value, dict) else value)
