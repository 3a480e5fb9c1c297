"""Findings about the pairs of a deployment, and what becomes of what its proxy tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdlink.doctor import command
from pdlink.doctor.deployment import of_pairs
from pdlink.observe.findings import Finding, of_places


def worker(
    label: str, url: str, *, state: str = "ok", name: str = "", control: str = "tcp://10.0.0.1:1", **said: Any
) -> Any:
    health = {"name": name or label, "control": control, "model": "m", **said}
    return {"label": label, "url": url, "state": state, "heard_s_ago": 0.0, "health": health}


def probe(decode: str, *, kv: str = "transferred", nbytes: int = 10**8, moving_s: float = 0.1, **more: str) -> Any:
    fields = {"prefill": "prefill-0", "decode": decode, "kv": kv, "error": "", "factor": "", "transfer_id": "x"}
    return {**fields, "lane": "tcp", "nbytes": nbytes, "moving_s": moving_s, **more}


def test_a_place_of_a_store_process_that_keeps_less_than_its_settings_say_is_found() -> None:
    [found] = of_places("store", {"disk": "takes no more"})
    assert (found.level, found.about) == ("warn", "store")
    assert "its disk keeps less KV than the settings say: takes no more" in found.text


def test_a_pair_much_slower_than_the_others_is_found_with_its_lane() -> None:
    probes = [probe("decode-0"), probe("decode-1"), probe("decode-2", moving_s=1.0)]
    [found] = of_pairs(probes)
    assert (found.level, found.about, found.command) == ("warn", "prefill-0 → decode-2", "pdlink bench transfer")
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


def test_a_pair_that_looks_slow_is_measured_again_before_it_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host one transfer of four was slow, and doctor ended with 1."""
    asked: list[str] = []

    def answered(_url: str, path: str, _headers: object, body: Any = None) -> Any:
        if path == "/health":
            return {
                "prefill": [worker("prefill-0", "http://10.0.0.1:1")],
                "decode": [worker(f"decode-{n}", f"http://10.0.1.{n}:1") for n in range(5)],
            }
        assert path == "/pdlink/probe"
        asked.append(body["decode"])
        first = asked.count(body["decode"]) == 1
        slow = {"decode-1": first, "decode-2": True}.get(body["decode"], False)
        return {**probe(body["decode"], moving_s=10.0 if slow else 0.1), "exposed_s": 0.0, "took_s": 1.0}

    monkeypatch.setattr(command, "_fetched", answered)
    findings, pairs, *_ = command._deployment("http://proxy", None, 512, 16)
    assert [each.about for each in findings] == ["prefill-0 → decode-2"]
    assert asked.count("decode-0") == 1
    assert asked.count("decode-1") == 2
    assert asked.count("decode-2") == 1 + command._TIMES_AGAIN
    assert [round(each["gb_per_s"], 2) for each in pairs] == [1.0, 1.0, 0.01, 1.0, 1.0]


def test_a_misfit_that_a_probe_has_found_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = probe("decode-0", kv="recomputed;reason=refused:dtype", nbytes=0, moving_s=0.0, factor="dtype")
    known = [
        Finding("bad", "prefill-0 → decode-0", "they do not fit together, model, revision or content differs", "no"),
        Finding("warn", "decode-0", "its disk keeps less", "free room", command="pdlink cache stats http://d"),
    ]

    def answered(_url: str, path: str, _headers: object, body: Any = None) -> Any:
        if path == "/health":
            return {
                "prefill": [worker("prefill-0", "http://10.0.0.1:1")],
                "decode": [worker("decode-0", "http://10.0.0.2:1")],
                "findings": list(map(msgspec.structs.asdict, known)),
            }
        assert path == "/pdlink/probe"
        return {**refused, "local": "a", "remote": "b", "exposed_s": 0.0, "took_s": 1.0}

    monkeypatch.setattr(command, "_fetched", answered)
    findings = command._deployment("http://proxy", None, 512, 16).findings
    assert [each.about for each in findings] == ["decode-0", "prefill-0 → decode-0"]
    assert findings[0] == known[1]
    assert "dtype differs" in findings[1].text
