"""Anthropic's Messages API: its blocks and events, over the same conversation as chat."""
