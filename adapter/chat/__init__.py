"""A conversation to a prompt, and what comes back to its parts."""
