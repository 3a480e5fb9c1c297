"""What every `Ingestion` owes, whatever it writes below: an answer for each put and hit."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import pytest

from pdlink.errors import ConfigError
from pdlink.store.write_through import INGESTIONS, Ingestion, SecondSight, make_ingestion

RAM = 12


@pytest.fixture(params=list(INGESTIONS))
def ingestion(request: pytest.FixtureRequest) -> Ingestion:
    return make_ingestion(request.param)


def key(number: int) -> bytes:
    return b"%032d" % number


class Ram:
    """A tier of a few records that asks as a store does; the record put longest ago goes first."""

    def __init__(self, ingestion: Ingestion) -> None:
        self.ingestion, self.held = ingestion, dict[bytes, None]()
        self.written: Counter[bytes] = Counter()
        """Below, by key."""

    def want(self, wanted: bytes) -> None:
        if wanted in self.held:
            self.written[wanted] += self.ingestion.on_hit(wanted)
            return
        if len(self.held) == RAM:
            del self.held[next(iter(self.held))]
        self.held[wanted] = None
        self.written[wanted] += self.ingestion.on_put(wanted)


def test_a_record_that_is_wanted_again_and_again_is_written_below(ingestion: Ingestion) -> None:
    ram = Ram(ingestion)
    for _ in range(3):
        for _ in range(3):
            ram.want(key(1))
        for number in range(2, 2 + RAM):
            ram.want(key(number))  # key 1 goes
    assert ram.written[key(1)] >= 1


def test_records_that_are_gone_are_forgotten(ingestion: Ingestion) -> None:
    if isinstance(ingestion, SecondSight):
        ingestion = SecondSight(history_keys=RAM)  # it remembers so many, and says so
    ram = Ram(ingestion)

    def pass_by(numbers: range) -> None:
        for number in numbers:
            for _ in range(3):
                ram.want(key(number))
        ram.written.clear()

    pass_by(range(2000))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        pass_by(range(2000, 22_000))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * 1024


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="ingestion: got 'none'; expected all, second_sight"):
        make_ingestion("none")
