"""A stand-in for onnxruntime, which loads a voice; see `piper`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class SessionOptions:
    """The settings of a session."""

    intra_op_num_threads = 0

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Take a setting."""


class InferenceSession:
    """A voice; an empty file is not one."""

    def __init__(self, path: str, options: SessionOptions, providers: Sequence[str]) -> None:
        assert options.intra_op_num_threads > 0
        assert providers == ["CPUExecutionProvider"]
        if not Path(path).read_bytes():
            raise ValueError("not a voice")
        print("loaded", path)
