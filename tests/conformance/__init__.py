"""A conformance suite for servers that implement OpenAI's API.

The checks cover the behaviour that clients depend on. The suite judges a server by its replies
alone, and does not import Latimer's own code.
"""
