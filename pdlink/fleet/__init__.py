"""Processes that are started and kept running: on this host, or on the nodes of a Ray cluster."""
