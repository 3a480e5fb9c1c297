"""GET /pdlink/timeline of a proxy: what it shows of one request."""

from __future__ import annotations

import asyncio

import pytest

from tests.observe.traced import events_of
from tests.proxy.fakes import FakeWorker, proxy_of


@pytest.mark.parametrize("asks_for", ["request", "first transfer", "last transfer"])
async def test_every_attempt_of_a_request_is_shown(
    prefill: FakeWorker, decodes: list[FakeWorker], asks_for: str
) -> None:
    prefill.gate = asyncio.Event()  # no token of its own may commit the first attempt
    decodes[0].resets = 1
    async with proxy_of([prefill], decodes) as proxy:
        async with proxy.post(stream=True) as answer:
            assert answer.status == 200
            await answer.read()
            headers = answer.headers
        (record,) = proxy.router.services.records
        first, last = dict.fromkeys(leg.transfer_id for leg in record.legs)
        assert last == headers["X-Pdlink-Transfer"]
        ids = {"request": headers["X-Request-Id"], "first transfer": first, "last transfer": last}
        async with proxy.client.get(f"{proxy.url}/pdlink/timeline?request={ids[asks_for]}") as answer:
            assert answer.status == 200
            data = await answer.read()
    shown = [each for each in events_of(data) if each.track == "legs"]
    ends = sorted(
        (each.args["pdlink.transfer_id"] == last, each.name.partition(",")[0], each.args["pdlink.end"])
        for each in shown
    )
    assert ends[:2] == [(False, "decode", "reset"), (False, "prefill", "cancelled")]
    assert [each[:2] for each in ends[2:]] == [(True, "decode"), (True, "prefill")]
    assert ends[2][2] == "served"
