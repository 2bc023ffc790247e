"""Shared test support: real servers, a koboldcpp replayed from recordings, recorded exchanges."""
