"""Doubles of engines: one in process, and servers that generate, replay, or edit a real engine."""
