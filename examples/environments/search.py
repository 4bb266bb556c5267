"""Search over a local corpus: the policy asks a search tool, then answers (as in Search-R1).

    postgrad train grpo data.train=questions.jsonl data.prompt_style=own \
        environment=examples/environments/search.py:Search \
        environment.options.corpus=corpus.jsonl 'reward.verifier="search + environment"'

The corpus is a .jsonl file with `title` and `text`, or a .txt file with one passage per paragraph.
Passages are ranked by BM25. The reward of the verifier `search` is for the answer in <answer>
tags; the environment subtracts a little for each search and adds a little if a search found an
accepted answer, so the reward comes from the tool, too.
"""

import json
import math
import re
from collections import Counter
from functools import cache
from pathlib import Path

K1 = 1.2  # BM25: how fast further occurrences of a word stop counting
B = 0.75  # BM25: how much long passages are discounted
INSTRUCTION = "Search before you answer. Give the final answer between <answer> and </answer>."


class Corpus:
    """Passages with an inverted index."""

    def __init__(self, path: str) -> None:
        self.passages = read_passages(Path(path))
        self.counts = [Counter(words(passage)) for passage in self.passages]
        self.lengths = [sum(count.values()) for count in self.counts]
        self.mean_length = sum(self.lengths) / max(1, len(self.lengths))
        self.where: dict[str, list[int]] = {}
        for number, count in enumerate(self.counts):
            for word in count:
                self.where.setdefault(word, []).append(number)

    def find(self, query: str, count: int) -> list[str]:
        """Return the best passages, the best first; none if no word of the query occurs."""
        scores: Counter[int] = Counter()
        for word in set(words(query)):
            found = self.where.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number in found:
                times = self.counts[number][word]
                length = 1 - B + B * self.lengths[number] / self.mean_length
                scores[number] += rarity * times * (K1 + 1) / (times + K1 * length)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
        return [self.passages[number] for number in best]


class Search:
    """The tool `search`, and a reward for its use."""

    def __init__(
        self, corpus: str, passages: int = 3, cost: float = 0.02, found: float = 0.1
    ) -> None:
        self.corpus = load_corpus(corpus)
        self.passages = passages
        self.cost = cost
        self.found = found

    def reset(self, problem) -> str:
        self.answers = accepted_answers(problem.ground_truth)
        self.results: list[str] = []
        return INSTRUCTION

    def search(self, query: str) -> str:
        """Search the library for passages.

        Args:
            query: a few words to look for
        """
        passages = self.corpus.find(query, self.passages)
        self.results.append("\n".join(passages))
        return "\n\n".join(passages) or "Nothing was found."

    def score(self) -> dict[str, float]:
        texts = " ".join(self.results).lower()
        is_found = float(any(answer.lower() in texts for answer in self.answers))
        value = self.found * is_found - self.cost * len(self.results)
        return {"score": value, "found": is_found, "searches": float(len(self.results))}

    def get_state(self) -> dict[str, int]:
        return {"searches": len(self.results)}


@cache
def load_corpus(path: str) -> Corpus:
    """Return the corpus of a file; all trajectories of a process share it."""
    return Corpus(path)


def read_passages(file: Path) -> list[str]:
    text = file.read_text()
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        return [f"{row.get('title', '')}\n{row['text']}".strip() for row in rows]
    return [passage.strip() for passage in re.split(r"\n\s*\n", text) if passage.strip()]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def accepted_answers(truth: str) -> list[str]:
    """Return the answers of a ground truth: a text, or a JSON list of texts."""
    try:
        found = json.loads(truth)
    except ValueError:
        found = truth
    texts = found if isinstance(found, list) else [truth]
    return [str(text) for text in texts if str(text)]
