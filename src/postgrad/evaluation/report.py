"""A summary for people: a table for the terminal, and report.md, which says nothing that the clock decides."""

from typing import Any

MANY_CUT_OFF = 0.1
CLASS_NAMES = {
    "11": "form and answer right",
    "10": "form alone",
    "01": "answer alone",
    "00": "neither",
}


def table(summary: dict[str, Any]) -> str:
    """Aligned columns, one set a line."""
    return aligned(_columns(summary))


def hints(summary: dict[str, Any]) -> list[str]:
    """What a reader of the table should know before believing it."""
    limit, way = (
        summary["settings"]["rollout"]["max_response_tokens"],
        summary["settings"]["data"]["overlong"],
    )
    told = [
        f"{name}: {result['prompts_cut']} of {result['problems']} prompts were too long and cut (overlong={way})"
        for name, result in summary["sets"].items()
        if result.get("prompts_cut")
    ]
    return told + [
        f"{name}: {_percent(result['truncated'])} of the responses were cut off at max_response_tokens={limit}; raise it to let them end"
        for name, result in summary["sets"].items()
        if result["truncated"] > MANY_CUT_OFF
    ]


def aligned(rows: list[list[str]]) -> str:
    """Text columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown(summary: dict[str, Any]) -> str:
    """report.md"""
    settings = summary["settings"]
    rollout, model = settings["rollout"], settings["model"]
    how = (
        "greedy"
        if not rollout["temperature"]
        else f"temperature {rollout['temperature']:g}, top_p {rollout['top_p']:g}"
    )
    lines = [
        f"# Evaluation of {summary['model']}",
        "",
        f"Model `{model['path']}` ({model['dtype']} on {model['device']}), engine {rollout['engine']}, {how}, "
        f"{rollout['samples']} sample{'s' if rollout['samples'] > 1 else ''} of at most {rollout['max_response_tokens']} tokens "
        f"for each problem, seed {settings['seed']}, verifier {settings['reward']['verifier']}.",
        "",
        *_markdown_table(_columns(summary)),
        "",
        f"In brackets: {summary['interval']}. Responses that could not be judged count as wrong; in a win rate they do not count.",
    ]
    for name, result in summary["sets"].items():
        lines += ["", f"## {name}", "", *_details(result)]
    return "\n".join(lines) + "\n"


def _columns(summary: dict[str, Any]) -> list[list[str]]:
    results = summary["sets"]
    ks = sorted({int(k) for result in results.values() for k in result["pass"]} - {1})
    with_majority = [k for k in ks if any(result["maj"] for result in results.values())]
    samples = max(result["samples"] for result in results.values())
    compared = all("win" in result for result in results.values())  # an evaluation has one verifier
    rows = [
        [
            "set",
            "problems",
            *(("win rate", "length-controlled") if compared else (f"avg@{samples}",)),
        ]
    ]
    rows[0] += [
        *(f"pass@{k}" for k in ks),
        *(f"maj@{k}" for k in with_majority[-1:]),
        "length",
        "cut off",
        "failed",
    ]
    for name, result in results.items():
        means = (
            [result["win"][key] for key in ("rate", "length_controlled")]
            if compared
            else [result["avg"]]
        )
        row = [
            name,
            str(result["problems"]),
            *(_bracketed(mean) if mean else "-" for mean in means),
        ]
        row += [_percent(result["pass"][str(k)]["value"]) for k in ks]
        row += [
            _percent(result["maj"][str(k)]["value"]) if result["maj"] else "-"
            for k in with_majority[-1:]
        ]
        row += [
            f"{result['length']['mean']:.0f}",
            _percent(result["truncated"]),
            str(sum(result["failures"].values())),
        ]
        rows.append(row)
    return rows


def _details(result: dict[str, Any]) -> list[str]:
    passed = {k: value for k, value in result["pass"].items() if k != "1" or "win" not in result}
    lines = [f"- pass@{k}: {_bracketed(value)}" for k, value in passed.items()]
    lines += [f"- maj@{k}: {_bracketed(value)}" for k, value in (result["maj"] or {}).items()]
    if result["classes"]:
        total = sum(result["classes"].values())
        lines += [
            f"- {CLASS_NAMES[name]} ({name}): {n} of {total}, {_percent(n / total)}"
            for name, n in result["classes"].items()
        ]
    lines += _win_details(result["win"], result["parts"]) if "win" in result else []
    length = result["length"]
    shown = {"all": length["mean"], "right": length["right"], "wrong": length["wrong"]}
    means = ", ".join(f"{name} {value:.1f}" for name, value in shown.items() if value is not None)
    spread = f"median {length['median']:g}, longest {length['max']}"
    lines.append(
        f"- tokens of a response: {means}; {spread}; cut off {_percent(result['truncated'])}"
    )
    if result["failures"]:
        lines.append(
            "- could not be judged: "
            + ", ".join(f"{n} {kind}" for kind, n in result["failures"].items())
        )
    if result.get("dropped"):
        lines.append(f"- left out because their prompts are too long: {result['dropped']} problems")
    if result.get("prompts_cut"):
        lines.append(
            f"- answered with prompts that were cut, because they are too long: {result['prompts_cut']} problems"
        )
    for name, source in result.get("sources", {}).items():
        lines.append(f"- of {name}: {_bracketed(source['avg'])} ({source['problems']} problems)")
    if "mean_of_sources" in result:
        lines.append(f"- mean of the sources, unweighted: {_percent(result['mean_of_sources'])}")
    return lines


def _win_details(win: dict[str, Any], parts: dict[str, float]) -> list[str]:
    """Against the reference's answers. The official tool writes a preference of 1 where the reference is better, 2 where ours is."""
    lines = [
        f"- against the reference: {win['won']} won, {win['tied']} tied, {win['lost']} lost, {win['failed']} without a verdict"
    ]
    if win["rate"]:
        lines.append(
            f"- win rate: {_bracketed(win['rate'])} over {win['problems']} problems; a tie is half a win"
        )
        controlled = (
            _bracketed(win["length_controlled"])
            if win["length_controlled"]
            else "cannot be told from these lengths"
        )
        lines.append(f"- length-controlled win rate: {controlled}")
        own, reference = win["characters"]["own"], win["characters"]["reference"]
        lines.append(f"- characters of an answer: {own:.0f}, of the reference's {reference:.0f}")
    if "chose_first" in parts:
        lines.append(
            f"- the judge preferred the answer that it saw first in {_percent(parts['chose_first'])} of its verdicts"
        )
    return lines


def _markdown_table(rows: list[list[str]]) -> list[str]:
    head, *body = rows
    return [
        "| " + " | ".join(row) + " |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _bracketed(value: dict[str, float]) -> str:
    return f"{_percent(value['value'])} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
