"""Many engines: routing between them, and loading them on demand."""
