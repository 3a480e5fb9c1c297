"""Runs the protocol: sockets, time, transports and the threads between them."""
