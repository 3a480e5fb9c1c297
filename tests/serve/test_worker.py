"""A whole worker in this process, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest

from pdlink.api.legs import DecodeParams, PrefillAddress, PrefillParams
from pdlink.config import CacheConfig, ModelConfig, TransportConfig, WorkerConfig
from pdlink.engine.models import load_model
from pdlink.engine.request import SamplingParams
from pdlink.errors import ConfigError
from pdlink.serve import health
from pdlink.serve import worker as worker_module
from pdlink.serve.checkpoint import write_checkpoint
from pdlink.serve.worker import Worker
from pdlink.transport.mapped import MappedTransport
from tests.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


def test_transports_hear_when_a_prefill_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(MappedTransport, "computing", lambda _transport, on: said.append(on))
    config = WorkerConfig(
        model=ModelConfig(num_layers=1),
        cache=CacheConfig(num_blocks=8),
        transport=TransportConfig(kind="mapped"),
    )
    with contextlib.closing(Worker(config, "alone")) as worker:
        worker.open()

        async def tokens() -> int:
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            return len([token async for token in worker.start("r", (1, 2, 3), sampling, None)])

        assert asyncio.run(tokens()) == 3
    assert said == [True, False]


MODEL = ModelConfig(num_layers=1)


class Two:
    """A prefill and a decode worker in this process."""

    def __init__(self, prefill_model: ModelConfig, decode_model: ModelConfig) -> None:
        def worker(role: Literal["prefill", "decode"], model: ModelConfig) -> Worker:
            config = WorkerConfig(
                role=role,
                model=model,
                cache=CacheConfig(num_blocks=8),
                transport=TransportConfig(kind="tcp"),
            )
            return Worker(config, role)

        self.prefill, self.decode = worker("prefill", prefill_model), worker("decode", decode_model)
        self._num_transfers = 0

    def __enter__(self) -> Two:
        self.prefill.open()
        self.decode.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.close()
        self.prefill.close()

    def answer(self) -> list[int]:
        """The tokens of one request whose KV is to come from prefill."""
        self._num_transfers += 1
        transfer_id, sampling = f"t{self._num_transfers}", SamplingParams(max_tokens=3, ignore_eos=True)
        where = PrefillAddress(name="prefill", control=self.prefill.node.address)
        prompt = (1, 2, 3)

        async def tokens() -> list[int]:
            sends = PrefillParams(transfer_id=transfer_id, seed=1, created=1)
            receives = DecodeParams(transfer_id=transfer_id, seed=1, created=1, prefill=where)
            self.prefill.start(f"prefill-{transfer_id}", prompt, sampling, sends)
            stream = self.decode.start(f"decode-{transfer_id}", prompt, sampling, receives)
            return [token.token_id async for token in stream]

        return asyncio.run(tokens())


def test_health_of_both_workers_shows_that_they_do_not_fit() -> None:
    with Two(MODEL, ModelConfig(num_layers=1, seed=1)) as two:
        assert len(two.answer()) == len(two.answer()) == 3
        for worker, other, dialed in ((two.decode, two.prefill, True), (two.prefill, two.decode, False)):
            body = health.health(worker)
            assert body.status == "ok"
            assert not body.peers
            refused = [msgspec.to_builtins(entry) for entry in body.refused]
            assert [entry.pop("retry_s") > 0 for entry in refused] == [dialed]
            assert refused == [
                {
                    "peer": other.name,
                    "address": other.node.address if dialed else "",
                    "factor": "revision",
                    "local": worker.model.revision,
                    "remote": other.model.revision,
                    "count": 1,
                }
            ]


def test_two_directories_with_weights_of_one_shape_and_one_name_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling update to a new fine-tune: same name, same shapes, other numbers."""
    models = []
    for seed in range(2):
        path = tmp_path / str(seed) / "model"
        write_checkpoint(path, num_layers=1, seed=seed)
        models.append(ModelConfig(path=str(path), name="model"))
    with Two(*models) as two:
        digests = [worker.model.content for worker in (two.decode, two.prefill)]
        assert len(two.answer()) == 3
        refused = health.health(two.decode).refused[0]
        assert (refused.factor, refused.local, refused.remote) == ("content", *digests)
        told = (
            f"content differs: local {digests[0]}, remote {digests[1]}; the models have one name and unlike files; "
        )
        assert any(told + "load the same config, tokenizer and weights on both" in line for line in caplog.messages)


def test_health_shows_every_session_with_the_lane_that_its_bytes_took() -> None:
    with Two(MODEL, MODEL) as two:
        two.answer()

        def has_lane() -> bool:
            return any(peer["lane"] for peer in health.health(two.prefill).peers)

        until(has_lane, "prefill has heard that its bytes arrived: decode may answer before")
        (here,), (there,) = (health.health(worker).peers for worker in (two.prefill, two.decode))
        assert here == {"peer": "decode", "address": "", "state": "ready", "transport": "tcp", "lane": "tcp"}
        assert there == {
            "peer": "prefill",
            "address": two.prefill.node.address,
            "state": "ready",
            "transport": "tcp",
            "lane": "",
        }
        assert not health.health(two.decode).refused


def test_a_pool_that_does_not_fit_is_refused_with_the_largest_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looking first, the process fills the machine until the kernel kills it, without a word."""

    def config_of(num_blocks: int) -> WorkerConfig:
        return WorkerConfig(
            model=ModelConfig(num_layers=1),
            cache=CacheConfig(num_blocks=num_blocks),
            transport=TransportConfig(kind="mapped"),
        )

    available = 64 * 2**20
    monkeypatch.setattr(worker_module, "available_nbytes", lambda: available)
    worker = Worker(config_of(1_000_000_000), "large")
    with pytest.raises(ConfigError) as error:
        worker.open()
    text = str(error.value)
    assert text.startswith("cache.num_blocks: 1000000000 blocks of 16 tokens take ")
    assert "and 0.1 GB of memory are available; at most " in text
    largest = int(text.split("at most ")[1].split()[0])
    model = load_model(config_of(2).model)
    assert worker_module._num_blocks(config_of(largest), model) == largest
    with pytest.raises(ConfigError, match=f"at most {largest} fit"):
        worker_module._num_blocks(config_of(largest + 1), model)
