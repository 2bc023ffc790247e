"""Stored objects: chat completions that clients can retrieve, list, update and delete."""
