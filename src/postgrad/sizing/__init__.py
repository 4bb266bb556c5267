"""Memory and time of a run, computed before it starts; no weights are loaded.

plan.py describes the run as lengths and lays out its passes. simulate.py and packed.py run the
model's own code on tensors without data and count their bytes. gpu_memory.py and gpu_time.py add
what a GPU of devices.py holds and does; mesh_memory.py, mesh_time.py and traffic.py do the same for
a mesh of GPUs. choose.py sets what a run leaves to the machine.
`postgrad doctor --fit` prints these estimates. May import rollout and every layer below it.
"""
