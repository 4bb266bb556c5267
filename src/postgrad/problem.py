"""Problem, Score and Failure: what a verifier reads and returns.

Imports no torch, so that the child processes of verifiers start fast.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from postgrad.pictures import Picture, image_parts, picture_of_data_url

# One message of a conversation: role, content, and other fields that the chat template reads. The
# content is a text; with pictures a list of {type: text, text} and {type: image}.
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A whole conversation to imitate, as the chat template renders it.

    Attributes:
        messages: all messages; an assistant message may have `tool_calls` and a null content.
        tools: JSON schemas of the tools that the template shows to the model.
        num_prompt: number of leading messages that are the prompt and never trained on.
        text: a plain text instead of messages: no chat template, every token is trained on.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    num_prompt: int = 0
    text: str = ""


@dataclass(frozen=True)
class Problem:
    """One row of a data set.

    `uid` is stable: it stays the same through shuffling, resuming, rollouts and dumps. `tools` are
    the JSON schemas of a row without a conversation, which the chat template shows. `images` are
    the pictures of the messages, one for each part {type: image}, in their order. `row` has
    the columns as they are in the data; it is empty for a problem that was not read from a row.
    `read_from` says where the row is ("train.jsonl: line 3"). Both stay in this process.
    """

    uid: str
    messages: tuple[Message, ...]
    ground_truth: str
    data_source: str = ""
    demonstrations: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation | None = None
    tools: tuple[dict[str, Any], ...] = ()
    images: tuple[Picture, ...] = ()
    row: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    read_from: str = field(default="", compare=False, repr=False)

    @property
    def prompt_images(self) -> tuple[Picture, ...]:
        """The pictures of the prompt; a conversation may have more of them after it."""
        return self.images[: len(image_parts(self.messages))] if self.images else ()

    if not TYPE_CHECKING:  # a type checker would then accept every name

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError that says where a column of the row is."""
            if name.startswith("_") or name in Problem.__dataclass_fields__:
                raise AttributeError(name)  # copies and unpickling ask before the fields are set
            where = "the answer is problem.ground_truth, other columns are in problem.extra"
            if name in self.extra:
                where = f"the column is problem.extra[{name!r}]"
            raise AttributeError(f"a Problem has no attribute {name!r}; {where}")


def problem_label(problem: Problem) -> str:
    """Return a problem's name in messages, with its place: most files have no uids to look for."""
    place = f" ({problem.read_from})" if problem.read_from else ""
    return f"problem {problem.uid}{place}"


def sent_fields(problem: Problem) -> dict[str, Any]:
    """Return what of a problem is sent to other processes: all but the row and its place."""
    kept_here = ("row", "read_from", "images")
    fields = {name: value for name, value in vars(problem).items() if name not in kept_here}
    images = [picture.data_url() for picture in problem.images]
    return fields | {"images": images} if images else fields


def problem_from(fields: dict[str, Any]) -> Problem:
    """Return the problem of `sent_fields`; JSON has made lists of its tuples."""
    return Problem(
        fields["uid"],
        tuple(fields["messages"]),
        fields["ground_truth"],
        fields["data_source"],
        tuple(fields["demonstrations"]),
        fields["extra"],
        images=tuple(map(picture_of_data_url, fields.get("images", ()))),
    )


@dataclass(frozen=True)
class Score:
    """A verifier's result: the reward, and the named parts that it consists of."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A response that could not be scored.

    `kind` is for counting (timeout, crash, judge ...), `reason` is for people.
    """

    kind: str
    reason: str
