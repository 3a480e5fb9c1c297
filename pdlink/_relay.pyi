"""Streams of events that pass from a worker's socket to a client's without Python (`csrc/relay`)."""

Report = tuple[int, bytes, bool, bytes, bytes]
"""Key; events that the client was sent, without the frames of their chunks; whether the stream has come back; then
bytes that the client must be sent first (they are in the events, too), and the worker's that nobody has read."""

class Relay:
    """Passes the chunks of streams that are lent to it, while each is whole events without the marks that its owner
    looks for.

    Whatever else comes brings the stream back, and so do its end, its loss, and a client that does not take all at
    once. A stream is between two chunks when it is lent and when it comes back. Not thread-safe. An open stream takes
    up to 8 KB. Linux.
    """

    def __init__(self) -> None: ...
    @property
    def fd(self) -> int:
        """Readable when `turn` has something to do."""

    def lend(self, worker: int, client: int, first: bytes, marks: int) -> tuple[int, bytes]:
        """Sends `first` to the client and lends the stream between these sockets, which stay the caller's: a key.
        marks: of events that bring it back (`pdlink._http`).

        Until the stream comes back, nobody else may read the worker's socket or write to the client's. Where it
        cannot be lent: 0, and the part of `first` that is yet to be sent.
        """

    def turn(self) -> list[Report]:
        """Passes what has come; of streams that came back, and of some that were sent 4 KB since the last report."""

    def take(self, key: int) -> Report:
        """Takes a stream back now. Raises IndexError for one that is not lent."""

    def heard_s(self, key: int) -> float:
        """When its worker was last heard, on the monotonic clock. Raises IndexError for one that is not lent."""

    def __len__(self) -> int:
        """Streams that are lent."""
