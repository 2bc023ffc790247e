"""Wire types only: OpenAI's requests and replies, and each engine's native payloads."""
