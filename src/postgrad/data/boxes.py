"""The boxed answer of a worked solution."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def last_box(text: str) -> str:
    """The content of the last \\boxed or \\fbox of a solution; "" if there is none."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return ""
    rest = text[boxes[-1].end() :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split("\n")[0].strip()
    depth = 0
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[1 : match.start()].strip()
    return ""
