"""The runs behind docs/results.md, a file per claim; benchmarks/research.py is their command.

- claim.py: what a claim is, and the settings that all runs have.
- runs.py: several training runs at once on one GPU, until all ended or the time is over.
- results.py: results.jsonl, a line per step and run, and series and intervals from it.
- problems.py: the problems, written as JSONL files; rewards.py: verifiers of the sums.
- grpo.py, luffy.py, exgrpo.py, bupo.py, classmate.py, losses.py, mismatch.py: a claim each.
- distillation.py: tables and figures of distillation and reward models.
- trl_grpo.py: GRPO by TRL, as a child process.
- hashes.py: hashes of a run's tokens, rewards and weights, to compare machines.
- graders.py: verifiers beside each other on the responses of runs.
- demonstrations.py: probability of each token of the demonstrations under a model.
- entropies.py: internal entropies of models, the analysis behind BuPO's depth.
- keep.py, draw.py: results per seed in docs/research, tables and figures.
- tiny_model.py: a chat model with random weights, for smoke tests on a CPU.
"""
