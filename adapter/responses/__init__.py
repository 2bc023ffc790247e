"""The Responses API: its items and events, over the same conversation as chat."""
