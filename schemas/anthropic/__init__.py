"""Requests of Anthropic's API."""
