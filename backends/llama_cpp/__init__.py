"""llama.cpp in this process, through llama-cpp-python's low-level functions.

Importing this package does not import llama_cpp; loading a model does. A proxy does not need it.
"""

from .backend import DEMO_MODEL, LlamaCpp

__all__ = ["DEMO_MODEL", "LlamaCpp"]
