"""Keys made of one secret that all processes of a deployment share, for operators who would rather bring one file to
their hosts than a key pair and an allow-list to each.

Who knows the token is a member and may use any name: members cannot be told apart, nor one of them be shut out. Pairs
of their own (`pdlink keygen`) can.
"""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85

from pdlink.protocol.auth import AllowList, Credentials, KeyPair


def credentials_of(token: str) -> Credentials:
    """The key pair that all members have, and allow. It proves no name."""
    secret = z85.encode(_derived(token, "control")).decode()
    public = zmq.curve_public(secret.encode()).decode()
    return Credentials(KeyPair("", public, secret), AllowList({public: ""}))


def http_key_of(token: str) -> str:
    """What callers of a worker's HTTP interface send. The token itself is never sent."""
    return _derived(token, "http").hex()


def _derived(token: str, purpose: str) -> bytes:
    """32 bytes. Slow on purpose (some 50 ms), for tokens that people make up."""
    return hashlib.scrypt(token.encode(), salt=f"pdlink {purpose}".encode(), n=2**14, r=8, p=1, dklen=32)
