"""Configurations of other systems, and what becomes of each key here: a table for each vocabulary."""
