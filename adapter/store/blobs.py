"""The storages of media, and the choice of one: a folder, or S3."""

from __future__ import annotations

from pathlib import Path

from .blob import Blobs
from .errors import StoreError
from .folder import Folder
from .s3 import S3

__all__ = ["S3", "Blobs", "Folder", "of"]


def of(place: str) -> Blobs:
    """Return the storage at a place: a folder, or `s3://BUCKET/PREFIX`.

    Raises:
        StoreError: the place is not valid, or S3 requires an extra that is not installed.
    """
    scheme, separator, rest = place.partition("://")
    bucket, _, prefix = rest.partition("/")
    if separator and scheme == "s3" and bucket:
        return S3(bucket, prefix)
    if separator or not place:
        raise StoreError("Media can be stored in a folder or in s3://BUCKET/PREFIX.")
    return Folder(Path(place).expanduser())
