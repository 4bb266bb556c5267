"""The requests of the sandbox server, as pydantic models."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from postgrad.net.bodies import HttpError

MAX_PROGRAM = 1 << 20  # characters
MAX_TESTS = 1000
MAX_TIME_S = 60.0  # of one test
TOO_LONG = ("string_too_long", "too_long")  # pydantic's error types

Program = Annotated[str, Field(max_length=MAX_PROGRAM)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIME_S)]


def _parse_json_list(tests: Any) -> Any:
    """Return a list that was sent as JSON text. Pickled tests are not accepted."""
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError) as error:
        raise ValueError("tests is a text but not JSON; pickled tests are not accepted") from error


class Request(BaseModel):
    """A request; values are not converted from other types, and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


Model = TypeVar("Model", bound=Request)


class StdioTest(Request):
    """One test: what the program reads and what it must print."""

    input: str
    output: str


class TestsRequest(Request):
    """What the two requests for tests have in common."""

    __test__ = False

    program: Program
    max_execution_time: Seconds = 1.0  # seconds per test


class AssertsRequest(TestsRequest):
    """POST /test_program."""

    tests: Annotated[
        list[str],
        Field(min_length=1, max_length=MAX_TESTS),
        BeforeValidator(_parse_json_list),
    ]
    setup: str = ""
    entry_point: str = ""


class StdioRequest(TestsRequest):
    """POST /test_program_stdio."""

    tests: Annotated[
        list[StdioTest],
        Field(min_length=1, max_length=MAX_TESTS),
        BeforeValidator(_parse_json_list),
    ]


class RunCodeRequest(Request):
    """POST /run_code, as Sandbox Fusion has it."""

    code: Program
    language: Literal["python"]
    stdin: str | None = None
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = -1  # -1: the server's own limit
    files: dict[str, Any] | None = None
    fetch_files: list[Any] | None = None

    @field_validator("files", "fetch_files")
    @classmethod
    def _no_files(cls, value: Any) -> Any:
        if value:
            raise ValueError("this sandbox takes no files; for asserts leave /run_code off its URL")
        return value


class InvalidField(HttpError):
    """A field of a request is wrong. `detail` has the form in which Sandbox Fusion reports it."""

    def __init__(self, status: int, error: Any) -> None:
        location = [str(part) for part in error["loc"]]
        super().__init__(status, f"{'.'.join(location)}: {error['msg']}")
        self.detail = {"type": error["type"], "loc": ["body", *location], "msg": error["msg"]}


def parse_request(model: type[Model], body: Any, status: int) -> Model:
    """Return the validated request.

    Args:
        status: of the reply to an invalid request; one that is too long gets 413.

    Raises:
        HttpError: the body is not an object.
        InvalidField: a field is missing or wrong.
    """
    if not isinstance(body, dict):
        required = [name for name, field in model.model_fields.items() if field.is_required()]
        raise HttpError(400, f"the request must be a JSON object with {', '.join(required)}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise InvalidField(413 if first["type"] in TOO_LONG else status, first) from error
