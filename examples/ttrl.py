"""TTRL (Zuo et al. 2025) in one file: GRPO without ground truths, by a majority vote per group.

The answer that most responses of a group give is its label. A response with this answer has the
reward 1, any other 0. reward.verifier says how answers are extracted:

    postgrad train grpo method=examples/ttrl.py:Ttrl reward.verifier=math rollout.samples=16 \
        model.path=MODEL data.train=FILE
"""

from collections import Counter

from postgrad import Score, extract_answer
from postgrad.methods.grpo import Grpo


class Ttrl(Grpo):
    def scores_training_rows(self):
        return False  # no verifier scores them, so data.train needs no ground truths

    def check_problems(self, problems):
        super().check_problems(problems)
        for problem in problems:
            extract_answer("", problem, self.config.reward.verifier)  # or a ConfigError

    def score_texts(self, batch, problems, texts, step):
        verifier = self.config.reward.verifier
        answers = [
            extract_answer(text or "", problem, verifier)
            for text, problem in zip(texts, problems, strict=True)
        ]
        groups = batch.rows["group"].tolist()
        pairs = list(zip(groups, answers, strict=True))
        labels = {}
        for (group, answer), _ in Counter(pairs).most_common():
            if answer is not None:
                labels.setdefault(group, answer)
        rewards = [float(answer is not None and answer == labels[group]) for group, answer in pairs]
        batch.rows["answer_vote"] = answers
        step.metrics["ttrl/agreement"] = sum(rewards) / len(rewards)
        return [Score(reward) for reward in rewards]
