"""Forward and backward passes of a model over batches of trajectories.

- `layout`: micro-batches within a token budget, padded or packed.
- `packing`, `row_attention`, `attention`: packed tokens and the attention over them.
- `head`: log-probs and entropy of the response tokens, in chunks over the LM head.
- `captured`: CUDA graphs of packed passes.

May import `postgrad.model.device`, `lora` and `views`, `postgrad.types` and `postgrad.errors`.
"""
