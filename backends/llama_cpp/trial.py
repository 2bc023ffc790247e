"""Compiles a grammar once, in a process of its own that may be killed.

llguidance cannot be stopped in the middle, and some short grammars take it minutes and gigabytes:
intersections of expressions, and multiples of large numbers. So a grammar with such things in it is
compiled here first. Run as a file, it reads a grammar in llguidance's own format from its standard
input, and imports nothing of Latimer's.
"""

from __future__ import annotations

import json
import os
import sys
import threading

# A chain of rules is followed on the stack (`offload.DeepThreads`).
STACK = 512 << 20


def main() -> None:
    """Compile what comes; the process ends badly where that takes too much.

    Its arguments: seconds of CPU time, MiB of memory, the limits of llguidance's parser as JSON.
    """
    limit(int(sys.argv[1]), int(sys.argv[2]) << 20)
    threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def limit(seconds: int, memory: int) -> None:
    """Let the system end this process at so much CPU time, or at so many bytes."""
    try:
        import resource
    except ImportError:
        # Windows has no limits of this kind: whoever waits ends the process.
        pass
    else:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        most = memory + STACK
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run() -> None:
    """Compile the grammar, and find what may come first."""
    import llguidance

    limits = llguidance.LLParserLimits(**json.loads(sys.argv[3]))
    tokenizer = llguidance.LLTokenizer("byte")
    text = sys.stdin.buffer.read().decode()
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    is_wrong = matcher.is_error()
    if not is_wrong:
        matcher.compute_bitmask()
    # What is wrong is told when it is compiled in earnest. What is right and cannot be followed is
    # too much. Freeing a chain of rules needs the stack, too: so the process just ends.
    os._exit(0 if is_wrong else matcher.is_error())


if __name__ == "__main__":
    main()
