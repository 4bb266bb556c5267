"""Verifiers: score one response against one problem, as a Score with named parts or a Failure.

- port.py: what a verifier is, and how its return value becomes a Score.
- table.py: the built-in verifiers by name, and the one for each data source.
- expression.py: the sum in `reward.verifier`, parsed into terms.
- loading.py: from a name or path to a verifier; functions with the arguments of verl and CS336.
- functions.py: rewards that are Python objects; trl.py: reward functions of TRL.
- scorer.py: the Scorer of the score stage.
- pool.py, child.py: verifiers in child processes that can be killed.
- grading/: the built-in verifiers themselves.

May import sandbox, processes, config, problem and errors. It imports no torch, so that a child
process starts fast.
"""
