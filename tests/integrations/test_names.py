"""What the endpoints of a vLLM server are called: each has a name of its own, whatever they share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.errors import ConfigError
from pdlink.integrations.vllm_parts.rank import Rank
from pdlink.integrations.vllm_parts.settings import read
from pdlink.protocol.auth import AllowList, Credentials, KeyPair, is_worker_name, name_problem

KEYS = Credentials(KeyPair("decode-1", "k", "s"), AllowList({"k": "decode-1"}))


def names(extra: dict[str, Any], credentials: Credentials | None, *, ranks: int = 2, engines: int = 2) -> list[str]:
    """Of a server with `ranks` tensor-parallel ranks in each of its data-parallel engines."""
    found = []
    for engine in range(engines):
        for rank in range(ranks):
            parallel = SimpleNamespace(
                rank=rank, tensor_parallel_size=ranks, data_parallel_rank=0, data_parallel_index=engine
            )
            engine_id = f"f81d4fae_dp{engine}" if engine else "f81d4fae"
            config = SimpleNamespace(
                parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id=engine_id)
            )
            found.append(Rank(config, None, read(extra))._name_of(rank, credentials))
    return found


@pytest.mark.parametrize("extra", [{}, {"name": "decode-1"}], ids=["made up", "configured"])
def test_ranks_without_keys_have_a_name_each(extra: dict[str, Any]) -> None:
    found = names(extra, None)
    assert len(set(found)) == 4
    assert all(map(is_worker_name, found))


def test_ranks_that_share_a_key_have_a_name_each_that_goes_with_it() -> None:
    found = names({}, KEYS)
    assert found == ["decode-1/0", "decode-1/1", "decode-1/dp1/0", "decode-1/dp1/1"]
    assert all(name_problem(KEYS, "k", name) is None for name in found)


def test_only_rank_of_a_key_has_the_name_of_the_key() -> None:
    assert names({}, KEYS, ranks=1, engines=1) == ["decode-1"]
    keyed = {"security": {"key_file": "/x/{shard}.key", "allow_file": "/x/allow"}}
    assert names(keyed, KEYS, engines=1) == ["decode-1", "decode-1"], "each shard has a key, and its name"


def ports(extra: dict[str, Any], *, ranks: int = 1, **parallel: Any) -> list[int]:
    """What the endpoints of one engine listen on."""
    found = []
    for rank in range(ranks):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=ranks, **parallel),
            kv_transfer_config=SimpleNamespace(engine_id="e"),
        )
        of_rank = Rank(config, None, read({"listen": "127.0.0.1:8500", **extra}))
        found += [of_rank.settings_of(shard.number).listen.control_port for shard in of_rank._shards]
    return found


def test_each_engine_behind_one_port_listens_on_ports_of_its_own() -> None:
    assert [ports({}, data_parallel_index=engine) for engine in range(3)] == [[8500], [8501], [8502]]
    assert ports({}, ranks=2, data_parallel_index=1) == [8502, 8503]
    assert ports({"shards": 4}, ranks=2, data_parallel_index=1) == [8504, 8505, 8506, 8507]
    assert ports({"listen": "127.0.0.1"}, data_parallel_index=1) == [0]


def test_an_engine_with_a_port_of_its_own_listens_where_it_was_told() -> None:
    assert ports({}, data_parallel_index=3, data_parallel_external_lb=True) == [8500]
    of_its_host = {"data_parallel_hybrid_lb": True, "data_parallel_rank_local": 1}
    assert ports({}, data_parallel_index=5, **of_its_host) == [8501], "its host has another port than the others"


def test_engines_whose_ports_end_beyond_the_last_one_do_not_start() -> None:
    assert ports({"listen": "127.0.0.1:65534"}, data_parallel_index=1) == [65535]
    with pytest.raises(
        ConfigError, match=r"listen: got port 65534, which makes 65537 the last .* engine 1; ports end at 65535"
    ):
        ports({"listen": "127.0.0.1:65534"}, ranks=2, data_parallel_index=1)


def test_engine_id_of_any_characters_makes_a_name() -> None:
    parallel = SimpleNamespace(rank=0, tensor_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=SimpleNamespace(engine_id="my engine\n#1"))
    assert Rank(config, None, read({}))._name_of(0, None) == "my-engine--1/0"


def test_name_that_no_peer_would_take_stops_the_server() -> None:
    with pytest.raises(ConfigError, match="a name is up to 4 parts"):
        read({"name": "a b"})


def test_ranks_do_not_share_the_directory_of_a_tier() -> None:
    tiers = {"tiers": {"local_disk": "/kv", "max_local_disk_size": 1}}
    with pytest.raises(ConfigError, match=r"tiers\.local_disk: got '/kv' for 2 ranks; expected one each"):
        names(tiers, None, ranks=2)
    assert names(tiers, None, ranks=1, engines=1)
    with pytest.raises(
        ConfigError, match=r"got '/kv' for data-parallel engine 1; expected one each; put \{name\} into it"
    ):
        names(tiers, None, ranks=1)


@pytest.mark.parametrize("given", [{"peer_port": 8110}, {"peer_port": 0}, {"peers": ["tcp://10.0.0.7:8110"]}])
def test_ranks_with_a_store_each_do_not_lend(given: dict[str, Any]) -> None:
    """Others name one address for all that a server has."""
    for ranks, engines in ((2, 1), (1, 2)):
        with pytest.raises(ConfigError, match=r"tiers\.peer_port: got it, or tiers\.peers, for several ranks"):
            names({"tiers": given}, None, ranks=ranks, engines=engines)
    assert names({"tiers": given}, None, ranks=1, engines=1)
