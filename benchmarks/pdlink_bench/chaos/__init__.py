"""Fault injection: a seeded schedule of faults against a deployment, and a verdict on its clients' answers."""
