"""Ask a Latimer in the same container for its state; the exit code is 0 if it is good.

    python3 probe.py /health    # the server responds, and the engine is ready
    python3 probe.py /ready     # the server accepts requests
    python3 probe.py --alive    # the server responds, also if the engine does not

A liveness probe needs the last one: a new container does not mend an engine elsewhere.
"""

from __future__ import annotations

import http.client
import os
import sys

# Seconds; less than the limits of the probes that run this.
TIMEOUT = 4.0


def main(argument: str) -> int:
    """Return the exit code."""
    alive = argument == "--alive"
    port = int(os.environ.get("LATIMER_PORT", "8000"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        # `/ready` answers within two seconds. `/health` waits for an engine that hangs.
        connection.request("GET", "/ready" if alive else argument)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"Latimer does not respond: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print(status)
    return 0 if alive or status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
