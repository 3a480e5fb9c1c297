"""A router's signed decision."""

from __future__ import annotations

import pytest

from pdlink.api.legs import PrefillAddress
from pdlink.api.route_token import RouteToken, peer_of, read_token
from pdlink.errors import InvalidApiKey

TOKEN = RouteToken("decode", "xfer-1", peer_of(PrefillAddress("tcp://a:1", "p")), 1000)


def test_what_was_signed_is_read_until_it_expires() -> None:
    assert read_token(b"secret", TOKEN.signed(b"secret"), 999.9) == TOKEN
    with pytest.raises(InvalidApiKey, match="expired 5 s ago"):
        read_token(b"secret", TOKEN.signed(b"secret"), 1005.0)


def test_nothing_of_it_can_be_changed() -> None:
    signed = TOKEN.signed(b"secret")
    for at in range(len(signed)):
        changed = signed[:at] + ("0" if signed[at] != "0" else "1") + signed[at + 1 :]
        with pytest.raises(InvalidApiKey, match="signature"):
            read_token(b"secret", changed, 0.0)


@pytest.mark.parametrize("text", ["", ",", ",,,,", "a,b,c,d,e", "\udc80", "x" * 10_000, TOKEN.signed(b"other")])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidApiKey):
        read_token(b"secret", text, 0.0)


def test_peers_differ_by_name_and_address() -> None:
    assert len({peer_of(PrefillAddress(control, name)) for name, control in ("ab", "ac", "bb", ("ab", ""))}) == 4
