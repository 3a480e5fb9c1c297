"""Workers that a directory, names and Kubernetes list."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdlink.errors import ConfigError
from pdlink_proxy.dialects import DIALECTS
from pdlink_proxy.discovery.base import SourceDown
from pdlink_proxy.discovery.dns import DnsSource
from pdlink_proxy.discovery.file import FileSource
from pdlink_proxy.discovery.joined import joined, source_of
from pdlink_proxy.discovery.kubernetes import EndpointSlice, KubernetesSource, members_of
from pdlink_proxy.members import ListedWorker, Members
from pdlink_proxy.steps import Leg
from tests.conformance.discovery.sources import Seen, followed, write
from tests.proxy.fakes import FakeWorker, proxy_of, until
from tests.proxy.kubernetes_server import ApiServer, endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PDLINK = DIALECTS["pdlink"]


# ---- file:


async def test_a_worker_file_that_is_replaced_moves_its_worker(tmp_path: Path) -> None:
    async with followed(FileSource(str(tmp_path), PDLINK, look_s=0.01)) as seen:
        await until(lambda: bool(seen.lists), "the empty list")
        write(tmp_path, "a", role="prefill", url="http://a:1", cell="rack1")
        await until(lambda: seen.urls == ["http://a:1"], "the worker")
        assert seen.lists[-1].prefill[0].cell == "rack1"
        write(tmp_path, "a", role="prefill", url="http://c:1")  # another address after a restart
        await until(lambda: seen.urls == ["http://c:1"], "the new address")


async def test_what_files_list_is_told_at_the_first_look(tmp_path: Path) -> None:
    write(tmp_path, "a", role="prefill", url="http://a:1")
    async with followed(FileSource(str(tmp_path), PDLINK, look_s=3600)) as seen:
        await until(lambda: bool(seen.lists), "the first list")
        assert seen.urls == ["http://a:1"]


async def test_a_file_that_breaks_keeps_what_it_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a", role="prefill", url="http://a:1")
    async with followed(FileSource(str(tmp_path), PDLINK, look_s=0.01)) as seen:
        await until(lambda: seen.urls == ["http://a:1"], "the worker")
        (tmp_path / "a.json").write_text('{"role": "pre')
        (tmp_path / "bad.json").write_text('{"role": "king", "url": "http://k:1"}')
        write(tmp_path, "b", role="decode", url="http://b:1")
        await until(lambda: seen.urls == ["http://a:1", "http://b:1"], "the next worker")
        write(tmp_path, "a", role="prefill", url="http://new:1")
        await until(lambda: sorted(seen.urls) == ["http://b:1", "http://new:1"], "the repaired file")
    about = [each for each in caplog.records if "a.json" in each.getMessage()]
    assert ["is not used" in about[0].getMessage(), "is used again" in about[1].getMessage()] == [True, True]
    assert [each.levelname for each in about] == ["WARNING", "WARNING"]


# ---- dns:


async def test_each_address_of_a_name_is_one_worker() -> None:
    async def resolve(host: str, _port: int) -> list[str]:
        return {"p": ["10.0.0.2", "10.0.0.1", "10.0.0.1"], "d": ["fd00::1"]}[host]

    async with followed(DnsSource("prefill=p:80,decode=d:81", resolve=resolve)) as seen:
        await until(lambda: bool(seen.lists), "the addresses")
        assert seen.urls == ["http://10.0.0.1:80", "http://10.0.0.2:80", "http://[fd00::1]:81"]


# ---- kubernetes:


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, *, watch_s: int = 60, **server: Any) -> AsyncIterator[tuple[ApiServer, Seen]]:
    (tmp_path / "token").write_text("t1\n")
    (tmp_path / "namespace").write_text("ns")
    async with ApiServer(**server) as api:
        api.put("p-1", "pre", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=None))
        api.put("d-1", "dec", endpoint("10.0.1.1"))
        api.put("x-1", "other", endpoint("10.9.9.9"))
        text = "prefill=pre,decode=dec,port=http"
        async with followed(KubernetesSource(text, api=api.url, account=tmp_path, watch_s=watch_s)) as seen:
            await until(lambda: api.watches == 1, "the watch")
            assert seen.urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.1.1:8000"]
            yield api, seen


def drained(seen: Seen) -> list[str]:
    return [each.url for each in (*seen.lists[-1].prefill, *seen.lists[-1].decode) if each.drain]


async def test_a_pod_that_is_not_ready_or_terminates_gets_no_new_request(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, seen):
        api.put("p-1", "pre", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2"))
        await until(lambda: drained(seen) == ["http://10.0.0.1:8000"], "the pod that is not ready")
        api.put("p-1", "pre", endpoint("10.0.0.1"), endpoint("10.0.0.2", terminating=True))
        await until(lambda: drained(seen) == ["http://10.0.0.2:8000"], "the terminating pod")
        assert api.lists == 1


async def test_an_address_in_two_slices_is_one_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, seen):
        api.put("p-2", "pre", endpoint("10.0.0.1", ready=False), endpoint("10.0.0.3"))
        await until(lambda: len(seen.urls) == 4, "the second slice")
        assert drained(seen) == []
        api.delete("p-1")
        await until(lambda: seen.urls == ["http://10.0.0.1:8000", "http://10.0.0.3:8000", "http://10.0.1.1:8000"])
        assert drained(seen) == ["http://10.0.0.1:8000"]


async def test_a_deletion_that_never_came_is_found_by_the_next_list(tmp_path: Path) -> None:
    async with cluster(tmp_path, watch_s=1) as (api, seen):
        api.mute = True
        api.delete("p-1")
        api.mute = False
        await until(lambda: seen.urls == ["http://10.0.1.1:8000"], "the next list")
        assert not seen.stale


@pytest.mark.parametrize("how", ["an event", "the answer"])
async def test_a_version_that_was_forgotten_is_listed_again(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path) as (api, seen):
        api.mute = True
        api.delete("d-1")
        if how == "an event":
            api.say("ERROR", {"kind": "Status", "code": 410})
        else:
            api.forget()
            api.cut()
        await until(lambda: seen.urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"], "the list")
        assert not seen.stale


async def test_bookmarks_change_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, seen):
        before = len(seen.lists)
        api.say("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": "99"}})
        api.delete("d-1")
        await until(lambda: len(seen.lists) > before, "the change behind it")
        assert (len(seen.lists), api.lists) == (before + 1, 1)


@pytest.mark.parametrize(
    "garbage", [b"<html>", b"[]", b'{"metadata": {}, "items": [{"metadata": 7}]}', b"[" * 100_000]
)
async def test_another_answer_than_a_list_empties_no_pool(tmp_path: Path, garbage: bytes) -> None:
    async with cluster(tmp_path) as (api, seen):
        urls = seen.urls
        api.garbage = garbage
        api.cut()
        await until(lambda: seen.stale, "the mark")
        assert seen.urls == urls


async def test_a_new_token_is_read_from_its_file(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, seen):
        api.token = "t2"
        api.cut()
        await until(lambda: seen.stale, "the refusal")
        (tmp_path / "token").write_text("t2\n")
        await until(lambda: not seen.stale, "the new token")
        assert len(seen.urls) == 3


async def test_outside_a_pod_the_reason_names_the_missing_file(tmp_path: Path) -> None:
    async with followed(KubernetesSource("prefill=pre", account=tmp_path)) as seen:
        await until(lambda: "has not answered" not in seen.discovery.describe()["it"]["reason"], "the reason")
        reason = seen.discovery.describe()["it"]["reason"]
        assert reason.startswith(
            f"cannot read {tmp_path / 'ca.crt'}: No such file or directory; run the proxy in a pod"
        )


async def test_a_long_list_comes_in_pages(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t1")
    async with ApiServer(page=3) as api:
        for number in range(10):
            api.put(f"p-{number}", "pre", *(endpoint(f"10.0.{number}.{host}") for host in range(20)))
        text = "prefill=pre,namespace=ns,port=http"
        async with followed(KubernetesSource(text, api=api.url, account=tmp_path)) as seen:
            await until(lambda: len(seen.urls) == 200, "all pages")
            assert len(seen.lists) == 1


def slice_of(service: str, address: str, **ports: int) -> EndpointSlice:
    named = [{"name": name.replace("_", "-"), "port": port} for name, port in ports.items()]
    said = {"metadata": {"labels": {"kubernetes.io/service-name": service}}, "ports": named}
    return msgspec.convert(said | {"endpoints": [endpoint(address)]}, EndpointSlice)


def test_ports_by_name_are_control_addresses_of_prefill_workers_in_the_order_of_ranks() -> None:
    slices = {
        "p": slice_of("pre", "10.0.0.1", control_1=8102, http=8100, control=8101),
        "6": slice_of("pre", "fd00::1", http=8100, control=8101),
        "none": slice_of("pre", "10.0.0.3", http=8100),
        "d": slice_of("dec", "10.0.1.1", http=8100, control=8101),
    }
    found = members_of(slices, {"pre": "prefill", "dec": "decode"}, "http", "control", "rack-1")
    assert found.prefill == (
        ListedWorker("http://10.0.0.1:8100", control=("tcp://10.0.0.1:8101", "tcp://10.0.0.1:8102"), cell="rack-1"),
        ListedWorker("http://[fd00::1]:8100", control=("tcp://[fd00::1]:8101",), cell="rack-1"),
    )
    assert found.decode == (ListedWorker("http://10.0.1.1:8100", cell="rack-1"),)
    assert not members_of(slices, {"pre": "prefill"}, "http").prefill[0].control


def test_a_port_by_name_is_where_the_store_of_a_worker_is_asked() -> None:
    slices = {
        "p": slice_of("pre", "10.0.0.1", http=8100, control=8101, lends=8110),
        "6": slice_of("pre", "fd00::1", http=8100, control=8101),
        "d": slice_of("dec", "10.0.1.1", http=8100, lends=8110),
    }
    text = "prefill=pre,decode=dec,port=http,control=control"
    found = KubernetesSource(f"{text},store=lends")._members(slices)
    stores = [each.store for each in (*found.prefill, *found.decode)]
    assert stores == ["tcp://10.0.0.1:8110", "", "tcp://10.0.1.1:8110"]
    assert not KubernetesSource(text)._members(slices).prefill[0].store


# ---- together


def test_a_worker_of_two_sources_is_one_and_drains_if_either_says_so() -> None:
    one = Members(prefill=(ListedWorker("http://a:1", cell="r1"),), decode=(ListedWorker("http://b:1"),))
    other = Members(prefill=(ListedWorker("http://a:1/", drain=True, cell="r2"), ListedWorker("http://c:1")))
    both = joined([one, other])
    assert both.prefill == (ListedWorker("http://a:1", drain=True, cell="r1"), ListedWorker("http://c:1"))
    assert both.decode == one.decode


async def test_a_source_that_flaps_costs_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    class Flaps:
        turns = 0

        async def follow(self, tell: Callable[[Members], None]) -> None:
            self.turns += 1
            tell(Members(decode=(ListedWorker("http://a:1"),)))
            raise SourceDown("again")

    source = Flaps()
    async with followed(source) as seen:
        await until(lambda: source.turns >= 5, "some turns")
        assert {tuple(members.decode) for members in seen.lists} == {(ListedWorker("http://a:1"),)}
    told = [(each.levelname, each.getMessage().split(",")[0]) for each in caplog.records][:2]
    assert [level for level, _ in told] == ["ERROR", "ERROR"], "a recovery is as loud as its failure"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("etcd:x", "expected file:PATH"),
        ("dns:prefill=host", "expected ROLE=HOST:PORT"),
        ("dns:king=host:1", "expected ROLE=HOST:PORT"),
        ("kubernetes:prefill=a,decode=a", "another Service"),
        ("kubernetes:port=http", "expected ROLE=SERVICE"),
        ("kubernetes:prefill", "NAME=VALUE"),
    ],
)
def test_a_wrong_source_is_refused_with_its_form(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source_of(text, PDLINK)


def test_a_dialect_with_control_addresses_needs_a_source_that_has_them() -> None:
    for text in ("dns:prefill=p:1", "kubernetes:prefill=p,port=http"):
        with pytest.raises(ConfigError, match="use file:PATH"):
            source_of(text, DIALECTS["vllm"])
    source_of("kubernetes:prefill=p,control=control", DIALECTS["vllm"])
    source_of("kubernetes:decode=d", DIALECTS["vllm"])  # nobody dials those
    with pytest.raises(ConfigError, match="expected control=NAME for dialect: vllm"):
        source_of("kubernetes:prefill=p,control=control", PDLINK)
    source_of("file:/tmp", DIALECTS["vllm"])


async def test_the_proxy_serves_what_a_directory_lists(
    tmp_path: Path, prefill: FakeWorker, decodes: list[FakeWorker]
) -> None:
    write(tmp_path, "p", role="prefill", url=prefill.url)
    write(tmp_path, "d", role="decode", url=decodes[0].url)
    async with proxy_of([], [], settled=False, discover=[f"file:{tmp_path}"]) as proxy:
        await until(lambda: proxy.router.services.standing()[0] == "ok", "the workers")
        await proxy.stream()
        write(tmp_path, "d", role="decode", url=decodes[1].url)
        await until(
            lambda: [w.url for w in proxy.router.services.pools.usable(Leg.DECODE)] == [decodes[1].url], "the other"
        )
        await proxy.stream()
        assert [len(worker.received) for worker in decodes] == [1, 1]
        async with proxy.client.get(f"{proxy.url}/health") as response:
            (source,) = (await response.json())["sources"].values()
        assert source | {"heard_s_ago": 0} == {
            "stale": False,
            "reason": "",
            "heard_s_ago": 0,
            "workers": {"prefill": 1, "decode": 1, "both": 0},
        }
