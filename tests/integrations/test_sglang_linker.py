"""The linker behind SGLang's own prefix tree, KV pools and counter of layers, on a `pdlink store`.

Run with `make test-sglang`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

from pdlink.api.session import encode_session  # noqa: E402
from pdlink.fleet.ports import free_ports  # noqa: E402
from tests.store.process import process  # noqa: E402

from .sglang_process import Engine  # noqa: E402
from .test_sglang_hicache import Store  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(300)]

PAGE = 16

Make = Callable[[], Engine]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(tmp_path_factory.mktemp("store"))
    yield store
    store.kill()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as made:

        def one() -> Engine:
            engine = Engine("sglang_linked", tmp_path / f"{len(list(tmp_path.iterdir()))}.log")
            made.callback(engine.close)
            return engine

        yield one


@pytest.mark.parametrize("latent", [False, True], ids=["K and V", "a latent"])
def test_a_pool_on_a_gpu_and_one_on_the_host_have_the_same_prompts(make: Make, store: Store, latent: bool) -> None:
    """On a GPU attention is launched before anything is copied."""
    gpu, host = make(), make()
    for engine, on_gpu in ((gpu, True), (host, False)):
        engine.send("open", store=store.address, latent=latent, gpu=on_gpu)
    assert [gpu.answer(), host.answer()] == [{"on_gpu": True}, {"on_gpu": False}]
    start = 5000 if latent else 1000
    assert gpu("store", start=start, pages=4) == {"offered": 1, "left": 0}
    assert host("store", start=start + 2000, pages=3) == {"offered": 1, "left": 0}
    for engine, more in ((gpu, {"launched": True}), (host, {})):
        engine("forget")
        assert engine("fetch", start=start, pages=4) == {"tokens": 4 * PAGE, "wrong": 0, "failed": 0, **more}
        engine("forget")
        assert engine("fetch", start=start + 2000, pages=3) == {"tokens": 3 * PAGE, "wrong": 0, "failed": 0, **more}
        assert engine("fetch", start=start + 9000, pages=3) == {"tokens": 0}
    assert gpu("faults") == {"faults": []}
    for engine in (gpu, host):
        engine("close")


def test_a_gpu_that_cannot_copy_costs_one_batch_and_is_asked_no_more(make: Make, store: Store) -> None:
    """SGLang aborts the requests of a batch that was not loaded, so none of the next may be promised anything."""
    gpu = make()
    gpu("open", store=store.address, gpu=True)
    assert gpu("store", start=20000, pages=2) == {"offered": 1, "left": 0}
    gpu("close")
    gpu.close()
    gpu = make()
    gpu("open", store=store.address, gpu=True)
    gpu("pin_nothing")
    found = gpu("fetch", start=20000, pages=2)
    assert (found["tokens"], found["failed"]) == (2 * PAGE, 1)
    assert gpu("fetch", start=20000, pages=2) == {"tokens": 0}
    gpu("close")


def test_a_pool_that_is_not_plain_is_refused_by_name(make: Make, store: Store) -> None:
    engine = make()
    with pytest.raises(
        AssertionError, match="KV pool: got OtherPool; expected MHATokenToKVPool, MLATokenToKVPool; use"
    ):
        engine("open", store=store.address, other=True)


def test_the_turn_of_a_session_stays_in_the_store_while_others_push(make: Make) -> None:
    engine = make()
    engine("open", memory=0.001)  # 131 pages
    turn = engine("turn", start=30000, pages=4, session=encode_session("agent", 60.0, "0a"), salt="agents")
    assert turn == {
        "begun": [["agent", "0a", 4, False]],
        "ended": [["agent", "0a", 4, True]],
        "offered": 1,
        "left": 0,
    }

    def push(first: int) -> None:
        for number in range(first, first + 10):
            engine("forget")
            assert engine("store", start=40000 + 1000 * number, pages=16) == {"offered": 1, "left": 0}
        engine("forget")

    push(0)
    assert engine("fetch", start=30000, pages=4) == {"tokens": 0}, "without the salt"
    assert engine("fetch", start=30000, pages=4, salt="agents") == {"tokens": 4 * PAGE, "wrong": 0, "failed": 0}
    assert engine("fetch", start=40000, pages=4) == {"tokens": 0}, "it made room"
    assert engine("end_session", session="agent", salt="others") == {"ended": False}
    assert engine("end_session", session="agent", salt="agents") == {"ended": True}
    assert engine("end_session", session="agent", salt="agents") == {"ended": False}
    push(10)
    assert engine("fetch", start=30000, pages=4, salt="agents") == {"tokens": 0}
    engine("close")


def test_a_prompt_is_pulled_from_the_store_that_its_request_names_while_that_one_lives(
    make: Make, tmp_path: Path
) -> None:
    """Three stores that know nothing of each other, one killed between a look-up and its load."""
    first_port = free_ports(3)
    with ExitStack() as opened:
        stores = []
        for number in range(3):
            (folder := tmp_path / f"store{number}").mkdir()
            tiers = {"max_local_cpu_size": 0.05, "peer_port": first_port + number}
            stores.append(opened.enter_context(process(folder, tiers=tiers)))
        names = [f"tcp://127.0.0.1:{first_port + number}" for number in range(3)]
        engines = [make() for _ in stores]
        for engine, store in zip(engines, stores, strict=True):
            engine.send("open", store=f"ipc://{store.path}")
        for engine in engines:
            engine.answer()
        for engine in engines[:2]:  # both have both
            for start in (60000, 70000):
                assert engine("store", start=start, pages=8) == {"offered": 1, "left": 0}
        whole = {"tokens": 8 * PAGE, "wrong": 0, "failed": 0}
        reader = engines[2]
        assert reader("fetch", start=60000, pages=8) == {"tokens": 0}
        reader("name", start=60000, pages=8, source=names[0], session="agent")
        assert reader("fetch", start=60000, pages=8) == whole
        reader("name", start=70000, pages=8, source=names[0])
        assert reader("found", start=70000, pages=8) == {"tokens": 8 * PAGE}
        stores[0].kill()
        assert reader("fetch", start=70000, pages=8) == {"tokens": 0}
        reader("name", start=70000, pages=8, source=names[1])
        assert reader("fetch", start=70000, pages=8) == whole
        for engine in engines:
            engine("close")
