"""Verifiers: score one response against one problem, as a Score with named parts or a Failure.

- port.py: what a verifier is, and how its return value becomes a Score.
- table.py: the built-in verifiers by name, and the one for each data source.
- loading.py: functions by path, `package.module:function` or `file.py:function`.
- functions.py: rewards given as Python objects; trl_rewards.py, trainer_state.py, reward_log.py:
  reward functions of TRL.
- combine.py: weighted sums of verifiers.
- lookup.py: from the text of `reward.verifier` to a verifier.
- scorer.py: the Scorer of the score stage.
- pool.py, child.py: verifiers in child processes that can be killed.
- answers.py: finding the answer in a response; the verifiers that need nothing else.
- choice.py: multiple choice.
- equality.py, numbers.py, closed_form.py: whether two answers are equal, by text and by number.
- math.py: equality by computer algebra.
- r1_zero.py: rewards of the CS336 assignment, fast and slow.
- form.py: format and length.
- code.py: programs against tests, in the sandbox.

May import sandbox, processes, config, problem and errors. It imports no torch, so that a child
process starts fast; only child processes import math.py, r1_zero.py and code.py.
"""
