"""Eviction policies: which key goes when something does not fit."""
