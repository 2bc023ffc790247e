"""Faults against live processes: clients and engines that misbehave, and checks on what happens.

python tests/faults/run.py [--short] [--only CLASS] [--engine ENGINE] [--table FILE]
"""
