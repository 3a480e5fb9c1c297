"""Policies: which of several workers gets a leg."""
