"""Compile a grammar once, in a process of its own that can be killed (`sandbox`).

llguidance cannot be interrupted, and some short grammars take it minutes and gigabytes, such as
intersections of regular expressions and multiples of large numbers. This script reads a grammar in
llguidance's own format from standard input; its argument is the limits of llguidance's parser as
JSON. It imports nothing from Latimer.
"""

from __future__ import annotations

import json
import os
import sys
import threading

# llguidance follows a chain of rules by recursion (`offload.DeepThreads`).
STACK = 512 << 20


def compile_grammar() -> None:
    """Compile the grammar, compute the tokens that may come first, and exit with 0 or 1."""
    import llguidance

    limits = llguidance.LLParserLimits(**json.loads(sys.argv[1]))
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
    threading.stack_size(STACK)
    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()
