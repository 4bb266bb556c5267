"""Memory of a run, computed before it starts; no weights are loaded.

plan.py describes the run as lengths and lays out its passes. simulate.py and packed.py run the
model's own code on tensors without data and count their bytes. gpu_memory.py adds
what a GPU of devices.py holds. choose.py sets what a run leaves to the machine.
`postgrad doctor --fit` prints these estimates. May import rollout and every layer below it.
"""
