"""Tables for the terminal and report.md, from the summary of an evaluation.

report.md contains no times, so that repeating an evaluation gives the same file.
"""

from typing import Any

MAX_TRUNCATED = 0.1  # fraction of truncated responses above which a warning is shown
CLASS_NAMES = {
    "11": "format and answer right",
    "10": "format right, answer wrong",
    "01": "answer right, format wrong",
    "00": "both wrong",
}


def table(summary: dict[str, Any]) -> str:
    """Return the summary as aligned columns, one line per set."""
    return align(_table_rows(summary))


def warnings(summary: dict[str, Any]) -> list[str]:
    """Return one line per problem of the evaluation that makes its numbers misleading."""
    settings = summary["settings"]
    if "rollout" not in settings:  # scored from a file: nothing was generated
        return []
    limit = settings["rollout"]["max_response_tokens"]
    overlong = settings["data"]["overlong"]
    lines: list[str] = []
    for name, result in summary["sets"].items():
        if result.get("prompts_truncated"):
            lines.append(
                f"{name}: {result['prompts_truncated']} of {result['problems']} prompts were "
                f"too long and truncated (overlong={overlong})"
            )
    for name, result in summary["sets"].items():
        if result["truncated"] and result["truncated"] > MAX_TRUNCATED:
            lines.append(
                f"{name}: {percent(result['truncated'])} of the responses were truncated at "
                f"max_response_tokens={limit}; raise it"
            )
    return lines


def align(rows: list[list[str]]) -> str:
    """Return rows as text columns: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(summary: dict[str, Any]) -> str:
    """Return the text of report.md."""
    lines = [
        f"# Evaluation of {summary['model']}",
        "",
        _describe(summary["settings"]),
        "",
        *markdown_table(_table_rows(summary)),
        "",
        f"In brackets: {summary['interval']}. Responses that could not be scored count as wrong; "
        "a win rate leaves them out.",
    ]
    if any("win" not in result and _is_graded(result) for result in summary["sets"].values()):
        pass_score = summary["settings"]["reward"]["pass_score"]
        lines[-1] += f" A response is right if its score is at least {pass_score:g} (pass_score)."
    for name, result in summary["sets"].items():
        lines += ["", f"## {name}", "", *_details(result)]
    return "\n".join(lines) + "\n"


def _describe(settings: dict[str, Any]) -> str:
    """Return a sentence about the model and the sampling, or about the file of responses."""
    verifier = f"verifier {settings['reward']['verifier']}."
    if "rollout" not in settings:
        return f"Responses of {', '.join(settings['data']['files'])}, {verifier}"
    rollout = settings["rollout"]
    model = settings["model"]
    sampling = "greedy"
    if rollout["temperature"]:
        sampling = f"temperature {rollout['temperature']:g}, top_p {rollout['top_p']:g}"
    plural = "s" if rollout["samples"] > 1 else ""
    return (
        f"Model `{model['path']}` ({model['dtype']} on {model['device']}), "
        f"engine {rollout['engine']}, {sampling}, {rollout['samples']} sample{plural} per problem "
        f"of at most {rollout['max_response_tokens']} tokens, seed {settings['seed']}, {verifier}"
    )


def _table_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Return the header and one row per set."""
    results = summary["sets"]
    pass_ks = sorted({int(k) for result in results.values() for k in result["pass"]} - {1})
    has_majority = any(result["maj"] for result in results.values())
    maj_ks = pass_ks[-1:] if has_majority else []
    samples = sorted({result["samples"] for result in results.values()})
    average = f"avg@{samples[0]}" if len(samples) == 1 else "avg"
    is_pairwise = all("win" in result for result in results.values())
    has_score = not is_pairwise and any(map(_is_graded, results.values()))
    header = ["set", "problems"]
    header += ["win rate", "length-controlled"] if is_pairwise else [average]
    header += ["score"] if has_score else []
    header += [f"pass@{k}" for k in pass_ks]
    header += [f"maj@{k}" for k in maj_ks]
    header += ["length", "truncated", "failed"]
    rows = [header]
    for name, result in results.items():
        row = [name, str(result["problems"])]
        if is_pairwise:
            row.append(_with_interval(result["win"]["rate"]))
            row.append(_with_interval(result["win"]["length_controlled"]))
        else:
            row.append(_with_interval(result["avg"]))
        if has_score:
            row.append(f"{result['score']:.3f}")
        row += [percent(_value_at(result["pass"], k)) for k in pass_ks]
        row += [percent(_value_at(result["maj"], k)) for k in maj_ks]
        row.append(f"{result['length']['mean']:.0f}")
        row.append(percent(result["truncated"]))
        row.append(str(sum(result["failures"].values())))
        rows.append(row)
    return rows


def _is_graded(result: dict[str, Any]) -> bool:
    """Return whether the mean score says more than the share of right responses."""
    return abs(result["score"] - result["avg"]["value"]) > 1e-9


def _value_at(by_k: dict[str, Any] | None, k: int) -> float | None:
    """Return the value of pass@k or maj@k; None if the set does not have it."""
    return (by_k or {}).get(str(k), {}).get("value")


def _details(result: dict[str, Any]) -> list[str]:
    """Return the list items of one set in report.md."""
    lines: list[str] = []
    for k, value in result["pass"].items():
        if k != "1" or "win" not in result:
            lines.append(f"- pass@{k}: {_with_interval(value)}")
    for k, value in (result["maj"] or {}).items():
        lines.append(f"- maj@{k}: {_with_interval(value)}")
    if result["classes"]:
        total = sum(result["classes"].values())
        for name, count in result["classes"].items():
            share = percent(count / total)
            lines.append(f"- {CLASS_NAMES[name]} ({name}): {count} of {total}, {share}")
    if "win" in result:
        lines += _win_details(result["win"], result["parts"])
    lines.append(_length_details(result))
    if result["failures"]:
        counts = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items())
        lines.append(f"- could not be scored: {counts}")
    if result.get("dropped"):
        lines.append(f"- dropped because the prompt is too long: {result['dropped']} problems")
    if result.get("prompts_truncated"):
        lines.append(
            "- answered with a truncated prompt because it is too long: "
            f"{result['prompts_truncated']} problems"
        )
    for name, source in result.get("sources", {}).items():
        avg = _with_interval(source["avg"])
        lines.append(f"- source {name}: {avg} ({source['problems']} problems)")
    if "mean_of_sources" in result:
        lines.append(f"- unweighted mean of the sources: {percent(result['mean_of_sources'])}")
    return lines


def _length_details(result: dict[str, Any]) -> str:
    length = result["length"]
    unit = result.get("length_unit", "tokens")
    means = {"all": length["mean"], "right": length["right"], "wrong": length["wrong"]}
    shown = [f"{name} {value:.1f}" for name, value in means.items() if value is not None]
    return (
        f"- {unit} per response: {', '.join(shown)}; median {length['median']:g}, "
        f"maximum {length['max']}; truncated {percent(result['truncated'])}"
    )


def _win_details(win: dict[str, Any], parts: dict[str, float]) -> list[str]:
    lines = [
        f"- against the reference: {win['won']} won, {win['tied']} tied, {win['lost']} lost, "
        f"{win['failed']} without a verdict"
    ]
    if win["rate"]:
        lines.append(
            f"- win rate: {_with_interval(win['rate'])} over {win['problems']} problems; "
            "a tie is half a win"
        )
        if win["length_controlled"]:
            controlled = _with_interval(win["length_controlled"])
        else:
            controlled = "undetermined, all length differences are equal"
        lines.append(f"- length-controlled win rate: {controlled}")
        own = win["characters"]["own"]
        reference = win["characters"]["reference"]
        lines.append(f"- characters per answer: {own:.0f}, of the reference {reference:.0f}")
    if "chose_first" in parts:
        lines.append(
            "- the judge preferred the answer it was shown first in "
            f"{percent(parts['chose_first'])} of its verdicts"
        )
    return lines


def markdown_table(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table; the first row is its header."""
    header, *body = rows
    alignment = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (header, alignment, *body)]


def percent(value: float | None) -> str:
    """Return a fraction as a percentage with one decimal; "-" if it is unknown."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}%"


def _with_interval(mean: dict[str, float] | None) -> str:
    """Return a mean with its interval in brackets; "-" if there is none."""
    if not mean:
        return "-"
    return f"{percent(mean['value'])} [{100 * mean['low']:.1f}, {100 * mean['high']:.1f}]"
