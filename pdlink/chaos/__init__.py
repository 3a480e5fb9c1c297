"""Faults on purpose: a seeded schedule of them against a deployment, and a verdict on what its clients saw."""
