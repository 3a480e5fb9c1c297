"""What an operator sets makes the whole table of deadlines."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlink.config import TimeoutConfig
from pdlink.config.timeouts import LEASES_PER_PEER
from pdlink.errors import ConfigError
from pdlink.protocol.deadlines import Deadlines


def test_the_defaults_of_settings_and_library_are_the_same() -> None:
    assert asdict(Deadlines.of(TimeoutConfig())) == pytest.approx(asdict(Deadlines()))


@given(peer_s=st.floats(0.001, 100), request_s=st.floats(0.001, 1000))
def test_settings_that_are_accepted_make_deadlines_in_order(peer_s: float, request_s: float) -> None:
    if peer_s * LEASES_PER_PEER >= request_s:
        with pytest.raises(ValueError, match="timeouts.request_s"):
            TimeoutConfig(peer_s=peer_s, request_s=request_s, idle_s=0)
        return
    settings = TimeoutConfig(peer_s=peer_s, request_s=request_s, idle_s=0)
    made = Deadlines.of(settings)
    assert made.heartbeat_s < made.peer_s < made.connect_s < made.lease_s < made.request_s


def test_deadlines_out_of_order_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="peer_s = 20.0 s must be below lease_s = 10.0 s"):
        Deadlines(peer_s=20.0)
