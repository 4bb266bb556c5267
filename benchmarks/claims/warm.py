"""Runs `postgrad ARGUMENTS` after a line on stdin. The packages are imported before it comes."""

import sys

import transformers.modeling_utils  # noqa: F401

import postgrad.cluster.host
import postgrad.training.driver  # noqa: F401
from postgrad.cli.main import main

if __name__ == "__main__" and sys.stdin.readline():
    sys.exit(main())
