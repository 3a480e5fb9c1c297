"""Pictures of the proxy's page for the docs: stamped with the files that they show, so that a stale one is found."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = ("page.png", "page-dark.png")
_STATIC = ROOT / "proxy" / "pdlink_proxy" / "page" / "static"
_KEY = b"pdlink-page\0"
_LAST_NBYTES = 12
"""Of a PNG: its chunk IEND, without data."""


def digest_of_page() -> bytes:
    """Of the page's files."""
    found = hashlib.sha256()
    for path in sorted(path for path in _STATIC.iterdir() if path.is_file()):
        found.update(path.read_bytes())
    return found.hexdigest().encode()


def stamped(png: bytes) -> bytes:
    """The picture in 64 colours, a quarter of its bytes, with the page's digest in a tEXt chunk (PNG, 11.3.4.3)."""
    from PIL import Image  # of matplotlib; only who makes pictures needs it

    small = io.BytesIO()
    kept = Image.Quantize.MAXCOVERAGE  # of a colour that is rare, such as that of an error
    Image.open(io.BytesIO(png)).convert("RGB").quantize(64, kept, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    png = small.getvalue()
    data = b"tEXt" + _KEY + digest_of_page()
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return png[:-_LAST_NBYTES] + chunk + png[-_LAST_NBYTES:]


def is_of_this_page(png: bytes) -> bool:
    return _KEY + digest_of_page() in png
