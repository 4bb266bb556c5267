"""The native engine: samples from the trainer's own parameters, so there is no weight sync and no second copy.

engine.py schedules rows, cache.py holds keys and values by slot, sampling.py picks tokens. The graph-captured CUDA path will stand
beside `decode` in engine.py: it replaces one function, from (tokens, lengths) to logits.
"""
