"""Wire types only: OpenAI's requests and responses, and each engine's native payloads."""
