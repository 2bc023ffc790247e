"""Faults of clients and engines against live processes, with checks of the results.

python tests/faults/run.py [--short] [--only CLASS] [--engine ENGINE] [--table FILE]
"""
