"""Rendering of conversations to prompts, and parsing of the generated text."""
