"""Planted bugs of the catalog: each is easy to make, and the model must find it."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from pdlink.store.catalog import Catalog
from pdlink.store.extents import Extents

from .catalog_world import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable


def _patched(name: str, change: Callable[[Any], Callable[..., Any]]) -> tuple[type, str, Callable[..., Any]]:
    owner = Catalog if hasattr(Catalog, name) else Extents
    return owner, name, change(getattr(owner, name))


def _removed_key_comes_back(right: Any) -> Callable[..., Any]:
    def commit(self: Any, slots: Any) -> Any:
        for slot in slots:
            writing = self._writing.get(slot.serial)
            if writing is not None and not writing.record.listed and slot.key not in self._records:
                writing.record.listed = True
                self._records[slot.key] = writing.record
        return right(self, slots)

    return commit


def _dead_keep(what: str) -> Callable[[Any], Callable[..., Any]]:
    def change(right: Any) -> Callable[..., Any]:
        def holder_gone(self: Any, holder: str) -> None:
            if what == "reservations":
                ends = [serial for serial, hold in self._leases.items() if hold.holder == holder]
                self._end_leases(ends)
            else:
                self.abandon([writing.slot for writing in self._writing.values() if writing.holder == holder])
                for serial in [serial for serial, hold in self._leases.items() if hold.holder == holder]:
                    self._leases.pop(serial)

        return holder_gone

    return change


def _reservations_expire(right: Any) -> Callable[..., Any]:
    def expire(self: Any, now_s: float) -> Any:
        if now_s % 5 == 0:
            self.abandon([writing.slot for writing in self._writing.values()])
        return right(self, now_s)

    return expire


def _without(check: str) -> Callable[[Any], Callable[..., Any]]:
    """What stays of `_may_evict` or `_free_if_unused` without one of its conditions."""

    def change(right: Any) -> Callable[..., Any]:
        def may_evict(self: Any, key: bytes) -> bool:
            record = self._records[key]
            kept = {"leases": record.leases, "pins": record.pins, "writers": record.writers}
            return not any(number for what, number in kept.items() if what != check)

        return may_evict

    return change


def _free_under(what: str) -> Callable[[Any], Callable[..., Any]]:
    def change(right: Any) -> Callable[..., Any]:
        def free(self: Any, record: Any) -> None:
            idle = not record.leases if what == "writer" else not record.writers
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
    def reserve(self: Any, keys: Any, *args: Any) -> Any:
        for key in keys:
            record = self._records.get(key)
            if record is not None and record.writers and not record.resident:
                self._unlist(record)
        return right(self, keys, *args)

    return reserve


def _share_taken_twice(right: Any) -> Callable[..., Any]:
    def reserve(self: Any, keys: Any, *args: Any) -> Any:
        for key in keys:
            record = self._records.get(key)
            if record is not None and record.missing:
                record.free = record.missing
        return right(self, keys, *args)

    return reserve


def _readable_with_the_first_share(right: Any) -> Callable[..., Any]:
    def commit(self: Any, slots: Any) -> Any:
        for slot in slots:
            if slot.serial in self._writing:
                self._writing[slot.serial] = self._writing[slot.serial]._replace(parts=(1 << PARTS) - 1)
        return right(self, slots)

    return commit


def _dead_share_counts(right: Any) -> Callable[..., Any]:
    def abandon(self: Any, slots: Any) -> None:
        for slot in slots:
            if slot.serial in self._writing:
                writing = self._writing[slot.serial]
                writing.record.missing &= ~writing.parts
                self._writing[slot.serial] = writing._replace(parts=0)
        right(self, slots)

    return abandon


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
    def remove(self: Any, keys: Any) -> int:
        turns, self._turns = self._turns, deepcopy(self._turns)
        try:
            return int(right(self, keys))
        finally:
            turns.used_nbytes, self._turns = self._turns.used_nbytes, turns

    return remove


def _nothing_expires(right: Any) -> Callable[..., Any]:
    def expire(self: Any, now_s: float) -> Any:
        self._deadlines.entries.clear()
        return right(self, now_s)

    return expire


def _no_tenant_quota(right: Any) -> Callable[..., Any]:
    return lambda self, nbytes, _tenant: right(self, nbytes, "")


def _quota_never_given_back(right: Any) -> Callable[..., Any]:
    def free(self: Any, record: Any) -> None:
        used = self._turns.used_nbytes.copy()
        right(self, record)
        self._turns.used_nbytes = used

    return free


def _no_quota(right: Any) -> Callable[..., Any]:
    def pin(self: Any, keys: Any, name: str) -> Any:
        quota, self._pins._quota_nbytes = self._pins._quota_nbytes, 1 << 60
        try:
            return right(self, keys, name)
        finally:
            self._pins._quota_nbytes = quota

    return pin


def _neighbours_apart(right: Any) -> Callable[..., Any]:
    return lambda self, begin, end: self._add(begin, end)


def _clear_without(table: str) -> Callable[[Any], Callable[..., Any]]:
    """It does not see who reads or writes."""

    def change(right: Any) -> Callable[..., Any]:
        def clear(self: Any) -> Any:
            held = getattr(self, table)
            setattr(self, table, {})
            try:
                return right(self)
            finally:
                setattr(self, table, held)

        return clear

    return change


def _cleared_pins_count(right: Any) -> Callable[..., Any]:
    def clear(self: Any) -> Any:
        nbytes = self._pins.nbytes
        was = right(self)
        self._pins.nbytes = nbytes
        return was

    return clear


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
    "two ranks get one share": _patched("reserve", _share_taken_twice),
    "a record is readable with its first share": _patched("commit", _readable_with_the_first_share),
    "the share of a dead rank counts": _patched("abandon", _dead_share_counts),
    "pinned records are evicted": _patched("_may_evict", _without("pins")),
    "a slot is used again under its readers": _patched("_free_if_unused", _free_under("readers")),
    "a slot is used again under its writer": _patched("_free_if_unused", _free_under("writer")),
    "slots are never used again": _patched("_free_if_unused", _nothing(None)),
    "a record is readable before it is written": _patched("lookup", _reads_what_is_written),
    "a put that is under way is begun again": _patched("reserve", _writes_twice),
    "abandoned reservations stay": _patched("abandon", _nothing(None)),
    "the policy does not hear of removals": _patched("remove", _policy_not_told),
    "a clear frees what is read": _patched("clear", _clear_without("_leases")),
    "a clear frees what is written": _patched("clear", _clear_without("_writing")),
    "cleared pins count": _patched("clear", _cleared_pins_count),
    "records do not expire": _patched("expire", _nothing_expires),
    "tenants have no quota": _patched("_take", _no_tenant_quota),
    "what is dropped counts against its tenant": _patched("_free_if_unused", _quota_never_given_back),
    "pins have no quota": _patched("pin", _no_quota),
    "unpin takes nothing back": _patched("unpin", _nothing(0)),
    "pins outlive their record": _patched("_unlist", _pins_outlive_the_record),
    "free neighbours are not joined": _patched("_join", _neighbours_apart),
}
"""What is wrong, and (class, method, the wrong one)."""
