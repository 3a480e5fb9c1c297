"""Messages and decisions of both sides. No I/O, no clock, no thread."""
