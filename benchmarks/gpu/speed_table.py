"""Write the tables of docs/results.md and NOTES.md from the result files of the speed benchmarks.

    python benchmarks/gpu/speed_table.py speed.jsonl [more.jsonl] --write
    python benchmarks/gpu/speed_table.py speed.jsonl                     # only prints them

A table stands between `<!-- speed: NAME -->` and `<!-- end of speed -->`. One without any result
in the files keeps what the page has. Every figure comes from a line of the files, except those that
other projects published, which are marked so. Limits are computed: bytes at 4.3 TB/s for a
rollout, operations at 790 TFLOP/s for an update.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from compare_common import ARITHMETIC, BANDWIDTH
from fit_check import PROMPT, ROWS
from fit_check import Row as Work
from rows import Row, read_rows, rollout_name, step_name
from sizes import SHAPES, vocabulary_size

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "results.md", ROOT / "benchmarks" / "NOTES.md")
HEAD_DIM = 128
PUBLISHED = {  # row of fit_check.py: (tokens per second, GiB) of prime-rl on an H100
    "row-0.6b-16k": (11_900, 12.5),
    "row-0.6b-65k": (10_100, 19.6),
    "row-4b-lora-16k": (6_200, 23.3),
    "row-4b-lora-65k": (4_200, 42.0),
}
LONGEST = "Unsloth published 110,000 tokens on 80 GB"
PEERS = {  # by their names in the result files
    "vllm": "vLLM",
    "vllm without log-probs": "vLLM without log-probs",
    "trl with vllm": "TRL with vLLM",
    "unsloth with vllm": "Unsloth with vLLM",
}


class Results:
    """The lines of all files, found by what was measured and who measured it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def find(self, name: str, system: str = "postgrad") -> list[Row]:
        """Return the lines with figures, or those that failed if there are no others."""
        found = [r for r in self.rows if r.get("name") == name and r.get("system") == system]
        return [row for row in found if "failed" not in row] or found[-1:]

    def starting(self, prefix: str) -> list[Row]:
        """Return the lines with figures whose name starts so."""
        return [row for row in self.rows if row["name"].startswith(prefix) and "failed" not in row]


# ---- limits


def parameters(shape: str) -> int:
    """Return the weights of a shape, the embedding counted once if it is the head, too."""
    hidden, intermediate, layers, heads, key_heads, tied = SHAPES[shape]
    block = hidden * HEAD_DIM * (2 * heads + 2 * key_heads) + 3 * hidden * intermediate
    return layers * block + (1 if tied else 2) * vocabulary_size(shape) * hidden


def rollout_limit_s(work: Work) -> float:
    """Return the seconds to read the weights, and each row's cache, once per token."""
    _, _, layers, _, key_heads, _ = SHAPES[work.shape]
    token_cache = 4 * layers * key_heads * HEAD_DIM
    rows = work.problems * work.samples
    own = rows * work.tokens / 2
    shared = work.problems * PROMPT
    bytes_per_step = 2 * parameters(work.shape) + token_cache * (own + shared)
    return work.tokens * bytes_per_step / BANDWIDTH


def update_limit_s(work: Work) -> float:
    """Return the seconds of forward and backward products and attention, nothing recomputed."""
    _, _, layers, heads, _, _ = SHAPES[work.shape]
    tokens = work.problems * (PROMPT + work.samples * work.tokens)
    pairs = work.problems * work.samples * (PROMPT + work.tokens / 2) * work.tokens
    forward_attention = 4 * pairs * heads * HEAD_DIM * layers
    is_lora = any("lora.rank" in word for word in work.overrides)
    products = (4 if is_lora else 6) * parameters(work.shape) * tokens
    return (products + 3.5 * forward_attention) / ARITHMETIC


# ---- cells


def failure(rows: Sequence[Row]) -> str:
    """Return why there is no figure."""
    if not rows:
        return "not measured"
    return f"failed: {str(rows[-1]['failed']).strip().splitlines()[-1][:80]}"


def postgrad_cell(work: Work, row: Row) -> str:
    """Return Postgrad's figures of a row of fit_check.py."""
    result = row["result"]
    memory = f"{result['memory_gib']:.1f} GiB"
    if row.get("shared"):
        return f"{memory}; others used the GPU, so its time says nothing"
    if work.work == "step":
        measured = row["measured"]
        stages = f"{measured['sample_s']:.1f} sampling, {measured['update_s']:.1f} update"
        return f"{result['step_s']:.1f} s ({stages}), {memory}"
    return f"{result['tokens_per_second']:,.0f} tokens/s, {memory}"


def limit_cell(work: Work) -> str:
    """Return what the GPU's bandwidth and arithmetic allow at most."""
    rows = work.problems * work.samples
    if work.work == "rollout":
        return f"{rows * work.tokens / rollout_limit_s(work):,.0f} tokens/s"
    if work.work == "step":
        return f"{rollout_limit_s(work) + update_limit_s(work):.1f} s"
    tokens = work.problems * (PROMPT + work.samples * work.tokens)
    return f"{tokens / update_limit_s(work):,.0f} tokens/s"


def peer_cells(key: str, work: Work, results: Results, ours: Row | None) -> str:
    """Return the peers' figures and how many times as fast Postgrad is."""
    cells: list[str] = []
    if key in PUBLISHED:
        speed, memory = PUBLISHED[key]
        ratio = _ratio(ours["result"]["tokens_per_second"] / speed if ours else None)
        cells.append(f"prime-rl on an H100 (published): {speed:,} tokens/s, {memory} GiB{ratio}")
    is_lora = any("lora.rank" in word for word in work.overrides)
    for system in PEERS:
        if system.startswith("unsloth") != is_lora and work.work == "step":
            continue
        name = step_name(work.shape, work.problems, work.samples, work.tokens)
        if work.work == "rollout":
            rows = work.problems * work.samples
            name = rollout_name(work.shape, rows, work.samples, work.tokens)
        found = results.find(name, system) if work.work != "update" else []
        if not found:
            continue
        name = PEERS[system]
        if version := found[-1].get("version"):
            program, *rest = name.split(" ", 1)
            name = " ".join([program, ".".join(str(version).split(".")[:2]), *rest])
        cells.append(f"{name}: {_peer_figures(found, ours)}")
    return "; ".join(cells) or "not measured"


def _peer_figures(found: Sequence[Row], ours: Row | None) -> str:
    if "failed" in found[0]:
        return failure(found)
    if "tokens_per_second" in found[0]:
        speed = max(row["tokens_per_second"] for row in found)
        ratio = _ratio(ours["result"]["tokens_per_second"] / speed if ours else None)
        return f"{speed:,.0f} tokens/s{ratio}"
    later = [row for row in found if row["step"] > 1]  # the first step may compile
    best = min(later or found, key=lambda row: row["step_s"])
    ratio = _ratio(best["step_s"] / ours["result"]["step_s"] if ours else None)
    memory = f", {best['memory_gib']:.1f} GiB" if "memory_gib" in best else ""
    first = "" if later else " (its first step)"
    return f"{best['step_s']:.1f} s{first}{memory}{ratio}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f" (ratio {value:.2f})"


# ---- tables


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; "" if it has no rows."""
    if not rows:
        return ""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def describe(work: Work) -> str:
    """Return the first cell of a row."""
    size = f"{work.problems} x {work.samples} x {work.tokens:,}"
    if work.work == "update" and work.problems * work.samples == 1:
        size = f"one row of {PROMPT + work.tokens:,} tokens"
    words = [word.split(".", 1)[-1] for word in work.overrides]
    kind = {"rollout": "rollout with log-probs", "update": "training", "step": "GRPO step"}
    return ", ".join([kind[work.work], work.shape.upper(), size, *words])


def sizes_table(results: Results) -> str:
    """Return Postgrad's figures beside the limit and the peers'."""
    rows: list[list[str]] = []
    for key, work in ROWS.items():
        found = results.find(work.name)
        has_peer = peer_cells(key, work, results, None) != "not measured"
        if not found and not (has_peer and key not in PUBLISHED):
            continue
        ours = found[-1] if found and "failed" not in found[-1] else None
        cell = postgrad_cell(work, ours) if ours else failure(found)
        peers = peer_cells(key, work, results, ours)
        if key.startswith("row-8b-4bit"):
            peers = LONGEST
        rows.append([describe(work), cell, limit_cell(work), peers])
    return markdown(("work", "Postgrad", "limit", "others (ratio: Postgrad is faster by)"), rows)


def estimates_table(results: Results) -> str:
    """Return estimated and measured memory and seconds of every row."""
    rows: list[list[str]] = []
    for work in ROWS.values():
        found = results.find(work.name)
        if not found or "failed" in found[-1]:
            continue
        cells = [describe(work)]
        for key in ("memory_gib", "sample_s", "update_s"):
            estimated = found[-1]["estimated"].get(key)
            measured = found[-1]["measured"].get(key)
            is_time = key != "memory_gib"
            if not estimated or not measured or (is_time and found[-1].get("shared")):
                cells.append("-")
                continue
            cells.append(
                f"{estimated:.1f} / {measured:.1f} ({100 * (estimated / measured - 1):+.0f}%)"
            )
        rows.append(cells)
    columns = ("work", "GiB, estimated / measured", "seconds of sampling", "seconds of the update")
    return markdown(columns, rows)


def longest_table(results: Results) -> str:
    """Return the long rows that trained, and the longest ones that a search found."""
    rows: list[list[str]] = []
    for key, work in ROWS.items():
        found = results.find(work.name)
        if not key.startswith("row-") or not found or "failed" in found[-1]:
            continue
        tokens = f"{PROMPT + work.tokens:,}"
        rows.append([key.removeprefix("row-"), tokens, "-", _memory(found[-1]["result"])])
    for row in results.starting("longest row "):
        case = row["name"].removeprefix("longest row ")
        bound = f"{row['fails_at']:,}" if row.get("fails_at") else "-"
        rows.append([case, f"{row['longest']:,}", bound, _memory(row)])
    return markdown(("case", "tokens that train", "tokens that do not", "memory"), rows)


def _memory(figures: Row) -> str:
    memory = figures.get("memory_gib")
    return f"{memory:.1f} GiB" if memory else "-"


def low_memory_table(results: Results) -> str:
    """Return the losses of each memory-saving option beside full fine-tuning."""
    rows: list[list[str]] = []
    for row in results.starting("low memory "):
        losses = row["loss"]
        shown = [losses[0], losses[len(losses) // 4], losses[len(losses) // 2], losses[-1]]
        seconds = f"{row['step_s']:.2f} s" if row.get("alone") else "-"
        name = row["name"].removeprefix("low memory ")
        cells = [name, *(f"{loss:.3f}" for loss in shown), f"{row['memory_gib']:.1f} GiB", seconds]
        rows.append(cells)
    columns = ("run", "first loss", "1/4", "1/2", "last", "memory", "seconds per step")
    return markdown(columns, rows)


def serve_table(results: Results) -> str:
    """Return requests and latencies of the servers."""
    rows: list[list[str]] = []
    columns = ("requests/s", "tokens/s", "tokens each", "first token p50", "first token p99")
    columns = (*columns, "response p50", "response p99")
    for row in results.starting("serve "):
        figures = row["figures"]
        load = re.sub("^1 clients", "1 client", row["name"].removeprefix("serve "))
        cells = [load, row["system"], f"{figures['failed']:.0f}"]
        cells += [f"{figures[c]:,.1f}" if c in figures else "-" for c in columns[:1]]
        cells += [f"{figures[c]:,.0f}" if c in figures else "-" for c in columns[1:]]
        rows.append(cells)
    order = {row[0]: number for number, row in enumerate(rows[::-1])}
    rows.sort(key=lambda row: (-order[row[0]], row[1]))
    return markdown(("load", "server", "failed", *columns), rows)


def small_table(results: Results) -> str:
    """Return the figures of compare.py at 135M parameters."""
    works: dict[str, dict[str, Row]] = {}
    for row in results.starting("135M "):
        if row.get("work"):
            works.setdefault(row["work"], {})[row["system"]] = row
    rows: list[list[str]] = []
    for work, systems in works.items():
        ours = systems.pop("postgrad", None)
        others = [f"{system}: {_small(row)}" for system, row in systems.items()]
        rows.append([work, _small(ours) if ours else "not measured", "; ".join(others) or "-"])
    return markdown(("work", "Postgrad", "others"), rows)


def _small(row: Row) -> str:
    cells: list[str] = []
    if "tokens_per_second" in row and "seconds" not in row:
        cells.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    for key, form in (
        ("seconds", "{:.2f} s"),
        ("times_as_fast", "{:.1f} times as fast"),
        ("steps", "{} steps"),
        ("peak_gib", "{:.1f} GiB"),
        ("gap_max", "largest gap {:.1g} nats"),
    ):
        if key in row:
            cells.append(form.format(row[key]))
    return ", ".join(cells)


TABLES: dict[str, Callable[[Results], str]] = {
    "sizes": sizes_table,
    "estimates": estimates_table,
    "longest": longest_table,
    "low memory": low_memory_table,
    "serve": serve_table,
    "135M": small_table,
}


def write_tables(page: str, results: Results) -> str:
    """Return the page with those of its tables that have results."""
    for name, make in TABLES.items():
        table = make(results)
        pattern = rf"(<!-- speed: {name} -->\n).*?(\n<!-- end of speed -->)"
        if table:
            page = re.sub(pattern, lambda m: m[1] + table + m[2], page, flags=re.DOTALL)  # noqa: B023
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("files", type=Path, nargs="+", help="results of the benchmarks")
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    args = parser.parse_args()
    results = Results(read_rows(args.files))
    if not args.write:
        for name, make in TABLES.items():
            print(f"## {name}\n\n{make(results) or 'no results'}\n")
        return
    for page in PAGES:
        page.write_text(write_tables(page.read_text(), results))


if __name__ == "__main__":
    main()
