"""What a model generated, taken apart: what it thinks, says, and calls (sans-I/O).

Readers take bytes, because a token may end inside a character, and tell of each part how many
bytes of the text it settles: so log-probabilities and stops find their places again.
"""
