"""A rolling update of workers whose stores stay: each prefix is pulled from the store of the worker that is away."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from pdlink_proxy.lenders import LEAST_TOKENS
from tests.waiting import until

from .deployment import prompt_of
from .test_sources import CHUNK, KNOWN, NAMES, NUM_CHUNKS, cell

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_rolling_update_loses_no_warm_prefix(tmp_path: Path) -> None:
    """Each worker is stopped, and started again, while the others serve its session, too."""
    with cell(tmp_path, "cost") as here:
        prompts = {name: prompt_of(NUM_CHUNKS * CHUNK, number) for number, name in enumerate(NAMES)}
        for name, prompt in prompts.items():
            here.fill(name, prompt)
        pulled = 0

        def turns() -> None:
            nonlocal pulled
            for number, (name, prompt) in enumerate(prompts.items()):
                known = here.deployment.metric("proxy", KNOWN)
                prompt += prompt_of(CHUNK, len(prompt) + number)
                answer = here.ask(prompt, X_Session_ID=name)
                assert answer.text == here.alone(prompt)
                _, said = here.explained(answer)
                assert said["computed"] < CHUNK + LEAST_TOKENS, "the new ones, and less than a router pulls for"
                pulled += said["places"].get("peer", 0)
                until(lambda known=known: here.deployment.metric("proxy", KNOWN) > known, "it is known")  # type: ignore[misc]

        turns()
        for name in NAMES:
            label = f"prefill-{name}"
            here.deployment.kill(label, signal.SIGTERM)
            here.deployment.children[label].process.wait(60)
            here.until_left(name)
            turns()
            here.deployment.restart(label)
            here.until_known(name)
            turns()
        assert pulled >= NUM_CHUNKS * CHUNK, "the session of a worker that is away goes on at another"
        print(f"{pulled} tokens were pulled")
