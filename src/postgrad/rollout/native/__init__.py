"""The native engine samples from the trainer's own parameters: no weight sync, no second copy.

engine.py      the engine: which of the two decode loops samples, and with how much memory
decode_loop.py     the decode loop over the stock model (any device, any filter)
cache.py       keys and values of that loop, one slot per row
live.py        the same loop for a server: requests join and leave while others decode
stream.py      the same loop for conversations, whose keys and values are kept between turns
decoder.py     one decode step on CUDA as Triton kernels, captured as CUDA graphs
paged.py       the decode loop over decoder.py, with paged keys and values
pages.py       sizes of the paged cache
paged_prefill.py   packed passes that write prompts to pages
paged_stream.py    the same loop for conversations, whose pages are kept between turns
kernels.py     the Triton kernels of decoder.py
sampling.py    tokens from logits and random numbers
"""
