"""Media on S3 or on a server with its API; boto3 finds the endpoint and the credentials."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from .blob import HASH, Blob
from .errors import StoreError, StoreUnavailable

MISSING = (
    "store_media on S3 requires the extra 's3': run pip install '.[s3]' in a clone of Latimer."
)
# Seconds to connect and for each read, and attempts: a dead server fails a call within about 20 s.
CONNECT, READ, ATTEMPTS = 3, 10, 2
# Keys that one request deletes at most (S3's limit).
DELETED = 1000
# The variables that name a server other than AWS.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

# The reasons for errors of botocore, by the name of the class. Their messages can have the text of
# headers.
_REASONS = {
    "ConnectTimeoutError": "S3 does not answer",
    "EndpointConnectionError": "S3 cannot be reached",
    "NoCredentialsError": "there are no credentials for S3",
    "PartialCredentialsError": "the credentials for S3 are incomplete",
    "ReadTimeoutError": "S3 does not answer",
}
_CODE = re.compile(r"\w{1,64}", re.ASCII)


class S3:
    """Blobs as objects `PREFIX/HASH` of a bucket. Other objects of the bucket are ignored."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        if find_spec("boto3") is None:
            raise StoreError(MISSING)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._lock = threading.Lock()
        self._known: Any = None

    def put(self, digest: str, data: bytes) -> None:
        # Also if it is stored: its age begins again, so that no removal of unused objects takes it.
        key = self._key(digest)
        with self._calls() as client:
            client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, digest: str) -> bytes | None:
        key = self._key(digest)
        with self._calls() as client:
            try:
                reply = client.get_object(Bucket=self._bucket, Key=key)
            except client.exceptions.NoSuchKey:
                return None
            with reply["Body"] as body:
                data: bytes = body.read()
            return data

    def delete(self, hashes: Iterable[str]) -> None:
        keys = [{"Key": self._key(one)} for one in hashes]
        with self._calls() as client:
            for at in range(0, len(keys), DELETED):
                some = {"Objects": keys[at : at + DELETED], "Quiet": True}
                reply = client.delete_objects(Bucket=self._bucket, Delete=some)
                for error in reply.get("Errors", ())[:1]:
                    raise StoreUnavailable(_answered(error.get("Code", "")))

    def hashes(self) -> Iterator[Blob]:
        with self._calls() as client:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            now = datetime.now(UTC)
            for page in pages:
                for known in page.get("Contents", ()):
                    name = known["Key"].removeprefix(self._prefix)
                    if HASH.fullmatch(name):
                        age = (now - known["LastModified"]).total_seconds()
                        yield Blob(name, age, known["Size"])

    def check(self) -> None:
        with self._calls() as client:
            client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)

    def describe(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, name: str) -> str:
        if not HASH.fullmatch(name):
            raise ValueError("a hash has 64 hexadecimal digits")
        return self._prefix + name

    @contextmanager
    def _calls(self) -> Iterator[Any]:
        """Yield the client, and turn its errors into one without secrets."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with self._lock:
                if self._known is None:
                    self._known = _client()
            yield self._known
        except ClientError as error:
            raise StoreUnavailable(_answered(error.response["Error"].get("Code", ""))) from None
        # A ValueError is an invalid endpoint.
        except (BotoCoreError, ValueError) as error:
            name = type(error).__name__
            raise StoreUnavailable(_REASONS.get(name, f"S3 failed with {name}")) from None


def _client() -> Any:
    """Return a client, which any thread may use."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT,
        read_timeout=READ,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Other servers may not know the checksums that AWS introduced in 2025.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    if any(os.environ.get(name) for name in ENDPOINTS):
        # Few servers have a host name for each bucket.
        config = config.merge(Config(s3={"addressing_style": "path"}))
    return Session().client("s3", config=config)


def _answered(code: str) -> str:
    """Return the reason for an error that the server answered with a code."""
    return f"S3 answered {code}" if _CODE.fullmatch(code) else "S3 answered with an error"
