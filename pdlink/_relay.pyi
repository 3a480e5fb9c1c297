"""Streams of events that pass from a worker's socket to a client's without Python (`csrc/relay`)."""

Report = tuple[int, bytes, bool, bytes, bytes]
"""Key; events that the client was sent, without the frames of their chunks; whether the stream has come back; then
bytes that the client must be sent first (they are in the events, too), and the worker's that nobody has read."""

class Relay:
    """Passes the chunks of streams that are lent to it, while each is whole events without the marks that its owner
    looks for.

    Whatever else comes brings the stream back, and so do its end, its loss, and a client that does not take all at
    once. A stream is between two chunks when it is lent and when it comes back. A native thread passes them, without
    the interpreter. An open stream takes up to 8 KB. Linux.
    """

    def __init__(self) -> None: ...
    @property
    def fd(self) -> int:
        """Readable when there are reports."""

    def lend(self, worker: int, client: int, first: bytes, marks: int) -> tuple[int, bytes]:
        """Sends `first` to the client and lends the stream between these sockets, which stay the caller's: a key.
        marks: of events that bring it back (`pdlink._http`).

        Until the stream comes back, nobody else may read the worker's socket or write to the client's. Where it
        cannot be lent: 0, and the part of `first` that is yet to be sent.
        """

    def reports(self) -> list[Report]:
        """Of streams that came back, and of some that were sent 4 KB since the last report."""

    def take(self, key: int) -> Report:
        """Takes a stream back now, with all that no report has told. Raises IndexError after its last report."""

    def heard_s(self, key: int) -> float:
        """When its worker was last heard, on the monotonic clock; 0 of a stream that has come back."""

    def __len__(self) -> int:
        """Streams that are lent."""
