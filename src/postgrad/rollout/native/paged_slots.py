"""What rows write to and read from their slots of the decoder.

A slot has the sampling parameters, the random numbers and the results of one row.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from postgrad.rollout.engine import Completion, Sampling
from postgrad.rollout.native.paged_rows import PagedRow

if TYPE_CHECKING:
    from postgrad.rollout.native.decoder import Decoder

LARGEST_TOP_K = 1 << 24  # that float32 represents; no vocabulary is larger
# A number just below 1 may round to 1 in float32, which no cumulative sum exceeds.
LARGEST_UNIFORM = np.float32(1.0 - 2**-24)


def sampling_fields(sampling: Sampling) -> list[float]:
    """Return one line of the decoder's sampling table."""
    inverse_temperature = 1.0 / sampling.temperature if sampling.temperature else 0.0
    top_k = min(sampling.top_k, LARGEST_TOP_K)
    return [inverse_temperature, float(top_k), sampling.top_p, sampling.min_p]


def write_sampling(decoder: "Decoder", rows: Sequence[PagedRow]) -> None:
    """Write the sampling parameters of rows."""
    if not rows:
        return
    settings = torch.tensor([sampling_fields(row.job.sampling) for row in rows])
    slots = torch.tensor([row.slot for row in rows], device=decoder.device)
    decoder.sampling[slots] = settings.to(decoder.device)


def draw_uniforms(decoder: "Decoder", rows: Sequence[PagedRow]) -> None:
    """Draw all random numbers of rows from their seeds, the same numbers as on the CPU."""
    rows = [row for row in rows if row.job.sampling.temperature > 0.0]
    if not rows:
        return
    uniforms = np.zeros((len(rows), decoder.sizes.length), dtype=np.float32)
    for line, row in enumerate(rows):
        uniforms[line, : row.job.limit] = row.random.numbers(row.job.limit)
    uniforms = np.minimum(uniforms, LARGEST_UNIFORM)
    slots = torch.tensor([row.slot for row in rows], device=decoder.device)
    decoder.uniforms[slots] = torch.from_numpy(uniforms).to(decoder.device)


def read_completions(
    decoder: "Decoder", rows: Sequence[PagedRow], lengths_at_stop: Mapping[int, int]
) -> list[Completion]:
    """Return the sampled tokens and log-probs of rows that ended.

    Args:
        decoder: has the results.
        rows: the rows.
        lengths_at_stop: by slot, the number of tokens of a row that a stop string ended.
    """
    slots = torch.tensor([row.slot for row in rows], device=decoder.device)
    tokens = decoder.tokens[slots].cpu().numpy()
    logprobs = decoder.logprobs[slots].cpu().numpy()
    is_stop = np.isin(tokens, decoder.stop_ids.cpu().numpy())
    completions: list[Completion] = []
    for line, row in enumerate(rows):
        limit = row.job.limit
        stop_positions = np.nonzero(is_stop[line, :limit])[0]
        length = limit
        finish = "length"
        if row.slot in lengths_at_stop:
            length = lengths_at_stop[row.slot]
            finish = "stop"
        elif len(stop_positions):
            length = int(stop_positions[0]) + 1
            finish = "stop"
        row.tokens = tokens[line, :length].tolist()
        row.logprobs = logprobs[line, :length].tolist()
        row.finish = finish
        completions.append(row.completion())
    return completions
