"""What is wrong with a deployment: found in one place, and told alike by /health, page, `top` and doctor."""

from __future__ import annotations

import asyncio
import io
import shlex
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pdlink.cli import main
from pdlink.doctor import command
from pdlink.observe.findings import Finding
from pdlink.observe.top import picture
from pdlink_proxy.findings import find, sentence
from pdlink_proxy.page.view import summary_of
from tests.proxy.fakes import FakeWorker, Proxy, proxy_of, until
from tests.proxy.test_mismatches import NEW, OLD
from tests.proxy.test_page import record, report, sent, worker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Played = Callable[[Proxy, FakeWorker, FakeWorker], Awaitable[None]]


def found(**more: Any) -> list[Finding]:
    reports = more.pop("reports", {})
    given: dict[str, Any] = {
        "status": "ok",
        "reason": "",
        "refused_pairs": [],
        "mismatched": [],
        "recent": [record()],
    }
    given |= {"workers": [worker("prefill-0"), worker("decode-0")], **more}
    return find(**given, summary=summary_of(given["recent"], reports))


def saying(label: str, **health: Any) -> dict[str, Any]:
    said = worker(label, url=f"http://10.0.0.1/{label}")
    return said | {"health": said["health"] | health}


def test_of_a_healthy_deployment_nothing_is_found() -> None:
    assert found() == []
    assert sentence([], 2) == ""


REFUSED = {"prefill": "prefill-0", "decode": "decode-0", "factor": "dtype", "local": "f16", "remote": "f32"}
KINDS = {"factor": "layout", "prefill": "prefill-0", "num_prefill": 1, "decode": "decode-0", "num_decode": 1}


@pytest.mark.parametrize(
    ("more", "level", "about", "text", "remedy"),
    [
        ({"status": "unavailable", "reason": "none is healthy"}, "bad", "proxy", "can be served: none", ""),
        ({"workers": [worker("decode-0")]}, "bad", "proxy", "lists no prefill worker", "--prefill URL"),
        ({"recent": [record(1), record(2, outcome="broken")]}, "bad", "requests", "50% of 2 requests ended as", "r2"),
        (
            {"workers": [worker("prefill-0"), worker("decode-0", state="refuses our key")]},
            "warn",
            "decode-0",
            "http://decode-0 is refuses our key",
            "worker_key_file",
        ),
        (
            {"workers": [worker("prefill-0"), worker("decode-0", state="unreachable", reason="gone", health=None)]},
            "warn",
            "decode-0",
            "is unreachable: gone",
            "start it, or correct its URL",
        ),
        (
            {"workers": [worker("prefill-0", left_out="9 of 10 legs failed"), worker("decode-0")]},
            "warn",
            "prefill-0",
            "leaves it alone for a while: 9 of 10",
            "log",
        ),
        (
            {"workers": [worker("prefill-0", no_kv_events="none came from tcp://a:5557"), worker("decode-0")]},
            "warn",
            "prefill-0",
            "none came from tcp://a:5557",
            "kv_events",
        ),
        (
            {"workers": [saying("prefill-0", control="tcp://127.0.0.1:8500?key=a"), saying("decode-0")]},
            "bad",
            "prefill-0",
            "reach it at tcp://127.0.0.1:8500, which is loopback",
            "listen.advertise",
        ),
        (
            {"workers": [worker("prefill-0"), saying("decode-0", problems={"disk": "no room"})]},
            "warn",
            "decode-0",
            "its disk keeps less KV than the settings say: no room",
            "max_local_disk_size",
        ),
        (
            {"workers": [worker("prefill-0"), saying("decode-0", problems={"memory": "stays at 64 MiB"})]},
            "warn",
            "decode-0",
            "its memory keeps less KV",
            "max_local_cpu_size",
        ),
        (
            {"workers": [worker("prefill-0"), saying("decode-0", problems={"valkey-2": "contains failed: no"})]},
            "warn",
            "decode-0",
            "its valkey-2 keeps less KV",
            "that tiers.remote_url is right",
        ),
        (
            {
                "workers": [
                    saying("prefill-0", name="same", control="tcp://10.0.0.1:1"),
                    saying("decode-0", name="same", control="tcp://10.0.0.1:2"),
                ]
            },
            "bad",
            "same",
            "have one name",
            "set `name`",
        ),
        (
            {"workers": [saying("prefill-0", model="alpha"), saying("decode-0")]},
            "bad",
            "decode workers",
            "they serve m, and no prefill worker does: those serve alpha",
            "same --model",
        ),
        ({"refused_pairs": [REFUSED]}, "warn", "prefill-0 → decode-0", "dtype differs: f16 and f32", "same model"),
        ({"mismatched": [KINDS | {"stranded": ""}]}, "warn", "prefill-0 → decode-0", "layout differs", "KV cache"),
        ({"mismatched": [KINDS | {"stranded": "decode"}]}, "bad", "prefill-0 → decode-0", "fit nobody", "KV cache"),
        (
            {"recent": [record(1), record(2, kv="recomputed;reason=not_connected")]},
            "warn",
            "requests",
            "50% of 2 requests computed their prompt on decode: decode cannot connect",
            "listen.advertise",
        ),
        (
            {"recent": [record(1), record(2, kv="recomputed;reason=refused:model")]},
            "warn",
            "requests",
            "the two workers differ",
            "same model",
        ),
    ],
)  # fmt: skip
def test_each_cause_is_found_with_what_to_do(
    more: dict[str, Any], level: str, about: str, text: str, remedy: str
) -> None:
    first = found(**more)[0]
    assert (first.level, first.about) == (level, about)
    assert text in first.text
    assert remedy in first.remedy


def test_what_is_meant_so_is_not_found() -> None:
    assert found(workers=[worker("prefill-0"), worker("decode-0"), worker("decode-1", state="draining")]) == []
    assert found(recent=[record(kv="recomputed;reason=short_prompt")]) == []
    assert found(recent=[record(outcome="client_left"), record(outcome="rejected")]) == []
    few = [*(record(number) for number in range(99)), record(99, kv="recomputed;reason=peer_lost")]
    assert found(recent=few) == [], "one of a hundred is told in what happened"
    both = saying("both", control="tcp://10.0.0.1:1")
    assert found(workers=[{**both, "side": "prefill"}, {**both, "side": "decode"}]) == []
    plain = worker("decode-1", plain=True, health={"name": "x", "model": "other", "control": ""})
    assert found(workers=[worker("prefill-0"), worker("decode-0"), plain]) == []
    assert found(workers=[{**plain, "side": "decode"}]) == [], "plain servers serve all"


def test_an_id_that_a_client_chose_is_quoted_in_the_command() -> None:
    (first,) = found(recent=[record(1, outcome="failed", request_id="$(reboot); a 'b")])
    assert shlex.split(first.command) == ["pdlink", "explain", "$(reboot); a 'b", "--proxy", "PROXY"]


def test_the_newest_of_a_reason_is_a_request_that_was_recomputed() -> None:
    (first,) = found(recent=[record(1, kv="recomputed"), record(2, kv="transferred")])
    assert first.command == "pdlink explain r1 --proxy PROXY"


def test_a_worker_that_says_nonsense_is_no_reason_to_fail() -> None:
    assert found(workers=[saying("prefill-0", control="tcp://[::1"), saying("decode-0", control=("", "x"))]) == []


def test_the_worst_comes_first_and_many_of_a_kind_are_counted() -> None:
    gone = [worker(f"decode-{number}", state="unreachable", reason="gone") for number in range(500)]
    several = found(workers=[worker("prefill-0"), *gone], recent=[record(1, outcome="failed")])
    assert [each.kind for each in several] == ["failed", *["away"] * 16]
    assert several[1].others == 499
    assert sentence(several[1:], 501).startswith("500 of 501 workers are away: decode-0, http://decode-0 is unreach")


def test_the_link_is_blamed_only_if_prefill_does_not_hide_it() -> None:
    def kinds(*, number: int = 10, **more: float) -> list[str]:
        reports = {"http://prefill-0": report(ended=[sent(**more)] * number)}
        return [each.kind for each in found(reports=reports)]

    assert kinds(moving_s=0.1, exposed_s=0.05) == ["link"]
    assert kinds(exposed_s=0.0001) == []
    assert kinds(moving_s=0.05, exposed_s=0.029) == [], "29 ms of 600 until the first token"
    quick = [record(ttft_s=0.02)]
    reports = {"http://prefill-0": report(ended=[sent(moving_s=0.001, exposed_s=0.002)] * 10)}
    assert found(recent=quick, reports=reports) == [], "2 ms"
    assert kinds(moving_s=0.1, exposed_s=0.05, number=9) == []
    assert kinds(moving_s=0.0, exposed_s=0.0) == [], "nothing moved"


# ---- told alike


async def gone(proxy: Proxy, _: FakeWorker, decode: FakeWorker) -> None:
    await decode.stop()
    await until(lambda: proxy.router.services.standing()[0] == "unavailable", "the proxy misses it")


async def failing(proxy: Proxy, _: FakeWorker, decode: FakeWorker) -> None:
    decode.break_after = 1
    await proxy.stream()
    await until(lambda: proxy.router.services.standing()[0] == "ok", "it is heard again")


async def misfit(proxy: Proxy, prefill: FakeWorker, decode: FakeWorker) -> None:
    prefill.fingerprint, decode.fingerprint, prefill.epoch, decode.epoch = NEW, OLD, "e2", "e2"
    await until(lambda: proxy.router.services.standing()[0] == "degraded", "the comparison")


async def refusing(proxy: Proxy, prefill: FakeWorker, decode: FakeWorker) -> None:
    decode.refused = [{"peer": prefill.name, "factor": "dtype", "local": "f16", "remote": "f32"}]
    await until(lambda: len(proxy.router.services.pools.refusals) == 1, "the refusal is known")


async def full(proxy: Proxy, prefill: FakeWorker, _: FakeWorker) -> None:
    prefill.problems = {"disk": "No space left on device"}
    workers = proxy.router.services.pools.all
    await until(lambda: any(each.health is not None and each.health.problems for each in workers), "it is said")


async def recomputing(proxy: Proxy, _: FakeWorker, decode: FakeWorker) -> None:
    decode.kv = "recomputed;reason=not_connected"
    await proxy.stream()


@pytest.mark.parametrize("play", [gone, failing, misfit, refusing, full, recomputing])
async def test_health_page_top_and_doctor_tell_the_same_cause(
    play: Played, prefill: FakeWorker, decode: FakeWorker
) -> None:
    async with proxy_of([prefill], [decode], health_interval_s=0.05, retries=0) as proxy:
        await play(proxy, prefill, decode)

        async def asked(path: str) -> Any:
            async with proxy.client.get(proxy.url + path) as response:
                return await response.json()

        health, state = await asked("/health"), await asked("/pdlink/state")
        looked = await asyncio.to_thread(command._deployment, proxy.url, None, 16, 0)
    first = health["findings"][0]
    assert first["text"] in state["verdict"]["text"][:1].lower() + state["verdict"]["text"][1:]
    assert first["remedy"] in state["verdict"]["text"]
    assert state["verdict"]["level"] == first["level"]
    assert [each.text for each in looked.findings] == [each["text"] for each in health["findings"]]
    assert [each["text"] for each in state["findings"]] == [each["text"] for each in health["findings"]]
    out = io.StringIO()
    Console(width=400, file=out).print(picture(state, 400))
    shown = out.getvalue()
    assert state["verdict"]["text"] in shown
    assert all(each["text"] in shown for each in state["findings"][1:5])


async def test_doctor_ends_with_the_command_to_run(
    prefill: FakeWorker, decode: FakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    async with proxy_of([prefill], [decode], retries=0) as proxy:
        await failing(proxy, prefill, decode)
        newest = proxy.router.services.records[-1].request_id
        assert await asyncio.to_thread(main, ["doctor", proxy.url, "--pairs", "0"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"next: pdlink explain {newest} --proxy {proxy.url}"
