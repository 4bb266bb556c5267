"""Memory of a run, computed before it starts; no weights are loaded.

workload.py describes the run as lengths and lays out its passes with the trainer's own plan.
simulate.py runs the model's own code on tensors without data and counts their bytes. memory.py adds
what else a device of devices.py holds. choose.py sets what a run leaves to the machine, and says
what would save memory. May import rollout and every layer below it.
"""
