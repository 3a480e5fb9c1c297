"""Processes of this host that are started and kept running."""
