"""Converters of rows to problems, one per schema of schemas.py.

A converter takes (row, file name without extension) and returns a Problem. The problem's uid is
the row's own or "". Columns that the converter does not use go into `extra`. `ground_truth` is ""
in schemas without an answer to check a response against.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from postgrad.data.boxes import last_box
from postgrad.data.choices import plain_prompt, read_choices, sentence_prompt
from postgrad.data.instructions import INSTRUCTION_COLUMNS, read_instruction_messages
from postgrad.data.messages import (
    ROLES,
    SHAREGPT_COLUMNS,
    check_last_is_assistant,
    check_reply,
    read_conversation,
    read_messages,
    read_tools,
    text_of_only_message,
    without_weights,
)
from postgrad.data.passages import question_of
from postgrad.data.rows import (
    Row,
    RowError,
    checked_text,
    data_source_of,
    only_text,
    optional_truth,
    text_of,
    truth_of,
    type_name,
    uid_of,
    unused_columns,
    user_turn,
)
from postgrad.data.sharegpt import sharegpt_messages
from postgrad.data.short_answers import check_only_truth, short_answer
from postgrad.problem import Conversation, Message, Problem

NO_ANSWER = ("proof", "notfound")  # what NuminaMath-1.5 has as the answer of a proof
# Columns of options, in lower case: options, choice_A, option1, opa, ending0, or A beside B.
OPTIONS = re.compile(r"options?|choices?|endings|(option|choice|ending|distractor)_?([a-j]|\d)|opa")
NO_SOLUTION = "n/a"  # what OpenMathReasoning has as the solution of a problem without one
GSM8K_TRUTH = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")  # in the last line of a solution


def read_verl(row: Row, stem: str) -> Problem:
    reward_model = row.get("reward_model")
    if not isinstance(reward_model, dict):
        raise RowError(
            f"reward_model must be an object with ground_truth, not {type_name(reward_model)}"
        )
    extra = unused_columns(row, "prompt", "reward_model", "target", "response")
    if extra.get("extra_info") is None:
        extra["extra_info"] = {}
    extra["reward_model"] = dict(reward_model)
    if isinstance(reward_model.get("ground_truth"), str | None):  # others keep their type for verl
        extra["reward_model"].pop("ground_truth", None)
    return Problem(
        uid=uid_of(row),
        messages=read_messages(row, "prompt"),
        ground_truth=_verl_truth(reward_model, str(row.get("ability")).lower() == "math"),
        data_source=data_source_of(row, ""),
        demonstrations=_read_target(row.get("target")) or _read_response(row),
        extra=extra,
    )


def _verl_truth(reward_model: Row, is_math: bool) -> str:
    """The ground truth; "" where a judge scores (style "model", or a question for a monitor).

    Skywork-OR1 has the answer of a math problem as a JSON list of one text.
    """
    truth = reward_model.get("ground_truth")
    if is_math and isinstance(truth, str) and truth.startswith('["'):
        truth = only_text(truth) or truth
    is_judged = reward_model.get("style") == "model" or bool(
        reward_model.get("raw_question_for_monitor")
    )
    if truth is None and is_judged:
        return ""
    return truth_of(truth, "reward_model.ground_truth")


def _read_target(value: Any) -> tuple[str, ...]:
    """LUFFY's `target`: a list of assistant messages, some without content, or of strings."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(
            f"target must be a list of messages {{role, content}} or null, not {type_name(value)}"
        )
    texts: list[str] = []
    for i, item in enumerate(value):
        if isinstance(item, dict):
            check_reply(item, f"target[{i}]")
        content = item.get("content") if isinstance(item, dict) else item
        if content is not None:
            texts.append(checked_text(content, f"target[{i}].content"))
    return tuple(texts)


def _read_response(row: Row) -> tuple[str, ...]:
    """The response of verl's SFT rows: a text in the column of data.response_key."""
    return () if row.get("response") is None else (text_of(row, "response"),)


def read_prompt_response(
    row: Row, stem: str, response: str = "response", prompt: str = "prompt"
) -> Problem:
    """A prompt and a response: a text, or TRL's list of messages, which is read whole.

    A response of several messages is no demonstration, which is one text. `prompt` and `response`
    name the columns.
    """
    messages = _read_question(row, prompt)
    tools = read_tools(row)
    conversation = None
    if isinstance(row.get(response), list):
        completion = read_conversation(row, response)
        check_last_is_assistant(completion, response)
        conversation = Conversation((*messages, *completion), tools, num_prompt=len(messages))
        demonstrations = text_of_only_message(completion)
    else:
        text = text_of(row, response)
        demonstrations = (text,)
        if tools:
            completion = ({"role": "assistant", "content": text},)
            conversation = Conversation((*messages, *completion), tools, num_prompt=len(messages))
    return Problem(
        uid=uid_of(row),
        messages=messages,
        ground_truth=optional_truth(row),
        data_source=data_source_of(row, stem),
        demonstrations=demonstrations,
        extra=unused_columns(row, prompt, response, "ground_truth", "tools"),
        conversation=conversation,
    )


def read_prompt(row: Row, stem: str, column: str = "prompt") -> Problem:
    """A prompt for RL and for `postgrad eval`, perhaps with demonstrations in LUFFY's `target`."""
    return Problem(
        uid=uid_of(row),
        messages=read_messages(row, column),
        ground_truth=optional_truth(row),
        data_source=data_source_of(row, stem),
        demonstrations=_read_target(row.get("target")),
        extra=unused_columns(row, column, "ground_truth", "target"),
    )


def read_mmlu(row: Row, stem: str, data_source: str = "mmlu") -> Problem:
    item = read_choices(row, stem)
    extra = unused_columns(row, "A", "B", "C", "D", "answer", "answerKey", "choices")
    extra |= {"subject": item.subject, "options": list(item.options)}
    return Problem(
        uid=uid_of(row),
        messages=user_turn(sentence_prompt(item)),
        ground_truth=item.letter,
        data_source=data_source_of(row, data_source),
        extra=extra,
    )


def read_arc(row: Row, stem: str) -> Problem:
    item = read_choices(row, stem)
    extra = unused_columns(row, "choices", "answerKey") | {"options": list(item.options)}
    return Problem(
        uid=uid_of(row),
        messages=user_turn(plain_prompt(item)),
        ground_truth=item.letter,
        data_source=data_source_of(row, "arc_c"),
        extra=extra,
    )


def read_gsm8k(row: Row, stem: str, question: str = "question") -> Problem:
    answer = text_of(row, "answer")
    truth = GSM8K_TRUTH.search(answer)
    if truth is None:
        raise RowError(
            "no ground truth: answer must end in `#### NUMBER`, as the first row's does; "
            "add it or remove the row"
        )
    return Problem(
        uid=uid_of(row),
        messages=_read_question(row, question),
        ground_truth=truth[1].replace(",", ""),
        data_source=data_source_of(row, "openai/gsm8k"),
        demonstrations=(answer,),
        extra=unused_columns(row, question, "answer"),
    )


def read_question_answer(
    row: Row, stem: str, question: str = "question", answer: str = "answer"
) -> Problem:
    """A question and its ground truth.

    Beside `problem` or `question` and an answer, a text column `solution` is a demonstration.
    """
    truth = truth_of(row.get(answer), answer)
    if question == "problem" and truth in NO_ANSWER:
        truth = ""
    _check_options(row, question)
    check_only_truth(row, truth, question, answer)
    if GSM8K_TRUTH.search(truth):
        raise RowError(
            f"{answer} ends in `####` and the truth, but the first row's does not; "
            "write all rows one way"
        )
    used = [question, answer]
    demonstrations: tuple[str, ...] = ()
    solution = row.get("solution")
    if question == "problem" and solution:
        checked_text(solution, "solution")
    if question != "prompt" and isinstance(solution, str) and solution:
        demonstrations = (checked_text(solution, "solution"),)
        used.append("solution")
    return Problem(
        uid=uid_of(row),
        messages=_read_question(row, question),
        ground_truth=truth,
        data_source=data_source_of(row, stem),
        demonstrations=demonstrations,
        extra=unused_columns(row, *used),
    )


def read_open_math_reasoning(row: Row, stem: str) -> Problem:
    """OpenMathReasoning: the expected answer is the truth, the solution a demonstration."""
    solution = text_of(row, "generated_solution")
    has_solution = solution.strip().lower() != NO_SOLUTION
    return Problem(
        uid=uid_of(row),
        messages=user_turn(text_of(row, "problem")),
        ground_truth=truth_of(row.get("expected_answer"), "expected_answer"),
        data_source=data_source_of(row, "omr12k"),
        demonstrations=(solution,) if has_solution else (),
        extra=unused_columns(row, "problem", "expected_answer", "generated_solution"),
    )


def read_math(row: Row, stem: str) -> Problem:
    """MATH's own columns: the last box of the solution is the truth."""
    solution = text_of(row, "solution")
    truth = last_box(solution)
    if not truth and not row.get("messages"):
        raise RowError(
            "no ground truth: solution has no complete \\boxed{...}; add a column answer or remove "
            "the row; for SFT, rename the columns (FILE:problem=prompt:solution=response)"
        )
    return Problem(
        uid=uid_of(row),
        messages=user_turn(text_of(row, "problem")),
        ground_truth=truth,
        data_source=data_source_of(row, "competition_math"),
        demonstrations=(solution,),
        extra=unused_columns(row, "problem", "solution"),
    )


@lru_cache(maxsize=1024)  # every row of a file has the same columns
def _is_option(name: str) -> bool:
    return OPTIONS.fullmatch(str(name).lower()) is not None


def _check_options(row: Row, question: str) -> None:
    """Raises RowError if the row has options that the prompt would not have."""
    names = [name for name in row if row[name] and _is_option(name)]
    if row.get("A") and row.get("B"):
        names.append("A")
    if names and question != "prompt":
        raise RowError(
            f"{names[0]} would not be in the prompt; write the options as a list in a column "
            "options, or as option_a, option_b, ..., and the letter in answer; or leave the "
            f"column out (FILE:{names[0]}=unused)"
        )


def _read_question(row: Row, name: str) -> tuple[Message, ...]:
    """The messages of a question: a text after its passages, or a list of messages.

    The text of `prompt` and `inputs` is the whole prompt.
    """
    if name in ("prompt", "inputs") or isinstance(row.get(name), list):
        return read_messages(row, name)
    return user_turn(question_of(row, name))


def read_instruction(row: Row, stem: str, output: str = "output") -> Problem:
    """Alpaca: `output` is a demonstration, and the ground truth of a row without an answer.

    The replies of LLaMA-Factory's `history` are trained on, too, as those of a conversation.
    """
    text = text_of(row, output)
    messages = read_instruction_messages(row)
    conversation = None
    if len(messages) > 1:
        reply = {"role": "assistant", "content": text}
        conversation = Conversation((*messages, reply), read_tools(row))
    return Problem(
        uid=uid_of(row),
        messages=messages,
        ground_truth=short_answer(row) or truth_of(text, output),
        data_source=data_source_of(row, stem),
        demonstrations=(text,),
        extra=unused_columns(row, *INSTRUCTION_COLUMNS, output, "ground_truth", "tools"),
        conversation=conversation,
    )


def read_chat(row: Row, stem: str, column: str = "messages") -> Problem:
    """A conversation: SFT trains on its assistant messages; RL answers the last of them."""
    messages = read_conversation(row, column)
    if messages[-1]["role"] == "user" and row.get("ground_truth") is not None:
        return read_prompt(row, stem, column)  # Tulu's RLVR sets
    if messages[-1]["role"] not in ROLES:
        raise RowError(
            f"{column} ends in a message of {messages[-1]['role']!r}, which is no role of a chat; "
            "the model's messages are those of the role assistant"
        )
    if messages[-1]["role"] != "assistant":
        raise RowError(
            f"{column} must end in an assistant message, not {messages[-1]['role']}; add it, or "
            f"read the messages as prompts (FILE:{column}=prompt)"
        )
    if len(messages) < 2:
        raise RowError(f"{column} must hold at least one message before the assistant's")
    return Problem(
        uid=uid_of(row),
        messages=without_weights(messages[:-1]),
        ground_truth=optional_truth(row),
        data_source=data_source_of(row, stem),
        demonstrations=text_of_only_message(messages[-1:]),
        extra=unused_columns(row, column, "ground_truth", "tools"),
        conversation=Conversation(messages, read_tools(row)),
    )


def read_text(row: Row, stem: str) -> Problem:
    """TRL's language modeling rows: SFT trains on the whole text; no other method reads them."""
    text = text_of(row, "text")
    return Problem(
        uid=uid_of(row),
        messages=user_turn(text),
        ground_truth="",
        data_source=data_source_of(row, stem),
        extra=unused_columns(row, "text"),
        conversation=Conversation((), text=text),
    )


def read_sharegpt(row: Row, stem: str, column: str = "conversations") -> Problem:
    return read_chat(row | {column: sharegpt_messages(row.get(column), column)}, stem, column)


def read_query_and_calls(row: Row, stem: str) -> Problem:
    """xLAM: `answers` are the tool calls that a query needs, as JSON text."""
    calls = {"from": "function_call", "value": row.get("answers")}
    turns = [{"role": "user", "content": text_of(row, "query")}, calls]
    return read_sharegpt({**row, "conversations": turns}, stem)


def with_conversation_column(row: Row, problem: Problem) -> Problem:
    """The problem of a question, with the row's conversation if that asks the question.

    So OpenR1-Math's and NuminaMath's `messages` are trained on, beside the answer as the truth.
    """
    is_question = len(problem.messages) == 1 and "reward_model" not in row
    if problem.conversation is not None or "chosen" in problem.extra or not is_question:
        return problem
    for column in ("messages", *SHAREGPT_COLUMNS):
        if not isinstance(row.get(column), list):
            continue
        try:
            chat = read_sharegpt(row, "", column)
        except RowError:
            continue
        asked = [message["content"] for message in chat.messages if message["role"] == "user"]
        question = problem.messages[-1]["content"].strip()
        if not chat.conversation or not asked or str(asked[0]).strip() != question:
            continue
        if len(asked) > 1:  # the answer is that of the first turn, which RL asks
            return replace(problem, conversation=chat.conversation)
        return replace(
            problem,
            messages=chat.messages,
            demonstrations=chat.demonstrations,
            conversation=chat.conversation,
        )
    return problem
