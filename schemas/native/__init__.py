"""The engines' native requests and responses."""
