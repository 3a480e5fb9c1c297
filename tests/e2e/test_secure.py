"""Real processes with every lock there is: keys between workers, a secret and HTTPS to them, API keys for clients."""

from __future__ import annotations

import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdlink.config import ProxyConfig
from pdlink.fleet.child import start
from pdlink.serve.keys import keygen
from tests.certificates import make_certificate
from tests.private import write_private
from tests.waiting import until

from .deployment import READY_S, Deployment, prompt_of, worker_settings

pytestmark = pytest.mark.e2e

CLIENT = {"Authorization": "Bearer sk-client"}
PROXY = {"X-Pdlink-Key": "between-proxy-and-workers"}


@dataclass
class Site:
    deployment: Deployment
    allow: Path
    lines: dict[str, str]
    tls: ssl.SSLContext

    def ask(self, at: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.deployment.url(at) + path, data, headers or {})
        try:
            with urllib.request.urlopen(asked, timeout=30, context=self.tls) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, at: str = "proxy", headers: dict[str, str] | None = None, **more: Any) -> tuple[int, Any]:
        body = {"model": "pdlink-tiny", "prompt": prompt_of(40), "max_tokens": 8, "temperature": 0, **more}
        return self.ask(at, "/v1/completions", body, CLIENT if headers is None else headers)

    def allow_only(self, *names: str) -> None:
        """Rewrite every worker's allow-list, and tell them."""
        self.allow.write_text("\n".join(self.lines[name] for name in names))
        for label in ("prefill-a", "decode-a"):
            self.deployment.kill(label, signal.SIGHUP)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("keys")
    lines = {name: keygen(name, str(directory))[1] for name in ("prefill-a", "decode-a", "stranger")}
    allow = directory / "allow"
    allow.write_text("\n".join(lines[name] for name in ("prefill-a", "decode-a")))
    write_private(directory / "http", PROXY["X-Pdlink-Key"])
    cert, key = make_certificate(directory)
    workers = {
        f"{role}-a": worker_settings(
            role,
            transport={"kind": "mapped"},
            on_transfer_failure="fail",
            security={
                "key_file": str(directory / f"{role}-a.key"),
                "allow_file": str(allow),
                "http_key_file": str(directory / "http"),
                "tls_cert": cert,
                "tls_key": key,
            },
        )
        for role in ("prefill", "decode")
    }
    with Deployment.launch(workers, routed=False) as deployment:
        config = ProxyConfig(
            listen="127.0.0.1:0",
            health_interval_s=0.2,
            retries=0,
            drain_s=2.0,
            prefill=(deployment.url("prefill-a"),),
            decode=(deployment.url("decode-a"),),
            api_keys=("sk-client",),
            worker_key_file=str(directory / "http"),
            worker_ca=cert,
            tls_cert=cert,
            tls_key=key,
        )
        deployment.children["proxy"] = start("proxy", "proxy", config.model_dump(mode="json"))
        deployment.children["proxy"].wait_ready(READY_S)
        site = Site(deployment, allow, lines, ssl.create_default_context(cafile=cert))
        until(lambda: site.ask("proxy", "/health")[0] == 200, "the proxy sees its workers")
        yield site


def test_answer_behind_every_lock_equals_that_of_one_worker_alone(site: Site) -> None:
    assert all(site.deployment.url(label).startswith("https://") for label in site.deployment.children)
    status, answer = site.complete()
    assert status == 200
    alone_status, alone = site.complete("decode-a", PROXY)
    assert alone_status == 200
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


def test_client_without_a_key_is_refused_by_the_proxy_and_by_the_workers(site: Site) -> None:
    for at in ("proxy", "prefill-a", "decode-a"):
        status, body = site.complete(at, {})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    for at in ("prefill-a", "decode-a"):
        assert site.complete(at, CLIENT)[0] == 401  # the proxy's clients are not the workers'
        assert site.ask(at, "/pdlink/transfers/x/stop", {"reason": "x"})[0] == 401
        assert site.ask(at, "/pdlink/timeline")[0] == 401
        assert site.ask(at, "/health")[0] == 200


@pytest.mark.parametrize(
    "control", ["tcp://127.0.0.1:1", "tcp://169.254.169.254:80", "tcp://127.0.0.1:1?key={stranger}", "ftp://x"]
)
def test_decode_dials_nobody_it_does_not_know(site: Site, control: str) -> None:
    """vllm#45230: even with the proxy's secret, a request cannot send a worker to any address."""
    control = control.replace("{stranger}", site.lines["stranger"].split()[1])
    params = {"transfer_id": "forged", "leg": "decode", "seed": 1, "created": 1}
    params |= {"prefill": {"name": "prefill-a", "control": control}}
    status, body = site.complete("decode-a", PROXY, kv_transfer_params=params)
    expected = (400, "invalid_request") if control == "ftp://x" else (403, "peer_not_allowed")
    assert (status, body["error"]["code"]) == expected
    assert site.complete()[0] == 200


def test_worker_taken_off_the_allow_list_is_out_without_a_restart(site: Site) -> None:
    assert site.complete()[0] == 200
    site.allow_only("prefill-a")
    until(lambda: site.complete()[0] == 502, "prefill refuses decode")
    site.allow_only("prefill-a", "decode-a")
    until(lambda: site.complete()[0] == 200, "decode is back")
