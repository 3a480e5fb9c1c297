"""Nodes with keys: the two that know each other exchange KV, a third one does not get in."""

from __future__ import annotations

from pathlib import Path

import pytest

import pdlink
from pdlink.errors import PeerNotAllowed
from pdlink.protocol.auth import Credentials
from pdlink.serve.keys import keygen
from tests.loopback import LoopbackHub, LoopbackTransport
from tests.waiting import WAIT_S

from .conftest import DST, SRC, TIMEOUTS, TOKENS, assert_same, compute, fill, groups


def test_nodes_with_keys_of_each_other_exchange_kv_and_a_stranger_is_not_dialed(tmp_path: Path) -> None:
    made = {name: keygen(name, str(tmp_path)) for name in ("prefill", "decode", "stranger")}
    allow = tmp_path / "allow"
    allow.write_text("\n".join(made[name][1] for name in ("prefill", "decode")) + "\n")

    def credentials(name: str) -> Credentials | None:
        files = {"key_file": str(made[name][0]), "allow_file": str(allow)}
        return pdlink.load_credentials(pdlink.SecurityConfig.model_validate(files))

    hub = LoopbackHub()

    def node(name: str, block_tokens: int) -> pdlink.Node:
        transports = [LoopbackTransport(hub)]
        return pdlink.Node(
            name, groups(block_tokens), transports=transports, deadlines=TIMEOUTS, credentials=credentials(name)
        )

    with node("prefill", 4) as prefill, node("decode", 8) as decode, node("stranger", 4) as stranger:
        fill(prefill)
        with prefill.send("t", [SRC], TOKENS) as outgoing:
            compute(outgoing)
        assert decode.receive("t", prefill.address, [DST], range(TOKENS)).wait(WAIT_S) == 42
        assert_same(prefill, decode)
        with pytest.raises(PeerNotAllowed, match="not on this worker's allow-list"):
            decode.receive("u", stranger.address)
        with pytest.raises(PeerNotAllowed, match="uses no keys"):
            decode.receive("u", prefill.address.partition("?")[0])
