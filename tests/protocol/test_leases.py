from __future__ import annotations

from pdlink.protocol.sending import Lease


def test_lease_ends_after_silence() -> None:
    lease = Lease(limit_s=100.0, length_s=10.0, from_s=0.0)
    assert lease.ended(9.9, heard_s=0.0) is None
    assert lease.ended(10.0, heard_s=0.0) == "lease_expired"


def test_sign_of_life_of_its_peer_renews_a_lease() -> None:
    lease = Lease(limit_s=100.0, length_s=10.0, from_s=0.0)
    assert lease.ended(17.9, heard_s=8.0) is None
    assert lease.ended(18.0, heard_s=8.0) == "lease_expired"


def test_lease_ends_at_its_limit_however_alive_its_peer_is() -> None:
    lease = Lease(limit_s=100.0, length_s=10.0, from_s=0.0)
    assert lease.ended(99.9, heard_s=99.0) is None
    assert lease.ended(100.0, heard_s=99.0) == "deadline"


def test_lease_that_nobody_holds_ends_by_time_alone() -> None:
    lease = Lease(limit_s=100.0, length_s=5.0, from_s=0.0)
    assert lease.ended(5.0, heard_s=None) == "lease_expired"


def test_interest_shown_later_counts_from_then() -> None:
    lease = Lease(limit_s=100.0, length_s=5.0, from_s=0.0)._replace(length_s=10.0, from_s=4.0)
    assert lease.ended(13.9, heard_s=0.0) is None
    assert lease.ended(14.0, heard_s=0.0) == "lease_expired"
