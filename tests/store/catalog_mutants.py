"""Planted bugs of the catalog: each is easy to make, and the model must find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.store.catalog import Catalog
from pdlink.store.extents import Extents

if TYPE_CHECKING:
    from collections.abc import Callable


def _patched(name: str, change: Callable[[Any], Callable[..., Any]]) -> tuple[type, str, Callable[..., Any]]:
    owner = Catalog if hasattr(Catalog, name) else Extents
    return owner, name, change(getattr(owner, name))


def _removed_key_comes_back(right: Any) -> Callable[..., Any]:
    def commit(self: Any, slots: Any) -> Any:
        for slot in slots:
            record = self._writing.get(slot.serial)
            if record is not None and not record.listed and slot.key not in self._records:
                record.listed = True
                self._records[slot.key] = record
        return right(self, slots)

    return commit


def _dead_keep(what: str) -> Callable[[Any], Callable[..., Any]]:
    def change(right: Any) -> Callable[..., Any]:
        def holder_gone(self: Any, holder: str) -> None:
            if what == "reservations":
                ends = [serial for serial, hold in self._leases.items() if hold.holder == holder]
                self._end_leases(ends)
            else:
                self.abandon([record.slot for record in self._writing.values() if record.writer == holder])
                for serial in [serial for serial, hold in self._leases.items() if hold.holder == holder]:
                    self._leases.pop(serial)

        return holder_gone

    return change


def _reservations_expire(right: Any) -> Callable[..., Any]:
    def expire(self: Any, now_s: float) -> Any:
        if now_s % 5 == 0:
            self.abandon([record.slot for record in self._writing.values()])
        return right(self, now_s)

    return expire


def _without(check: str) -> Callable[[Any], Callable[..., Any]]:
    """What stays of `_may_evict` or `_free_if_unused` without one of its conditions."""

    def change(right: Any) -> Callable[..., Any]:
        def may_evict(self: Any, key: bytes) -> bool:
            record = self._records[key]
            return (check == "leases" or not record.leases) and (check == "pins" or not record.pins)

        return may_evict

    return change


def _free_under(what: str) -> Callable[[Any], Callable[..., Any]]:
    def change(right: Any) -> Callable[..., Any]:
        def free(self: Any, record: Any) -> None:
            idle = not record.leases if what == "writer" else record.writer is None
            if not record.listed and idle and record.slot.offset in self._extents._taken:
                self._extents.give_back(record.slot.offset)

        return free

    return change


def _reads_what_is_written(right: Any) -> Callable[..., Any]:
    def lookup(self: Any, keys: Any) -> int:
        found = 0
        for key in keys:
            if key not in self._records:
                break
            found += 1
        return found

    return lookup


def _writes_twice(right: Any) -> Callable[..., Any]:
    def reserve(self: Any, keys: Any, nbytes: int, holder: str) -> Any:
        for key in keys:
            record = self._records.get(key)
            if record is not None and record.writer is not None and record.writer != holder:
                self._unlist(record)
        return right(self, keys, nbytes, holder)

    return reserve


def _always(value: object) -> Callable[[Any], Callable[..., Any]]:
    def change(right: Any) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            right(*args)
            return value

        return method

    return change


def _nothing(value: object) -> Callable[[Any], Callable[..., Any]]:
    return lambda right: lambda *args: value


def _policy_not_told(right: Any) -> Callable[..., Any]:
    def remove(self: Any, keys: Any = None) -> int:
        policy, self._policy = self._policy, type(self._policy)()
        try:
            return int(right(self, keys))
        finally:
            self._policy = policy

    return remove


def _no_quota(right: Any) -> Callable[..., Any]:
    def pin(self: Any, keys: Any, name: str) -> Any:
        quota, self._pin_quota_nbytes = self._pin_quota_nbytes, 1 << 60
        try:
            return right(self, keys, name)
        finally:
            self._pin_quota_nbytes = quota

    return pin


def _neighbours_apart(right: Any) -> Callable[..., Any]:
    return lambda self, begin, end: self._add(begin, end)


def _pins_outlive_the_record(right: Any) -> Callable[..., Any]:
    def unlist(self: Any, record: Any) -> None:
        pins, record.pins = record.pins, 0
        right(self, record)
        record.pins = pins

    return unlist


MUTANTS = {
    "a key removed while it is written becomes readable": _patched("commit", _removed_key_comes_back),
    "reservations of the dead stay": _patched("holder_gone", _dead_keep("reservations")),
    "leases of the dead stay": _patched("holder_gone", _dead_keep("leases")),
    "reservations end by time": _patched("expire", _reservations_expire),
    "leases do not end by time": _patched("expire", _nothing(0)),
    "release always says that the lease stood": _patched("release", _always(True)),
    "release never says that the lease stood": _patched("release", _always(False)),
    "leased records are evicted": _patched("_may_evict", _without("leases")),
    "pinned records are evicted": _patched("_may_evict", _without("pins")),
    "a slot is used again under its readers": _patched("_free_if_unused", _free_under("readers")),
    "a slot is used again under its writer": _patched("_free_if_unused", _free_under("writer")),
    "slots are never used again": _patched("_free_if_unused", _nothing(None)),
    "a record is readable before it is written": _patched("lookup", _reads_what_is_written),
    "a put that is under way is begun again": _patched("reserve", _writes_twice),
    "abandoned reservations stay": _patched("abandon", _nothing(None)),
    "the policy does not hear of removals": _patched("remove", _policy_not_told),
    "pins have no quota": _patched("pin", _no_quota),
    "unpin takes nothing back": _patched("unpin", _nothing(0)),
    "pins outlive their record": _patched("_unlist", _pins_outlive_the_record),
    "free neighbours are not joined": _patched("_join", _neighbours_apart),
}
"""What is wrong, and (class, method, the wrong one)."""
