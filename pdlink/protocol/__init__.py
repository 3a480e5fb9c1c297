"""What the two sides say and decide. Nothing here does I/O, reads a clock or starts a thread."""
