"""llama.cpp in this process, through llama-cpp-python's low-level functions.

Importing this package does not import llama_cpp; loading a model does. A proxy does not need it.

libgomp reads `GOMP_SPINCOUNT` when it is loaded, so it is set before any module imports llama_cpp.
By default, libgomp's threads wait for each other by spinning for milliseconds. If another process
needs their cores, a decode can take hundreds of times as long. With this number it takes three to
five times as long, and no longer than before on an idle machine (docs/performance.md).
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "400")

from .backend import DEMO_MODEL, LlamaCpp

__all__ = ["DEMO_MODEL", "LlamaCpp"]
