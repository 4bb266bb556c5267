"""The warning for rewards that rise while the validation accuracy does not."""

import pytest
from tiny_runs import NoteReporter, config_of

from postgrad.training.driver import train
from postgrad.training.guard import RewardWatch, answer_accuracy, is_suspicious
from postgrad.training.log import read_metrics

EVERY = 5  # steps between validations


def lines_of(rewards, accuracies) -> list[dict[str, float]]:
    """Return metrics.jsonl of a run that validates before the first and every EVERY steps."""
    lines = [{"step": 0, "validation/accuracy": accuracies[0]}]
    for step, reward in enumerate(rewards, 1):
        lines.append({"step": step, "reward/mean": reward})
        if step % EVERY == 0:
            lines.append({"step": step, "validation/accuracy": accuracies[step // EVERY]})
    return lines


def warnings_of(lines, num_answers=200) -> list[int]:
    """Return the steps at which a run with these lines warns."""
    watch = RewardWatch(num_answers, [])
    warned = []
    for line in lines:
        watch.add_step(line)
        if watch.add_validation(int(line["step"]), line)[1]:
            warned.append(line["step"])
    return warned


def noisy(start: float, end: float, num_steps: int) -> list[float]:
    """Return rewards on a line, with noise of 0.02 of both signs."""
    return [
        start + (end - start) * i / (num_steps - 1) + (0.02 if i % 2 else -0.02)
        for i in range(num_steps)
    ]


def test_a_rise_of_the_reward_alone_is_reported_once():
    lines = lines_of(noisy(0.2, 0.9, 25), [0.3, 0.31, 0.3, 0.3, 0.29, 0.28])
    assert warnings_of(lines) == [15]
    watch = RewardWatch(200, lines)
    metrics, text = watch.add_validation(30, {"validation/accuracy": 0.5})
    assert text == ""
    assert metrics == {}  # no training steps since the last validation


@pytest.mark.parametrize(
    ("rewards", "accuracies", "num_answers"),
    [
        (noisy(0.2, 0.9, 25), [0.2, 0.3, 0.5, 0.6, 0.7, 0.8], 200),  # both rise
        (noisy(0.5, 0.5, 25), [0.3, 0.3, 0.3, 0.3, 0.3, 0.2], 200),  # the reward does not rise
        (noisy(0.9, 0.2, 25), [0.3, 0.3, 0.3, 0.3, 0.2, 0.1], 200),  # both fall
        (noisy(0.40, 0.44, 25), [0.3, 0.3, 0.3, 0.3, 0.3, 0.3], 200),  # within the noise
        (noisy(0.2, 0.5, 25), [0.3, 0.3, 0.3, 0.3, 0.3, 0.3], 10),  # too few answers to tell
        (noisy(0.2, 0.9, 10), [0.3, 0.3, 0.3], 200),  # too few validations
    ],
)
def test_no_warning_without_evidence(rewards, accuracies, num_answers):
    assert warnings_of(lines_of(rewards, accuracies), num_answers) == []


def test_a_resumed_run_neither_forgets_nor_repeats_the_warning():
    lines = lines_of(noisy(0.2, 0.9, 25), [0.3, 0.31, 0.3, 0.3, 0.29, 0.28])
    before = [line for line in lines if line["step"] <= 15]
    assert RewardWatch(200, before).warned
    resumed = RewardWatch(200, before)
    texts = []
    for line in lines[len(before) :]:
        resumed.add_step(line)
        texts.append(resumed.add_validation(int(line["step"]), line)[1])
    assert not any(texts)


def test_the_right_answers_count_where_the_reward_has_other_terms():
    metrics = {"validation/accuracy": 1.4, "validation/part/math.answer": 0.3}
    assert answer_accuracy(metrics) == 0.3
    assert answer_accuracy({"validation/accuracy": 0.4, "validation/part/format": 1.0}) == 0.4
    assert answer_accuracy({"validation/loss": 2.0}) is None


def test_numbers_worked_out_by_hand():
    """first 0.1, 0.3: mean 0.2, variance 0.02; last 0.7, 0.9: mean 0.8, variance 0.02.

    Step error sqrt(0.01 + 0.01) = 0.1414, times 4 = 0.566, below the rise of 0.6. Accuracy 0.5
    twice: sqrt(0.5 / n), times 2: 0.6 at n = 5.56.
    """
    rewards = ([0.1, 0.3], [0.7, 0.9])
    assert is_suspicious(*rewards, 0.5, 0.5, 6)
    assert not is_suspicious(*rewards, 0.5, 0.5, 5)
    assert not is_suspicious(*rewards, 0.5, 0.51, 6)
    assert not is_suspicious([0.0, 0.4], [0.6, 1.0], 0.5, 0.5, 6)  # the steps are noisier


def test_a_run_writes_the_metrics_and_the_warning(tiny, tmp_path, monkeypatch):
    """The reward is the number of the call, and the validation is always wrong."""
    from postgrad.training import driver, validation

    monkeypatch.setattr(validation, "validate_sets", lambda *_: {"validation/accuracy": 0.0})
    monkeypatch.setattr(
        driver,
        "batch_metrics",
        lambda *batches: {**batch_metrics(*batches), "reward/mean": next(rising)},
    )
    from postgrad.training.log import batch_metrics

    rising = iter(range(100))
    config = config_of(
        "grpo",
        tiny,
        "data.train=arithmetic:1",
        "data.validation=arithmetic:1",
        "training.steps=15",
        f"training.validate_every={EVERY}",
        "training.problems_per_step=1",
        "training.max_flat_steps=100",
        "rollout.samples=2",
        "rollout.max_response_tokens=2",
        f"runs={tmp_path}",
        "name=run",
    )
    reporter = NoteReporter()
    train(config, reporter)
    (warning,) = [note for note in reporter.notes if note.startswith("warning:")]
    assert "since step 0 the training reward rose by 10" in warning
    last = [line for line in read_metrics(tmp_path / "run") if "watch/suspicious" in line]
    assert [line["watch/suspicious"] for line in last] == [1.0]
    assert last[0]["watch/reward_rise"] == 10.0
    assert last[0]["watch/accuracy_rise"] == 0.0
