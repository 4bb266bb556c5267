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
- grading/: the built-in verifiers themselves.

May import sandbox, processes, config, problem and errors. It imports no torch, so that a child
process starts fast.
"""
