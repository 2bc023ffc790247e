"""llama.cpp in this process, through llama-cpp-python's low-level functions.

Nothing here imports llama_cpp before a model is loaded: a proxy neither needs it nor pays for it.
"""

from .backend import DEMO_MODEL, LlamaCpp

__all__ = ["DEMO_MODEL", "LlamaCpp"]
