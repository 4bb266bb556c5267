"""A model on several ranks: FSDP2 shards, and slices of tensors, experts and rows of tokens.

- `ranks`: the mesh, its collectives, and which rows each rank computes.
- `groups`: the processes of one axis, and how a parameter is divided over them.
- `tensor_parallel`, `experts`: slices of the blocks. `meta_model`: models without weights.
- `rank_kernels`: the Triton kernels on slices.
"""
