"""Tiers of KV that outlive the request. The store decides here what is kept; see `policies/base.py`."""
