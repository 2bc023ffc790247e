"""Turn an engine's events into the response that a client gets."""
