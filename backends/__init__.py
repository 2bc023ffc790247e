"""The engines, each behind the same small protocol."""
