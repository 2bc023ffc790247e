"""Faults of clients, engines and stores against live processes, with checks of the results.

python tests/chaos/run.py faults|fuzz|soak
"""
