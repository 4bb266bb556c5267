"""Postgrad: RL post-training for language models. Each method is one file; see docs/design.md."""

__version__ = "0.1.0"
