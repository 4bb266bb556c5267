"""The command line: one small file per command, found by main.py.

arguments.py has the argument parser that all commands share. May import everything;
heavy imports (torch, transformers) happen inside the functions that need them.
"""
