"""Tests of media on S3: keys, errors without secrets, and servers that fail."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from latimer.adapter.store import blobs
from latimer.adapter.store.blobs import S3
from latimer.adapter.store.errors import StoreError, StoreUnavailable
from support.s3 import BUCKET, variables

DATA = b"\x89PNG"
HASH = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that sets environment variables."""

    def set_all(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


Set = Callable[[dict[str, str]], None]


@pytest.mark.parametrize(("prefix", "key"), [("", HASH), ("/a/b/", f"a/b/{HASH}")])
def test_an_object_is_named_by_its_hash(
    prefix: str, key: str, at: Set, s3_variables: dict[str, str]
) -> None:
    """The key of a medium is the prefix and the hash; other objects are not listed."""
    import boto3

    at(s3_variables)
    storage, client = S3(BUCKET, prefix), boto3.client("s3")
    client.put_object(Bucket=BUCKET, Key=f"{prefix.strip('/')}/notes.txt".lstrip("/"), Body=b"?")
    storage.put(HASH, DATA)
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == DATA
    assert [known.hash for known in storage.hashes()] == [HASH]
    storage.delete([HASH])
    assert list(storage.hashes()) == []


def test_many_are_listed_and_deleted(
    at: Set, s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions of more objects than one request allows delete all of them."""
    at(s3_variables)
    monkeypatch.setattr(blobs, "DELETED", 3)
    storage = S3(BUCKET, "many")
    names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(8)]
    for name in names:
        storage.put(name, b"?")
    assert {known.hash for known in storage.hashes()} == set(names)
    storage.delete(names)
    assert list(storage.hashes()) == []


def test_a_bucket_that_does_not_exist(at: Set, s3_variables: dict[str, str]) -> None:
    """A missing bucket is an error with S3's code, and never a missing medium."""
    at(s3_variables)
    storage = S3("no-such-bucket", "x")
    calls: list[Callable[[], object]] = [
        lambda: storage.get(HASH),
        lambda: storage.put(HASH, DATA),
        lambda: storage.delete([HASH]),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="S3 answered NoSuchBucket"):
            call()


def test_a_server_that_is_down(at: Set) -> None:
    """A refused connection fails within seconds, in every call, and shows no secrets."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        at(variables(f"http://127.0.0.1:{closed.getsockname()[1]}"))
        storage = S3(BUCKET)
        start = time.monotonic()
        calls: list[Callable[[], object]] = [
            lambda: storage.put(HASH, DATA),
            lambda: list(storage.hashes()),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable, match="S3 cannot be reached") as caught:
                call()
            assert "sesame" not in caught.value.message
        assert time.monotonic() - start < 10


def test_a_server_that_is_silent(at: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections and does not answer fails after the limit of time."""
    monkeypatch.setattr(blobs, "READ", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        at(variables(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        with pytest.raises(StoreUnavailable, match="S3 does not answer"):
            S3(BUCKET).get(HASH)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials"),
        ({"AWS_ENDPOINT_URL_S3": "sesame"}, "S3 failed with ValueError"),
    ],
)
def test_settings_that_are_wrong(changes: dict[str, str], reason: str, at: Set) -> None:
    """Missing credentials and an invalid endpoint are errors without their values."""
    at({**variables("http://127.0.0.1:9"), **changes})
    with pytest.raises(StoreUnavailable, match=reason) as caught:
        S3(BUCKET).put(HASH, DATA)
    assert "sesame" not in caught.value.message


@pytest.mark.parametrize(
    ("endpoint", "start"),
    [
        ("http://storage.example:9000", "http://storage.example:9000/latimer/"),
        ("", "https://latimer.s3.amazonaws.com/"),
    ],
)
def test_the_bucket_is_in_the_path_of_other_servers(endpoint: str, start: str, at: Set) -> None:
    """A server other than AWS needs no host name for the bucket."""
    at({**variables(endpoint), "AWS_ENDPOINT_URL": ""})
    arguments = {"Bucket": BUCKET, "Key": HASH}
    assert blobs._client().generate_presigned_url("get_object", arguments).startswith(start)


def test_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without boto3 the storage names its extra when it is made."""
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(StoreError, match=r"pip install '\.\[s3\]'"):
        S3(BUCKET)


def test_boto3_is_imported_by_the_first_call() -> None:
    """Making the storage imports nothing of boto3, which takes a third of a second."""
    script = (
        "import sys\nfrom latimer.adapter.store import blobs\nblobs.of('s3://bucket')\n"
        "print([name for name in sys.modules if name.startswith('boto')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
