"""What we put in the place of SGLang's own classes and functions: everything SGLang calls is there."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    utils = pytest.importorskip("sglang.srt.disaggregation.utils", exc_type=ImportError)

from sglang.srt.disaggregation.common import conn  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from pdlink.api.session import SGLANG_END  # noqa: E402
from pdlink.integrations import sglang as ours  # noqa: E402
from pdlink.integrations.sglang_parts import allocation, giving_up, layerwise, sessions, weights  # noqa: E402

pytestmark = [pytest.mark.sglang, pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


def pairs() -> list[tuple[type, type]]:
    """A class of ours, and SGLang's that it stands for."""
    from pdlink.integrations.sglang_parts.requests import classes

    found: Any = classes()
    managers = {"MANAGER": "CommonKVManager", "SENDER": "CommonKVSender", "RECEIVER": "CommonKVReceiver"}
    theirs = [(found[kind], getattr(conn, name)) for kind, name in managers.items()]
    server = (found["BOOTSTRAP_SERVER"], conn.CommonKVBootstrapServer)
    return [*theirs, server, (ours.PDLinkHiCache, HiCacheStorage), *linkers()]


def linkers() -> list[tuple[type, type]]:
    """Before 0.5.23 SGLang took none of others."""
    if importlib.util.find_spec("sglang.srt.mem_cache.unified_cache.linker_factory") is None:
        return []
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    from pdlink.integrations.sglang_linker import PDLinkLinker

    return [(PDLinkLinker, UnifiedCacheLinker)]


def test_nothing_that_sglang_requires_is_missing() -> None:
    for mine, theirs in pairs():
        assert issubclass(mine, theirs)
        assert not getattr(mine, "__abstractmethods__", None), mine


def test_every_method_takes_what_sglang_passes() -> None:
    for mine, theirs in pairs():
        for name, method in vars(mine).items():
            if name.startswith("__") or not inspect.isfunction(method) or not hasattr(theirs, name):
                continue
            wanted = inspect.signature(getattr(theirs, name)).parameters
            has = inspect.signature(method).parameters
            takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in has.values())
            missing = [one for one in wanted if one not in has and not takes_all]
            assert not missing, f"{mine.__name__}.{name}"
            needed = [key for key, one in has.items() if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
            assert set(needed) <= set(wanted), f"{mine.__name__}.{name}"


@pytest.mark.parametrize(
    "method", ["build_receiver_registration_message", "build_receiver_metadata_message", "add_transfer_request"]
)
def test_the_manager_is_asked_for_what_decode_says(method: str) -> None:
    """Before 0.5.23 each backend's receiver sent that by itself, and most registered nothing."""
    from pdlink.integrations.sglang_parts import speakers

    asks = conn if speakers._BOTH_SPEAK else speakers
    is_asked = f"kv_mgr.{method}(" in inspect.getsource(asks)
    assert is_asked or (asks is speakers and method == "build_receiver_registration_message")


def test_functions_that_are_wrapped_are_where_we_say() -> None:
    pools = [f"sglang.srt.mem_cache.memory_pool.{name}._create_buffers" for name in allocation._POOLS]
    changes = [f"{weights.MANAGER}.{name}" for name in (*weights._CHANGES, *weights._BEGINNINGS)]
    others = [layerwise._RUN_BATCH, layerwise._FORWARD, giving_up._ABORTS]
    others += [sessions.INSERT, sessions.QUEUE, sessions.SET]
    for name in ["sglang.srt.disaggregation.utils.get_kv_class", *pools, *changes, *others]:
        place: Any = None
        parts = name.split(".")
        for end in range(len(parts) - 1, 0, -1):
            try:
                place = importlib.import_module(".".join(parts[:end]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[end:]:
            place = getattr(place, part)
        assert callable(place), name


def test_what_ends_a_session_reaches_the_scheduler_and_is_answered() -> None:
    from pydantic import TypeAdapter
    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler

    name = SGLANG_END + '{"session_id":"a","cache_salt":"","owner":null}'
    assert TypeAdapter(SetInternalStateReq).validate_python({"server_args": {name: 1}}).server_args == {name: 1}
    assert SetInternalStateReqOutput(updated=True).updated
    assert "(SetInternalStateReq, self.set_internal_state)" in inspect.getsource(Scheduler.init_request_dispatcher)


def test_servers_take_the_backend_by_its_name() -> None:
    ours.register()
    HookRegistry.apply_hooks()
    backend = utils.TransferBackend(ours.BACKEND)
    for kind in utils.KVClassType:
        assert utils.get_kv_class(backend, kind) is not None, kind
