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


def connected(port: int) -> http.client.HTTPConnection:
    """Return a connection to the server, which may listen on addresses of IPv6 only."""
    made = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        made.connect()
    except ConnectionRefusedError:
        made = http.client.HTTPConnection("::1", port, timeout=TIMEOUT)
        made.connect()
    return made


def main(argument: str) -> int:
    """Return the exit code."""
    alive = argument == "--alive"
    connection = None
    try:
        connection = connected(int(os.environ.get("LATIMER_PORT", "8000")))
        # `/ready` answers within two seconds. `/health` waits for an engine that hangs.
        connection.request("GET", "/ready" if alive else argument)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"Latimer does not respond: {error}", file=sys.stderr)
        return 1
    finally:
        if connection is not None:
            connection.close()
    print(status)
    return 0 if alive or status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
