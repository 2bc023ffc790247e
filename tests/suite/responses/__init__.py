"""The Responses API of the toy server, on top of its chat completions."""
