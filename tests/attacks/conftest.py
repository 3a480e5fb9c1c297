"""Fixtures of the attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.deployment import Deployment, prompt_of, worker_settings
from tests.endpoint.conftest import Pair
from tests.waiting import until

from .processes import Holdings

PROMPT = prompt_of(60, seed=77)
GROWTH_NBYTES = 64 * 2**20
"""Allocators keep what they once had; an attack that is kept is larger."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="package")
def deployment() -> Iterator[Deployment]:
    """Prefill, decode and proxy whose KV crosses the ports that are attacked."""
    sections = {"transport": {"kind": "ucx", "ucx": {"tls": "tcp"}}, "cache": {"share_prefixes": False}}
    workers = {role: worker_settings(role, **sections) for role in ("prefill", "decode")}
    with Deployment.launch(workers) as deployment:
        for _ in range(3):
            assert deployment.complete(PROMPT).status == 200
        yield deployment


@pytest.fixture(scope="package")
def right_answer(deployment: Deployment) -> str:
    return deployment.complete(PROMPT).text


@pytest.fixture
def victims(deployment: Deployment, right_answer: str) -> Iterator[Deployment]:
    """After the attack everybody lives, answers right, holds nothing for anyone, and has not grown."""
    before = {label: Holdings.of(child.process.pid) for label, child in deployment.children.items()}
    yield deployment
    for label, child in deployment.children.items():
        assert child.process.poll() is None, f"{label} has died"
        assert deployment.health(label)["status"] == "ok"
    landed = deployment.metric("prefill", "pdlink_layers_landed_total")
    assert deployment.complete(PROMPT).text == right_answer
    assert deployment.metric("prefill", "pdlink_layers_landed_total") == landed + 8, "the KV crossed"
    for label in ("prefill", "decode"):
        until(lambda label=label: deployment.idle(label), f"{label} holds nothing")  # type: ignore[misc]
    for label, old in before.items():
        pid = deployment.children[label].process.pid
        until(lambda pid=pid, old=old: Holdings.of(pid).descriptors <= old.descriptors + 2, f"{label} closes what it opened")  # type: ignore[misc]  # fmt: skip  # noqa: E501
        now = Holdings.of(pid)
        assert now.threads <= old.threads + 1
        assert now.resident_nbytes - old.resident_nbytes < GROWTH_NBYTES
