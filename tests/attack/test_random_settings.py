"""Random combinations of settings train two steps or are refused with exit code 2."""

from pathlib import Path

import preloaded
import pytest

SCRIPT = Path(__file__).with_name("random_settings.py")


def run_script(*options: str) -> str:
    """Run the script; return its output, and fail with it if a combination is wrong."""
    program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = preloaded.run(program, *options, timeout=3600)
    print(done.stdout[-10_000:])
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_some_combinations_train_or_are_refused():
    output = run_script("--seed", "0", "--count", "10", "--jobs", "1")
    assert "10 trained" in output and "0 wrong" in output


@pytest.mark.long
def test_2000_combinations_train_or_are_refused():
    output = run_script("--seed", "0", "--count", "2000", "--jobs", "2", "--once")
    tried = int(output.split(" combinations tried")[0].split()[-1])
    assert tried >= 2000


@pytest.mark.parametrize(
    ("code", "text", "wrong"),
    [
        (0, "Traceback (most recent call last)", True),
        (1, "postgrad: the run cannot go on", True),
        (-9, "", True),
        (2, "postgrad: one line", False),
        (2, "postgrad: one line\npostgrad: another", True),
        (2, "", True),
        (70, "", True),
    ],
)
def test_what_counts_as_wrong(tmp_path, code, text, wrong):
    from random_settings import verdict

    _, reason = verdict(code, text, tmp_path, parts_known=True)
    assert bool(reason) == wrong


@pytest.mark.parametrize(
    ("verifier", "wrong"),
    [("boxed", True), ("exact + 0.5*length", True), ("/a/mine.py:graded", False), ("", False)],
)
def test_late_stop_at_an_unknown_part_is_right_for_a_verifier_of_the_user_only(
    tmp_path, verifier, wrong
):
    from random_settings import parts_are_known, verdict

    arguments = ["gdpo", *([f"reward.verifier={verifier}"] if verifier else [])]
    line = "postgrad: method.reward_weights.no: the verifier reports no such part"
    _, reason = verdict(1, line, tmp_path, parts_are_known(arguments))
    assert bool(reason) == wrong
