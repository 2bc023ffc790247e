"""Convert a WebP image to PNG, in a thread, or in a process of its own that can be killed.

A file of 34 bytes can have millions of pixels, which take seconds and a gigabyte. This file is also
the script of that process (`sandbox`): it reads WebP from standard input, writes PNG to standard
output, and imports nothing from Latimer.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

# The exit statuses for a file that is broken, and for a full disk.
BROKEN, FULL = 10, 11


def main() -> None:
    """Convert standard input; the argument is the largest number of pixels."""
    png = b""
    with suppress(ValueError):
        png = as_png(sys.stdin.buffer.read(), int(sys.argv[1]))
    if not png:
        sys.exit(BROKEN)
    try:
        sys.stdout.buffer.write(png)
        sys.stdout.flush()
    except OSError:
        # What the buffer has left would be written, and fail, again.
        os._exit(FULL)


def as_png(data: bytes, most: int) -> bytes:
    """Return a WebP file as PNG; of an animation, the first picture.

    Args:
        most: the largest number of pixels.

    Raises:
        ValueError: the file is broken, or has more pixels.
        MemoryError: there is not enough memory.
    """
    # Few images are of this kind, and the library takes 5 MB.
    from PIL import Image

    out = io.BytesIO()
    try:
        with Image.open(io.BytesIO(data), formats=("WEBP",)) as picture:
            if picture.width * picture.height > most:
                raise ValueError
            mode = "RGBA" if picture.has_transparency_data else "RGB"
            # Time matters more than size, because the engine has the file for a moment only.
            picture.convert(mode).save(out, "PNG", compress_level=1)
    except MemoryError:
        raise
    except Exception:
        # The library does not document its exceptions for broken files.
        raise ValueError from None
    return out.getvalue()


if __name__ == "__main__":
    main()
