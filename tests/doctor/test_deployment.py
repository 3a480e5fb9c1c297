"""Findings about a deployment, from what its proxy says."""

from __future__ import annotations

from typing import Any

import pytest

from pdlink.doctor import command
from pdlink.doctor.deployment import Finding, of_pairs, of_places, of_proxy, of_requests, worst_first


def worker(
    label: str, url: str, *, state: str = "ok", name: str = "", control: str = "tcp://10.0.0.1:1", **said: Any
) -> Any:
    health = {"name": name or label, "control": control, "model": "m", **said}
    return {"label": label, "url": url, "state": state, "reason": "why", "fails": False, "health": health}


def probe(decode: str, *, kv: str = "transferred", nbytes: int = 10**8, moving_s: float = 0.1, **more: str) -> Any:
    fields = {"prefill": "prefill-0", "decode": decode, "kv": kv, "error": "", "factor": "", "transfer_id": "x"}
    return {**fields, "lane": "tcp", "nbytes": nbytes, "moving_s": moving_s, **more}


def test_a_healthy_deployment_has_no_findings() -> None:
    health = {"prefill": [worker("p", "http://10.0.0.1:1")], "decode": [worker("d", "http://10.0.0.2:1")]}
    assert of_proxy(health) == []
    assert of_pairs([probe("decode-0"), probe("decode-1")]) == []


def test_a_worker_that_others_are_told_to_find_at_loopback_is_found() -> None:
    prefill = worker("p", "http://10.0.0.1:1", control="tcp://127.0.0.1:8500?key=abc")
    [found] = of_proxy({"prefill": [prefill], "decode": [worker("d", "http://10.0.0.2:1")]})
    assert found.level == "bad"
    assert "tcp://127.0.0.1:8500, which is loopback" in found.text
    assert "listen.advertise" in found.remedy


def test_a_place_that_keeps_less_than_its_settings_say_is_found() -> None:
    decode = worker("d", "http://10.0.0.2:1", problems={"disk": "no room", "memory": "stays at 64 of 128 MiB"})
    found = of_proxy({"prefill": [worker("p", "http://10.0.0.1:1")], "decode": [decode]})
    assert [one.level for one in found] == ["warn", "warn"]
    assert "its disk keeps less KV than the settings say: no room" in found[0].text
    assert "max_local_disk_size" in found[0].remedy
    assert "max_local_cpu_size" in found[1].remedy


def test_a_place_of_a_store_process_that_keeps_less_than_its_settings_say_is_found() -> None:
    [found] = of_places("store", {"role": "store", "problems": {"disk": "takes no more"}})
    assert (found.level, found.about) == ("warn", "store")
    assert "its disk keeps less KV than the settings say: takes no more" in found.text


def test_two_workers_of_one_name_are_found() -> None:
    both = [worker("p", "http://a:1", name="same"), worker("q", "http://b:1", name="same")]
    [found] = of_proxy({"prefill": both, "decode": [worker("d", "http://c:1")]})
    assert (found.about, found.remedy) == ("same", "set `name`")
    one = worker("x", "http://a:1", name="same")
    assert of_proxy({"prefill": [one], "decode": [one]}) == [], "a worker of both roles is on both sides"


def test_a_worker_whose_kv_events_do_not_come_is_found() -> None:
    prefill = {**worker("p", "http://a:1"), "no_kv_events": "it computed prompts, and none came from tcp://a:5557"}
    [found] = of_proxy({"prefill": [prefill], "decode": [worker("d", "http://c:1")]})
    assert (found.level, found.about) == ("warn", "p")
    assert "tcp://a:5557" in found.text
    assert "kv_events" in found.remedy


def test_a_side_without_workers_and_one_that_is_away_are_found() -> None:
    found = of_proxy({"prefill": [], "decode": [worker("d", "http://c:1", state="refuses our key")]})
    assert [each.about for each in found] == ["proxy", "d"]
    assert "worker_key_file" in found[1].remedy


def test_a_pair_much_slower_than_the_others_is_found_with_its_lane() -> None:
    probes = [probe("decode-0"), probe("decode-1"), probe("decode-2", moving_s=1.0)]
    [found] = of_pairs(probes)
    assert found == Finding("warn", "prefill-0 → decode-2", found.text, found.remedy)
    assert found.text.startswith(
        "0.10 GB/s over tcp in the best of several transfers, the median of all pairs is 1.00"
    )
    assert of_pairs([probe("decode-0", nbytes=1000), probe("decode-1", nbytes=1000, moving_s=9)]) == []


@pytest.mark.parametrize(
    ("kv", "more", "text", "remedy"),
    [
        ("recomputed;reason=refused:key", {}, "key differs", "security.allow_file"),
        (
            "recomputed;reason=refused:dtype",
            {"factor": "dtype", "local": "a", "remote": "b"},
            "a and b",
            "same model",
        ),
        ("recomputed;reason=not_connected", {}, "did not cross", "listen.advertise"),
        ("unknown", {}, "does not say", "connector"),
        ("unknown", {"error": "decode-0: 500, no"}, "decode-0: 500, no", "transfer id is x"),
    ],
)
def test_a_pair_whose_kv_did_not_cross_is_found_with_the_remedy(
    kv: str, more: dict[str, str], text: str, remedy: str
) -> None:
    [found] = of_pairs([probe("decode-0", kv=kv, nbytes=0, moving_s=0.0, **more)])
    assert text in found.text
    assert remedy in found.remedy


def test_lost_requests_are_told_and_those_that_were_not_split_on_purpose_are_not() -> None:
    def cause(kind: str, why: str) -> dict[str, object]:
        return {"kind": kind, "cause": why, "count": 3, "newest": "req-1"}

    found = of_requests(
        [cause("recomputed", "short_prompt"), cause("recomputed", "peer_lost"), cause("request", "failed")]
    )
    assert [each.level for each in worst_first(found)] == ["bad", "warn"]
    assert "pdlink explain req-1" in found[1].remedy
    assert of_requests([cause("request", "client_left")]) == []
    [misfit] = of_requests([cause("recomputed", "refused:model")])
    assert "same model" in misfit.remedy, "no word of a prefill worker that is not there"


def test_misfits_that_health_knows_are_told_with_what_differs() -> None:
    prefill, decode = worker("p", "http://10.0.0.1:1"), worker("d", "http://10.0.0.2:1")
    other = {"factor": "layout", "prefill": "p", "num_prefill": 1, "decode": "d", "num_decode": 1}
    [found] = of_proxy({"prefill": [prefill], "decode": [decode], "mismatched": [{**other, "stranded": "decode"}]})
    assert (found.level, found.about) == ("bad", "p → d")
    assert "layout differs" in found.text
    [rolling] = of_proxy({"prefill": [prefill], "decode": [decode], "mismatched": [{**other, "stranded": ""}]})
    assert rolling.level == "warn"
    prefill["health"]["model"] = "alpha"
    [models] = of_proxy({"prefill": [prefill], "decode": [decode]})
    assert models.text == "decode serves m, and no prefill worker does: those serve alpha"


def test_a_pair_that_looks_slow_is_measured_again_before_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host one transfer of four was slow, and doctor ended with 1."""
    asked: list[str] = []

    def answered(_url: str, path: str, _headers: object, body: Any = None) -> Any:
        if path == "/health":
            return {
                "prefill": [worker("prefill-0", "http://10.0.0.1:1")],
                "decode": [worker(f"decode-{n}", f"http://10.0.1.{n}:1") for n in range(5)],
            }
        if path != "/pdlink/probe":
            return {"errors": []}
        asked.append(body["decode"])
        first = asked.count(body["decode"]) == 1
        slow = {"decode-1": first, "decode-2": True}.get(body["decode"], False)
        return {**probe(body["decode"], moving_s=10.0 if slow else 0.1), "exposed_s": 0.0, "took_s": 1.0}

    monkeypatch.setattr(command, "_fetched", answered)
    findings, pairs, _ = command._deployment("http://proxy", None, 512, 16)
    assert [each.about for each in findings] == ["prefill-0 → decode-2"]
    assert asked.count("decode-0") == 1
    assert asked.count("decode-1") == 2
    assert asked.count("decode-2") == 1 + command._TIMES_AGAIN
    assert [round(each["gb_per_s"], 2) for each in pairs] == [1.0, 1.0, 0.01, 1.0, 1.0]


def test_a_misfit_that_a_probe_has_found_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = probe("decode-0", kv="recomputed;reason=refused:dtype", nbytes=0, moving_s=0.0, factor="dtype")
    mismatched = {"factor": "model, revision or content", "prefill": "prefill-0", "decode": "decode-0"}

    def answered(_url: str, path: str, _headers: object, body: Any = None) -> Any:
        if path == "/health":
            return {
                "prefill": [worker("prefill-0", "http://10.0.0.1:1")],
                "decode": [worker("decode-0", "http://10.0.0.2:1")],
                "mismatched": [{**mismatched, "stranded": "prefill"}],
            }
        if path != "/pdlink/probe":
            return {"errors": []}
        return {**refused, "local": "a", "remote": "b", "exposed_s": 0.0, "took_s": 1.0}

    monkeypatch.setattr(command, "_fetched", answered)
    findings, _, _ = command._deployment("http://proxy", None, 512, 16)
    assert [(each.about, "dtype differs" in each.text) for each in findings] == [("prefill-0 → decode-0", True)]
