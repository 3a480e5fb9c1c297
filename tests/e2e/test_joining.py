"""Real workers that find their proxy by themselves, with keys: what their death, their stop and their return mean."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdlink.config import ProxyConfig
from pdlink.fleet.child import Child, start
from pdlink.serve.keys import keygen
from tests.private import write_private

from .deployment import READY_S, WAIT_S, Answer, Deployment, prompt_of, request, until, worker_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

HERE = "register:tcp://127.0.0.1:0"
BEAT_S = 1.0


@dataclass
class Site:
    deployment: Deployment
    keys: Path
    address: str

    def begin(self, label: str, role: str, beat_s: float = BEAT_S) -> Child:
        """Start a worker; it is in the proxy's hands when it is ready."""
        security = {"key_file": str(self.keys / f"{label}.key"), "allow_file": str(self.keys / "allow")}
        if label == "swing":
            security["admin_key_file"] = str(self.keys / "admin")
        settings = worker_settings(role, join={"proxies": [self.address], "beat_s": beat_s}, security=security)
        child = self.deployment.children[label] = start(label, role, {**settings, "name": label})
        return child

    def workers(self, side: str) -> dict[str, str]:
        """State by URL."""
        body = request(self.deployment.url("proxy") + "/health").body
        return {each["url"]: each["state"] for each in body[side]}

    def answers(self) -> bool:
        answer = self.deployment.complete(prompt_of(40))
        return answer.status == 200 and answer.headers.get("X-Pdlink-KV") == "transferred"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("keys")
    lines = [keygen(name, str(keys))[1] for name in ("proxy", "prefill-a", "decode-a", "swing")]
    write_private(keys / "admin", "sk-admin")
    (keys / "allow").write_text("\n".join(lines))
    config = ProxyConfig(
        listen="127.0.0.1:0",
        discover=(HERE,),
        key_file=str(keys / "proxy.key"),
        allow_file=str(keys / "allow"),
        policy="round_robin",  # so that each worker gets some of a few prompts
        health_interval_s=0.2,
        drain_s=2.0,
    )
    with Deployment() as deployment:
        settings = config.model_dump(mode="json")
        deployment.children["proxy"] = start("proxy", "proxy", settings)
        deployment.children["proxy"].wait_ready(READY_S)
        site = Site(deployment, keys, "")

        def listens() -> bool:
            source = request(deployment.url("proxy") + "/health").body["sources"][HERE]
            site.address = source["address"]
            return bool(site.address)

        until(listens, "the proxy listens")
        for child in [site.begin("prefill-a", "prefill"), site.begin("decode-a", "decode", beat_s=30.0)]:
            child.wait_ready(READY_S)
        until(site.answers, "both have joined")
        yield site


def turn(site: Site, role: str, **more: object) -> Answer:
    headers = {"Authorization": "Bearer sk-admin"}
    return request(
        f"{site.deployment.url('swing')}/role", {"role": role, "deadline_s": 30.0, **more}, headers=headers
    )


def test_a_worker_takes_the_other_role_and_back_under_load_and_no_answer_is_lost(site: Site) -> None:
    """One worker of three is decode, then prefill, then decode again; clients never stop asking."""
    deployment = site.deployment
    prompts = [prompt_of(60 + 7 * seed, seed) for seed in range(6)]
    expected = [deployment.complete(prompt).text for prompt in prompts]
    site.begin("swing", "decode").wait_ready(READY_S)
    url = deployment.url("swing")
    until(lambda: site.workers("decode").get(url) == "ok", "it has joined")
    until(lambda: site.workers("prefill").get(url) == "other role", "the proxy knows what it can do")
    before = deployment.health("swing")
    stop = threading.Event()

    def ask(number: int) -> list[tuple[int, str]]:
        found = []
        while not stop.is_set():
            answer = deployment.complete(prompts[number])
            found.append((answer.status, answer.text if answer.status == 200 else str(answer.body)))
        return found

    def served(role: str) -> float:
        return deployment.metric("swing", f'pdlink_requests_total{{outcome="length",role="{role}"')

    with ThreadPoolExecutor(len(prompts)) as threads:
        asking = [threads.submit(ask, number) for number in range(len(prompts))]
        try:
            for role, other in (("prefill", "decode"), ("decode", "prefill")):
                answer = turn(site, role, epoch=before["epoch"])
                assert (answer.status, answer.body["role"], answer.body["was"]) == (200, role, other), answer.body
                done = served(role)
                until(lambda: site.workers(role)[url] == "ok", "it serves the new role")  # noqa: B023
                until(lambda: site.workers(other)[url] == "other role", "it left the old one")  # noqa: B023
                until(lambda: served(role) > done, "it has work")  # noqa: B023
        finally:
            stop.set()
    for number, future in enumerate(asking):
        assert set(future.result()) == {(200, expected[number])}
    after = deployment.health("swing")
    assert all(after[name] == before[name] for name in ("control", "epoch"))  # the same life, the same memory
    until(lambda: deployment.idle("swing"), "nothing is left behind")
    assert turn(site, "king").status == 400
    assert turn(site, "prefill", epoch="another").status == 409
    assert request(url + "/role", {"role": "prefill"}).status == 401
    assert request(deployment.url("decode-a") + "/role", {"role": "prefill"}).status == 403
    deployment.kill("swing", signal.SIGTERM)
    until(lambda: url not in site.workers("decode") | site.workers("prefill"), "it has left")


def test_a_killed_worker_is_out_long_before_its_next_beat_and_its_successor_is_found(site: Site) -> None:
    old = site.deployment.children["decode-a"]
    site.deployment.kill("decode-a")
    until(lambda: site.workers("decode").get(str(old.facts["url"])) == "unreachable", "the proxy knows", 10.0)
    old.process.wait(WAIT_S)
    old.link.close()
    site.begin("decode-a", "decode").wait_ready(READY_S)  # on other ports, as after another machine took over
    new = site.deployment.url("decode-a")
    assert new != old.facts["url"]
    until(lambda: site.workers("decode") == {new: "ok"}, "the successor alone is listed")
    assert site.answers()


def test_a_stopped_worker_is_out_after_three_beats_and_back_when_it_goes_on(site: Site) -> None:
    url = site.deployment.url("prefill-a")
    until(lambda: site.workers("prefill") == {url: "ok"}, "it is well")
    site.deployment.kill("prefill-a", signal.SIGSTOP)
    try:
        until(lambda: site.workers("prefill") == {url: "unreachable"}, "it is out")
        reason = request(site.deployment.url("proxy") + "/health").body["prefill"][0]["reason"]
        assert "no beat within 3 s" in reason or "GET /health" in reason
    finally:
        site.deployment.kill("prefill-a", signal.SIGCONT)
    until(lambda: site.workers("prefill") == {url: "ok"}, "it is back")
    until(site.answers, "requests are served")


def test_a_worker_that_ends_takes_itself_off(site: Site) -> None:
    site.deployment.kill("prefill-a", signal.SIGTERM)
    until(lambda: site.workers("prefill") == {}, "nothing of it is listed")
    assert site.deployment.children["prefill-a"].process.wait(WAIT_S) == 0
