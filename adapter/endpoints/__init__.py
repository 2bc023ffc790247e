"""One module per OpenAI endpoint."""
