"""llama.cpp's server from the package `xllamacpp`, with the flags that Latimer sets.

    pip install xllamacpp
    python wheel.py -m model.gguf --port 8080

The script imports nothing from Latimer, which runs it where that package is installed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

# Flags of one argument, and the attribute of the parameters that each sets.
_WHOLE = {
    "--port": "port", "-c": "n_ctx", "-np": "n_parallel", "-b": "n_batch", "-ub": "n_ubatch",
    "-ngl": "n_gpu_layers",
    "--cache-ram": "cache_ram_mib",
}  # fmt: skip
# Flags of one word, and the attribute and the member of its type that each sets.
_NAMED = {
    "-ctk": ("cache_type_k", "GGML_TYPE_"), "-ctv": ("cache_type_v", "GGML_TYPE_"),
    "-fa": ("flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
}  # fmt: skip
_SWITCH = {"on": "enabled", "off": "disabled"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the values of the flags; unknown flags are errors."""
    # Latimer imports this module for its path.
    import argparse

    parser = argparse.ArgumentParser(prog="llama-server (xllamacpp)")
    parser.add_argument("-m", required=True)
    parser.add_argument("-a")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("-t", type=int)
    parser.add_argument("-tb", type=int)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=("none", "mean", "cls", "last"))
    parser.add_argument("--reranking", action="store_true")
    parser.add_argument("--mmproj")
    parser.add_argument("--mmap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--mlock", action="store_true")
    parser.add_argument("--lora-scaled", action="append", default=[], metavar="FILE:SCALE")
    for flag in _WHOLE:
        parser.add_argument(flag, type=int)
    for flag in _NAMED:
        parser.add_argument(flag)
    return parser.parse_args(arguments)


def parameters_of(values: argparse.Namespace) -> Any:
    """Return the parameters of the server for values of `parse`."""
    import xllamacpp

    parameters: Any = xllamacpp.CommonParams()
    parameters.model.path = values.m
    parameters.hostnames = [values.host]
    parameters.kv_unified = values.kv_unified
    parameters.embedding = values.embeddings
    parameters.endpoint_slots = True
    for flag, name in _WHOLE.items():
        value = getattr(values, flag.strip("-").replace("-", "_"))
        if value is not None:
            setattr(parameters, name, value)
    for flag, (name, prefix) in _NAMED.items():
        word = getattr(values, flag.strip("-"))
        if word is not None:
            kind = type(getattr(parameters, name))
            setattr(parameters, name, kind[prefix + _SWITCH.get(word, word).upper()])
    if values.mmap is not None or values.mlock:
        words = ["MMAP"] * (values.mmap is not False) + ["MLOCK"] * values.mlock
        mode = "_".join(words) or "NONE"
        parameters.load_mode = xllamacpp.llama_load_mode[f"LLAMA_LOAD_MODE_{mode}"]
    adapters = (one.rpartition(":") for one in values.lora_scaled)
    parameters.lora_adapters = [
        xllamacpp.CommonAdapterLoraInfo(path, float(scale)) for path, _, scale in adapters
    ]
    if values.a is not None:
        parameters.model_alias = {values.a}
    if values.t is not None:
        parameters.cpuparams.n_threads = values.t
    if values.tb is not None:
        parameters.cpuparams_batch.n_threads = values.tb
    pooling = "rank" if values.reranking else values.pooling
    if pooling is not None:
        parameters.embedding = True
        kinds = xllamacpp.llama_pooling_type
        parameters.pooling_type = kinds[f"LLAMA_POOLING_TYPE_{pooling.upper()}"]
    if values.mmproj is not None:
        parameters.mmproj.path = values.mmproj
    key = os.environ.get("LLAMA_API_KEY")
    if key:
        parameters.api_keys = [key]
    return parameters


def main() -> None:
    """Serve a model until a signal ends the process."""
    import xllamacpp

    try:
        server = xllamacpp.Server(parameters_of(parse()))
    except RuntimeError as error:
        # llama.cpp has printed the cause.
        sys.exit(str(error))
    print(server.listening_address, flush=True)  # noqa: T201
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # The engine's threads do not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
