"""`pdlink doctor` of a real deployment, healthy and not, and of machines and settings."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlink.cli import main
from tests.waiting import until

from .deployment import Deployment, request, worker_settings

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """decode-1 has other weights; decode-2 is there to be killed."""
    workers = {"prefill-0": worker_settings("prefill"), "decode-0": worker_settings("decode")}
    workers["decode-1"] = worker_settings("decode", model={"num_layers": 8, "seed": 1})
    workers["decode-2"] = worker_settings("decode")
    with Deployment.launch(workers) as deployment:
        yield deployment


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["doctor", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_each_pair_is_measured_and_what_is_wrong_is_told_worst_first(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.kill("decode-2")
    proxy = deployment.url("proxy")
    until(lambda: request(proxy + "/health").body["decode"][2]["state"] == "unreachable", "the proxy misses it")
    status, found = doctor(capsys, proxy, "--tokens", "300")
    assert status == 1
    well, other = found["pairs"]
    assert (well["prefill"], well["decode"], well["kv"]) == ("prefill-0", "decode-0", "transferred")
    # 8 layers, K and V, 4 heads of 32, float32; the last token is decode's
    assert well["nbytes"] == 299 * 8 * 2 * 4 * 32 * 4 or well["nbytes"] == 300 * 8 * 2 * 4 * 32 * 4
    assert well["lane"]
    assert well["gb_per_s"] > 0
    assert other["decode"] == "decode-1"
    assert other["kv"] == "recomputed;reason=refused:revision"
    about = {each["about"]: each for each in found["findings"]}
    assert set(about) == {"decode-2", "prefill-0 → decode-1"}
    assert "unreachable" in about["decode-2"]["text"]
    assert "start it again" in about["decode-2"]["remedy"]
    text = about["prefill-0 → decode-1"]["text"]
    assert "revision differs" in text
    assert "seed-0" in text
    assert "seed-1" in text
    assert found["transports"]["tcp"]["usable"]
    assert request(proxy + "/pdlink/state").body["requests"] == [], "a probe is no client's request"


def test_the_report_for_people_says_the_same(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["doctor", deployment.url("proxy").removeprefix("http://")]) == 1
    out = capsys.readouterr().out
    assert "✗ prefill-0 → decode-1: they do not fit together, revision differs" in out
    assert "→ start both with the same model, revision and dtype" in out
    assert "transferred" in out


def test_a_probe_of_what_is_not_there_is_refused_with_what_is(deployment: Deployment) -> None:
    url = deployment.url("proxy") + "/pdlink/probe"
    for body, words in (
        ({"prefill": "prefill-9", "decode": "decode-0"}, "there are prefill-0"),
        ({"prefill": "prefill-0", "decode": "decode-0", "num_tokens": 10**6}, "an integer from 1 to 8192"),
        ({"prefill": "prefill-0"}, "decode"),
    ):
        answer = request(url, body)
        assert answer.status == 400
        assert words in answer.body["error"]["message"]


def test_a_worker_that_dies_while_it_is_measured_is_an_answer(deployment: Deployment) -> None:
    body = {"prefill": "prefill-0", "decode": "decode-2"}
    answer = request(deployment.url("proxy") + "/pdlink/probe", body)
    assert answer.status == 200
    assert answer.body["kv"] == "unknown"
    assert "decode-2" in answer.body["error"]
    until(lambda: deployment.idle("prefill-0"), "prefill holds nothing for it")


def test_a_store_is_examined_and_shows_why_a_place_keeps_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--memory", "5000", "--listen", "127.0.0.1:0", "--socket", str(tmp_path / "s")]
    words += ["--set", "tiers.remote_url=redis://user:secret@127.0.0.1:1"]
    command = [sys.executable, "-m", "pdlink", "store", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        try:
            assert store.stdout is not None
            url = store.stdout.readline().split("ready on ")[1].split(",")[0]

            def texts() -> str:
                status, found = doctor(capsys, url)
                assert status == 1, "its memory is too much for this machine from the begin"
                return "\n".join(each["text"] for each in found["findings"])

            until(lambda: "127.0.0.1:1 " in texts(), "the server was asked until it counts as away")
            assert "may grow to 5,000.0 GiB" in texts()
            assert "secret" not in texts()
            assert main(["cache", "stats", url, "--json"]) == 0
            places = json.loads(capsys.readouterr().out)["places"]
            assert [bool(place["problem"]) for place in places] == [True, True]
        finally:
            store.kill()


def test_a_worker_is_no_proxy_and_nobody_there_is_a_finding(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = doctor(capsys, deployment.url("decode-0"))
    assert status == 1
    assert "is no pdlink proxy" in found["findings"][0]["text"]
    status, found = doctor(capsys, "127.0.0.1:9")
    assert status == 1
    assert "did not answer" in found["findings"][0]["text"]


@pytest.mark.parametrize(
    ("text", "about", "words"),
    [
        ("cache: {num_blok: 5}", "settings", "unknown setting 'cache.num_blok'"),
        ("transport: {kind: ucx, ucx: {library: 'off'}}", "transport", "cannot work here"),
        ("listen: 0.0.0.0\nsecurity: {insecure: true}", "security", "lets other hosts in"),
        ("listen: 0.0.0.0\nsecurity: {insecure: true}", "security", "who reaches its HTTP port may use it"),
        ("tiers: {local_disk: /proc/version/kv, max_local_disk_size: 1}", "disk", "no directory that can"),
        ("tiers: {max_local_cpu_size: 1000000}", "memory", "are free"),
        (
            "tiers: {max_local_cpu_size: 0.1, remote_url: 'redis://u:secret@127.0.0.1:9'}",
            "remote tier",
            "//127.0.0.1:9 does not",
        ),
        ("tiers: {max_local_cpu_size: 0.1, remote_url: 'redis://u:secret@[::1'}", "settings", "got no URL"),
        ("tiers: {max_local_cpu_size: 0.1, remote_url: 'redis://u:secret@h:port'}", "settings", "got no URL"),
        (
            "tiers: {max_local_cpu_size: 0.1, remote_url: 'file:///proc/version/kv'}",
            "disk",
            "tiers.remote_url: /proc/version is no",
        ),
        (
            "decode: ['http://127.0.0.1:1']\nprefill: []\nworker_key_file: /nonexistent/key",
            "settings",
            "/nonexistent",
        ),
        ("role: decode\non_transfer_failure: fail", "on_transfer_failure", "an error for a client"),
    ],
)
def test_settings_that_look_wrong_are_found_before_a_start(
    text: str, about: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    status, found = doctor(capsys, "--config", str(file))
    assert status == 1
    assert "secret" not in json.dumps(found)
    assert any(each["about"] == about and words in each["text"] and each["remedy"] for each in found["findings"])


def test_http_for_this_host_alone_is_not_said_to_be_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("listen: {http: 127.0.0.1, control: 0.0.0.0}\nsecurity: {insecure: true}")
    _, found = doctor(capsys, "--config", str(file))
    texts = [each["text"] for each in found["findings"] if each["about"] == "security"]
    assert len(texts) == 1
    assert "listen.control = 0.0.0.0 lets other hosts in" in texts[0]


def test_a_port_that_is_taken_is_found_before_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "settings.yaml"
        file.write_text(f"role: prefill\nlisten: {{control: 127.0.0.1:{taken.getsockname()[1]}}}")
        status, found = doctor(capsys, "--config", str(file))
    assert status == 1
    assert [each["text"].split(":")[0] for each in found["findings"]] == ["listen.control"]


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/*.yaml")), ids=lambda path: path.name)
def test_the_settings_that_come_with_pdlink_look_right(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(capsys, "--config", str(path))
    wrong = [each for each in found["findings"] if "cannot be had" not in each["text"]]  # ports of others here
    assert wrong == []
