"""Start a command that ends with the process that started it; a script without imports of Latimer.

    python launch.py PARENT COMMAND…

On Linux the kernel kills the command when its parent ends, for any reason. Elsewhere the script
only starts the command.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# The exit code of a shell for a command that cannot be started.
NOT_STARTED = 127


def main(parent: int, command: list[str]) -> None:
    """Replace this process with the command."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent ended before the kernel knew that it matters.
            sys.exit(NOT_STARTED)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
