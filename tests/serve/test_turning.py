"""A worker that is asked for another role: what keeps it from that, and that it is as before then."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from pdlink.errors import Draining, InvalidRequest, RoleNotTaken
from pdlink.serve.turning import Turning
from tests.serve.pair import WAIT_S

if TYPE_CHECKING:
    from tests.serve.pair import Script, WorkerPair

SEED = 77
TO_PREFILL = b'{"role": "prefill", "deadline_s": 0.05}'


def test_a_worker_that_cannot_drain_in_time_stays_what_it_was(pair: WorkerPair, script: Script) -> None:
    pair.run(_asked_while_it_works(pair, script))


async def _asked_while_it_works(pair: WorkerPair, script: Script) -> None:
    script.answers[SEED], script.allowed[SEED] = [65], threading.Event()
    worker = pair.decode
    told: list[tuple[str | None, str]] = []
    turning = Turning(worker)
    turning.changed = lambda: told.append((worker.turning, worker.role))
    body = pair.body(SEED, prompt="one", max_tokens=1)
    asked = asyncio.create_task(pair.post("decode", "/v1/completions", body))
    async with asyncio.timeout(WAIT_S):
        while not worker.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(RoleNotTaken, match=r"role: got prefill; 1 requests and 0 transfers run after 0.05 s"):
            await turning.turn(TO_PREFILL)
        assert told == [("prefill", "decode"), (None, "decode")]
        left = asyncio.create_task(turning.turn(b'{"role": "prefill"}'))
        while worker.turning is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        with pytest.raises(RoleNotTaken, match="it takes the role prefill now"):
            await turning.turn(b'{"role": "both"}')
        refused = await pair.post("decode", "/v1/completions", pair.body(0, prompt="two", max_tokens=1))
        assert (refused.status, b'"draining"' in refused.body) == (503, True)
        left.cancel()  # its caller has gone
        await asyncio.gather(left, return_exceptions=True)
        assert pair.decode.turning is None
        assert pair.decode.role == "decode"
        script.allowed[SEED].set()
        assert (await asked).status == 200
        assert (await turning.turn(TO_PREFILL))["role"] == "prefill"
        assert (await turning.turn(b'{"role": "decode"}'))["was"] == "prefill"


def test_a_worker_that_ends_takes_no_role(pair: WorkerPair) -> None:
    pair.decode.draining = True
    try:
        with pytest.raises(Draining):
            pair.run(Turning(pair.decode).turn(TO_PREFILL))
    finally:
        pair.decode.draining = False


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"role": "king"}', b'{"role": "prefill", "deadline_s": 0}', b'{"role": "prefill", "sped": 1}'],
)
def test_a_wrong_body_is_refused(pair: WorkerPair, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        pair.run(Turning(pair.decode).turn(body))
    assert pair.decode.turning is None
