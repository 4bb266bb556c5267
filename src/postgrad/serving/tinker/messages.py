"""Tinker's protobuf messages: training data in, log-probs and samples out.

Field numbers follow the `tinker` package, version 0.36. Tensors are little-endian bytes.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from postgrad.serving.tinker import protobuf
from postgrad.serving.tinker.protobuf import DecodeError, Fields
from postgrad.web import HttpError

FLOAT32, INT64 = 1, 2  # numbers of the tensor types that requests may have
NUMPY_TYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP, LENGTH = 0, 1  # numbers of the reasons why a sample ended


@dataclass
class Datum:
    """One sequence: N input tokens, and (N,) or (N, K) arrays that the loss reads, by name."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]


@dataclass
class ForwardBackwardRequest:
    """A training pass over `data`; `forward_only` computes no gradient."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    options: dict[str, float]
    forward_only: bool


@dataclass
class Sample:
    """One sampled continuation; `top` are (tokens, k) ids and log-probs, None if not wanted."""

    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop or length
    top: tuple[np.ndarray, np.ndarray] | None = None


# ---- requests


def parse_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Return the request. Raises HttpError: 400 for bytes that are not this message."""
    try:
        fields = protobuf.decode(body)
        return ForwardBackwardRequest(
            model_id=protobuf.get_text(fields, 1),
            seq_id=protobuf.get_int(fields, 2),
            data=[_parse_datum(datum) for datum in protobuf.get_messages(fields, 3)],
            loss=protobuf.get_text(fields, 4),
            options=_parse_options(fields),
            forward_only=bool(protobuf.get_int(fields, 6)),
        )
    except DecodeError as error:
        raise HttpError(400, f"the request is not a ForwardBackwardRequest: {error}") from error


def _parse_options(fields: Fields) -> dict[str, float]:
    options: dict[str, float] = {}
    for name, entry in protobuf.get_map(fields, 7).items():
        value = protobuf.decode(protobuf.get_bytes(entry, 2))
        if 2 in value:
            raise DecodeError(f"loss_fn_config has {name}, a text; the losses here take numbers")
        options[name] = protobuf.get_double(value, 1)
    return options


def _parse_datum(fields: Fields) -> Datum:
    tokens: list[int] = []
    for chunk in protobuf.get_messages(fields, 1):
        if 1 not in chunk:
            raise DecodeError("a model_input has an image or audio chunk; this server takes text")
        text = protobuf.decode(protobuf.get_bytes(chunk, 1))
        tokens += _array(protobuf.get_bytes(text, 1), np.dtype("<i4")).tolist()
    entries = protobuf.get_map(fields, 2)
    inputs = {
        name: _parse_tensor(name, protobuf.decode(protobuf.get_bytes(entry, 2)))
        for name, entry in entries.items()
    }
    return Datum(tokens, inputs)


def _parse_tensor(name: str, fields: Fields) -> np.ndarray:
    dtype = NUMPY_TYPES.get(protobuf.get_int(fields, 3))
    if dtype is None:
        raise DecodeError(f"{name} is neither float32 nor int64")
    shape = protobuf.get_ints(fields, 4)
    if 2 not in fields:
        values = _array(protobuf.get_bytes(fields, 1), dtype)
        shape = shape or [len(values)]
        if prod(shape) != len(values):
            raise DecodeError(f"{name} has {len(values)} values, which do not fill {shape}")
        return values.reshape(shape)
    sparse = protobuf.decode(protobuf.get_bytes(fields, 2))
    rows, columns = (_array(protobuf.get_bytes(sparse, i), NUMPY_TYPES[INT64]) for i in (2, 3))
    return expand_csr(name, _array(protobuf.get_bytes(sparse, 1), dtype), rows, columns, shape)


def expand_csr(
    name: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int]
) -> np.ndarray:
    """Return the dense array of a sparse matrix, 0 where it has no value. Raises DecodeError.

    `rows` are (num_rows + 1,) row pointers and `columns` the column of each value.
    """
    is_valid = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    is_valid = is_valid and rows[0] == 0 and rows[-1] == len(values) and (np.diff(rows) >= 0).all()
    if not is_valid or ((columns < 0) | (columns >= shape[1])).any():
        raise DecodeError(f"{name} is not a valid sparse matrix of shape {shape}")
    if prod(shape) > 64 * (len(values) + len(rows) + 1024):
        raise DecodeError(f"{name} of shape {shape} is too sparse; send fewer columns")
    dense = np.zeros(shape, dtype=values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise DecodeError("a tensor's bytes do not fit its type")
    return np.frombuffer(data, dtype=dtype)


# ---- responses


def encode_forward_backward(outputs: list[np.ndarray], metrics: dict[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: each datum's `logprobs`, (N,) or (N, K), and the metrics."""
    message = protobuf.encode_bytes(1, "TorchLossReturn")
    message += b"".join(protobuf.encode_bytes(2, _encode_record([one])) for one in outputs)
    for name, value in metrics.items():
        entry = protobuf.encode_bytes(1, name) + protobuf.encode_double(2, value)
        message += protobuf.encode_bytes(3, entry)
    return message


def _encode_record(outputs: list[np.ndarray]) -> bytes:
    """Return an ArrayRecord of data whose arrays have the same number of columns."""
    arrays = [np.ascontiguousarray(one, dtype="<f4") for one in outputs]
    offsets = np.cumsum([0, *(one.nbytes for one in arrays)]).astype("<i8")
    tensor = (
        protobuf.encode_bytes(1, b"".join(one.tobytes() for one in arrays))
        + protobuf.encode_bytes(2, offsets.tobytes())
        + protobuf.encode_int(3, FLOAT32)
        + protobuf.encode_ints(4, arrays[0].shape[1:])
    )
    entry = protobuf.encode_bytes(1, "logprobs") + protobuf.encode_bytes(2, tensor)
    return protobuf.encode_bytes(2, entry) + protobuf.encode_int(3, len(arrays))


def encode_samples(
    samples: list[Sample],
    prompt_logprobs: np.ndarray | None = None,
    top_prompt: tuple[np.ndarray, np.ndarray] | None = None,
) -> bytes:
    """Return a SampleResponse. Prompt log-probs are (N,); NaN where there is none."""
    message = b"".join(protobuf.encode_bytes(1, _encode_sample(sample)) for sample in samples)
    if prompt_logprobs is not None:
        message += protobuf.encode_bytes(2, prompt_logprobs.astype("<f4").tobytes())
    if top_prompt is not None:
        message += protobuf.encode_bytes(3, _encode_top(*top_prompt))
    return message


def _encode_sample(sample: Sample) -> bytes:
    message = protobuf.encode_int(1, STOP if sample.finish == "stop" else LENGTH)
    message += protobuf.encode_bytes(2, np.array(sample.tokens, dtype="<i4").tobytes())
    message += protobuf.encode_bytes(3, np.array(sample.logprobs, dtype="<f4").tobytes())
    if sample.top is not None:
        message += protobuf.encode_bytes(4, _encode_top(*sample.top))
    return message


def _encode_top(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    length, count = ids.shape
    return (
        protobuf.encode_bytes(1, ids.astype("<i4").tobytes())
        + protobuf.encode_bytes(2, logprobs.astype("<f4").tobytes())
        + protobuf.encode_int(3, count)
        + protobuf.encode_int(4, length)
    )
