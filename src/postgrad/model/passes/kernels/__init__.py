"""Triton kernels for CUDA devices. Imported only where one is used; the same mathematics in plain torch is the CPU's path.

attention.py attends over packed tokens with shared prompts; blocks.py norms and gates; head.py prices tokens. All forward and backward.
"""
