"""The judge: what clients of OpenAI's API depend on, checked against any server that claims it.

Nothing here knows Latimer's own code: a server is judged by what it sends.
"""
