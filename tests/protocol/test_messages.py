from __future__ import annotations

import contextlib
import random

import msgspec
import pytest

from pdlink.capabilities import Capabilities
from pdlink.errors import ProtocolError
from pdlink.kv.layout import paged_layout
from pdlink.protocol import messages

LAYOUT = paged_layout(
    dtype="float32", itemsize=4, num_layers=2, num_blocks=8, block_tokens=16, num_heads=4, head_dim=8
)
MAPPED = Capabilities("mapped", "host", ("host",), "pool")
BODIES: list[messages.Body] = [
    messages.Hello("d", messages.Identity(1, "m", "r", 1, LAYOUT, "h"), (MAPPED,)),
    messages.Offer("t", 3, 40, ((7, 1),), 2),
    messages.Done("t", 3, 40, 2, 1234, 5),
    messages.Invite(b"", "no descriptors"),
    messages.Ready(),
    messages.Heartbeat(),
    messages.Note(b"x"),
    messages.Bye("shutdown"),
]


def envelope(body: messages.Body) -> messages.Envelope:
    return messages.Envelope(messages.VERSION, "d", "e1", "e2", 3, 0, (body,))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_message_comes_back_as_it_was(body: messages.Body) -> None:
    assert messages.decode(messages.encode(envelope(body))) == envelope(body)


def test_field_of_a_newer_version_is_ignored() -> None:
    frame = msgspec.msgpack.encode([1, "d", "e1", "e2", 3, 0, [{"type": "bye", "reason": "x", "colour": "blue"}]])
    assert messages.decode(frame).bodies == (messages.Bye("x"),)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04\x95",
        b"\xdd\xff\xff\xff\xff",
        msgspec.msgpack.encode([1, "d", "e", "f", 3, 0, [{"type": "exec"}]]),
        msgspec.msgpack.encode([1, "d", "e", "f", 3, 0, []]),
        msgspec.msgpack.encode([1, "d", "e", "f", 3, 0, [{"type": "heartbeat"}] * (messages.MAX_BODIES + 1)]),
    ],
    ids=["empty", "pickle", "huge length", "unknown tag", "nothing said", "too much said"],
)
def test_frame_that_is_no_message_is_a_remote_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.decode(frame)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_frames_never_raise_anything_else(seed: int) -> None:
    random_ = random.Random(seed)
    frame = bytearray(messages.encode(envelope(random_.choice(BODIES))))
    for _ in range(random_.randrange(1, 8)):
        frame[random_.randrange(len(frame))] = random_.randrange(256)
    with contextlib.suppress(ProtocolError):
        messages.decode(bytes(frame[: random_.randrange(len(frame) + 1)]))
