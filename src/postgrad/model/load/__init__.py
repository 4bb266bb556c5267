"""From a model folder to a model on the device, and back to a stock folder.

- `load`: finds a model's files, builds it, saves it; `gate` chooses its passes by their numbers.
- `formats`: which class builds a model, its tokenizer's and processor's files, the hub.
- `folder_checks`, `weights`: what is refused in a folder; weights and their index.
- `context`, `eos`: the longest row, the vocabulary, and where a response ends.
- `tiny`: the built-in model of tests and first runs.
"""
