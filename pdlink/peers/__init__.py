"""Stores of other nodes as tiers: asked over the control plane, pulled from by the transports of a `Node`."""
