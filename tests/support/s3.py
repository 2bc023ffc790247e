"""A real server with the API of S3: moto's, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

from support.servers import free_port, wait_for

BUCKET = "latimer"


def variables(address: str) -> dict[str, str]:
    """Return the environment variables by which boto3 finds a server, and nothing else."""
    return {
        "AWS_ENDPOINT_URL_S3": address,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "sesame-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
    }


@contextlib.contextmanager
def s3_process(port: int | None = None) -> Iterator[tuple[str, int]]:
    """Run moto's server with an empty bucket, and yield its address and its process id."""
    port = free_port() if port is None else port
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"{address}/moto-api/", process)
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")  # noqa: S310
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's server with an empty bucket, and yield its address."""
    with s3_process() as (address, _):
        yield address
