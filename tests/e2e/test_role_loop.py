"""The proxy's role loop with real workers under load: it turns one, and no answer is lost or wrong."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pdlink.config import ProxyConfig
from pdlink.serve.up import start
from tests.private import write_private

from .deployment import READY_S, Deployment, prompt_of, request, until, worker_settings

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

CLIENTS = 6
TURN_S = 120.0


def test_the_loop_turns_a_worker_where_prefill_is_short_and_no_answer_is_lost(tmp_path: Path) -> None:
    """One prefill worker, whose passes take long, is always busy; three decode workers have little to do."""
    write_private(tmp_path / "admin", "sk-admin")
    security = {"admin_key_file": str(tmp_path / "admin")}
    with Deployment() as deployment:
        labels = ["prefill-0", "decode-0", "decode-1", "decode-2"]
        for label in labels:
            role = label.partition("-")[0]
            settings = worker_settings(role, simulate_layer_s=0.03, security=security)
            deployment.children[label] = start(label, role, {**settings, "name": label})
        for label in labels:
            deployment.children[label].wait_ready(READY_S)
        urls = {label: deployment.url(label) for label in labels}
        config = ProxyConfig.model_validate(
            {
                "port": 0,
                "prefill": [urls["prefill-0"]],
                "decode": [urls[label] for label in labels[1:]],
                "health_interval_s": 0.2,
                "roles": {
                    "mode": "on",
                    "admin_key_file": str(tmp_path / "admin"),
                    "window_s": 2.0,
                    "windows": 2,
                    "drain_s": 30.0,
                    "token_s": 10.0,  # a step takes as long as this machine likes
                },
            }
        )
        deployment.children["proxy"] = start("proxy", "proxy", config.model_dump(mode="json"))
        deployment.children["proxy"].wait_ready(READY_S)
        deployment.wait_proxy_hears_all()
        prompts = [prompt_of(60 + 7 * seed, seed) for seed in range(CLIENTS)]
        expected = [deployment.complete(prompt).text for prompt in prompts]
        stop = threading.Event()

        def ask(number: int) -> list[tuple[int, str]]:
            found = []
            while not stop.is_set():
                answer = deployment.complete(prompts[number])
                found.append((answer.status, answer.text if answer.status == 200 else str(answer.body)))
            return found

        def loop() -> dict[str, Any]:
            roles: dict[str, Any] = request(deployment.url("proxy") + "/health").body["roles"]
            return roles

        def taken() -> list[dict[str, Any]]:
            return [each for each in loop()["turns"] if each["outcome"] == "taken"]

        with ThreadPoolExecutor(CLIENTS) as threads:
            asking = [threads.submit(ask, number) for number in range(CLIENTS)]
            try:
                until(lambda: bool(taken()), f"a worker has turned: {loop()}", TURN_S)
                turned = next(label for label in labels if urls[label] == taken()[0]["worker"])
                until(
                    lambda: deployment.metric(turned, 'pdlink_requests_total{outcome="length",role="prefill"') > 0,
                    "it computes prompts",
                )
            finally:
                stop.set()
        assert turned != "prefill-0"
        assert deployment.health(turned)["role"] == "prefill"
        for number, future in enumerate(asking):
            assert set(future.result()) == {(200, expected[number])}
        for label in labels:
            until(lambda label=label: deployment.idle(label), f"{label} has nothing left")  # type: ignore[misc]
