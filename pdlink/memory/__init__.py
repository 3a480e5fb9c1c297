"""Blocks of the paged cache and the buffers they live in."""
