"""The native engine samples from the trainer's own parameters: no weight sync, no second copy.

engine.py      the engine, and its decode loop over the stock model (any device, any filter)
cache.py       keys and values of that loop, one slot per row
serve_process.py        the same loop for a server: requests join and leave while others decode
decoder.py     one decode step on CUDA as Triton kernels, captured as CUDA graphs
paged.py       the decode loop over decoder.py, with paged keys and values
kernels.py     the Triton kernels of decoder.py
sampling.py    tokens from logits and random numbers
"""
