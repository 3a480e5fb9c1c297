"""What an engine's own publisher of KV events sends, frame by frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq

from pdlink.fleet.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = [7 * number + 1 for number in range(64)]
"""Of all requests in the recordings, with ends of their own."""
OTHER = [1_000_000 + number for number in range(128)]


def frames(open_publisher: Callable[[str, str], Any], batches: Sequence[Any]) -> list[list[str]]:
    """In hexadecimal, what one gets who asks for all these batches again; the last one is the end.

    open_publisher: of a PUB and a replay endpoint, with `publish` and `shutdown`.
    """
    port = free_ports(2)
    publisher = open_publisher(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.rcvtimeo, socket.linger = 60_000, 0
            socket.connect(f"tcp://127.0.0.1:{port + 1}")
            for batch in batches:
                publisher.publish(batch)
            while True:  # until its thread has taken all
                socket.send_multipart((b"", (0).to_bytes(8, "big")))
                found = [socket.recv_multipart()]
                while found[-1][-2] != publisher.END_SEQ:
                    found.append(socket.recv_multipart())
                if len(found) > len(batches):
                    return [[frame.hex() for frame in each] for each in found]
    finally:
        publisher.shutdown()
