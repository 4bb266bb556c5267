"""Requests with wrong fields, made from the request models of the sandbox server."""

import base64
import pickle
import zlib

import pytest
from request_fields import wrong_fields

from postgrad.sandbox.request_models import (
    AssertsRequest,
    InvalidField,
    RunCodeRequest,
    StdioRequest,
    parse_request,
)

STDIO = {"input": "1", "output": "2"}
PICKLED = base64.b64encode(zlib.compress(pickle.dumps(["assert 1"]))).decode()
# A good request of each model, and the status that refuses a wrong one.
REQUESTS = {
    AssertsRequest: ({"program": "", "tests": ["assert 1"]}, 400),
    StdioRequest: ({"program": "", "tests": [STDIO]}, 400),
    RunCodeRequest: ({"code": "", "language": "python"}, 422),
}


def refused_status(model, body, name) -> int:
    with pytest.raises(InvalidField) as caught:
        parse_request(model, body, REQUESTS[model][1])
    detail = caught.value.detail
    assert detail["loc"][:2] == ["body", name] and detail["msg"] and detail["type"]
    assert name in str(caught.value)
    return caught.value.status


@pytest.mark.parametrize("model", REQUESTS)
def test_a_missing_field_another_type_and_a_value_out_of_bounds_are_refused(model):
    good, status = REQUESTS[model]
    parse_request(model, good, status)
    for name in good:
        missing = {key: value for key, value in good.items() if key != name}
        assert refused_status(model, missing, name) == status
    for name, value in wrong_fields(model, set()):
        assert refused_status(model, good | {name: value}, name) in (status, 413), (name, value)


@pytest.mark.parametrize(
    ("model", "name", "value", "status"),
    [
        (AssertsRequest, "tests", PICKLED, 400),
        (AssertsRequest, "tests", [STDIO], 400),
        (AssertsRequest, "tests", ["assert 1"] * 1001, 413),
        (AssertsRequest, "program", "#" * 1_100_000, 413),
        (AssertsRequest, "max_execution_time", 1e9, 400),
        (AssertsRequest, "max_execution_time", True, 400),
        (StdioRequest, "tests", ["assert 1"], 400),
        (StdioRequest, "tests", [STDIO | {"input": 1}], 400),
        (RunCodeRequest, "code", "#" * 1_100_000, 413),
        (RunCodeRequest, "language", "cpp", 422),
        (RunCodeRequest, "run_timeout", 61, 422),
        (RunCodeRequest, "files", {"a.txt": "eA=="}, 422),
        (RunCodeRequest, "fetch_files", ["a.txt"], 422),
    ],
)
def test_values_that_the_server_does_not_take_are_refused(model, name, value, status):
    assert refused_status(model, REQUESTS[model][0] | {name: value}, name) == status
