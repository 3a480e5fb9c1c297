"""Keys that are made of a secret which all processes of a deployment share."""

from __future__ import annotations

import zmq

from pdlink.endpoint.token import credentials_of, http_key_of
from pdlink.protocol.auth import ControlAddress, check_dial, is_key, name_problem

SECRET = "a secret of more than twenty characters"


def test_all_who_know_the_token_have_one_pair_and_others_have_another() -> None:
    one, same, other = credentials_of(SECRET), credentials_of(SECRET), credentials_of(SECRET + "!")
    assert one == same
    assert one.keys.public != other.keys.public
    assert is_key(one.keys.public)
    assert zmq.curve_public(one.keys.secret.encode()).decode() == one.keys.public


def test_a_member_may_use_any_name_and_a_stranger_none() -> None:
    credentials = credentials_of(SECRET)
    assert credentials.owner is None
    assert name_problem(credentials, credentials.keys.public, "prefill-10.0.0.1-8100/3") is None
    stranger = zmq.curve_keypair()[0].decode()
    assert name_problem(credentials, stranger, "prefill-0") == ("a key that is not allowed", "prefill-0")


def test_members_dial_each_other() -> None:
    credentials = credentials_of(SECRET)
    check_dial(ControlAddress("10.0.0.1", 8500, credentials.keys.public), credentials, insecure=False)


def test_the_key_for_http_tells_neither_the_token_nor_the_secret_key() -> None:
    credentials, key = credentials_of(SECRET), http_key_of(SECRET)
    assert key == http_key_of(SECRET)
    assert key != http_key_of(SECRET + "!")
    assert SECRET not in key
    assert SECRET not in repr(credentials)
    assert credentials.keys.secret not in repr(credentials)
