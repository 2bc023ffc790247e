"""Text that a model generates, by way of events, to what a client sees of it."""
