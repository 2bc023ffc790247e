"""What OpenAI's clients send and receive."""
