"""Compile a grammar once, in a process of its own that can be killed.

llguidance cannot be interrupted, and some short grammars take it minutes and gigabytes, such as
intersections of regular expressions and multiples of large numbers. Such a grammar is therefore
compiled here first. This file is run as a script. It reads a grammar in llguidance's own format
from standard input, and imports nothing from Latimer.
"""

from __future__ import annotations

import json
import os
import sys
import threading

# llguidance follows a chain of rules by recursion (`offload.DeepThreads`).
STACK = 512 << 20


def main() -> None:
    """Compile the grammar on standard input; the process fails if that takes too much.

    The command's arguments are seconds of CPU time, MiB of memory, and the limits of llguidance's
    parser as JSON.
    """
    limit(int(sys.argv[1]), int(sys.argv[2]) << 20)
    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def limit(seconds: int, memory: int) -> None:
    """Limit this process to some seconds of CPU time and some bytes of memory."""
    try:
        import resource
    except ImportError:
        # Windows has no such limits; the parent process kills this one after its timeout.
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        most = memory + STACK
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run() -> None:
    """Compile the grammar, and compute the tokens that may come first."""
    import llguidance

    limits = llguidance.LLParserLimits(**json.loads(sys.argv[3]))
    tokenizer = llguidance.LLTokenizer("byte")
    text = sys.stdin.buffer.read().decode()
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    is_wrong = matcher.is_error()
    if not is_wrong:
        matcher.compute_bitmask()
    # A malformed grammar passes here: its error is reported when the engine compiles it. A correct
    # one that llguidance cannot follow takes too much. The process exits without freeing anything,
    # because freeing a chain of rules is recursive as well.
    os._exit(0 if is_wrong else matcher.is_error())


if __name__ == "__main__":
    main()
