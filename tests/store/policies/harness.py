"""A store of keys and sizes around one policy, which checks every answer of the policy."""

from __future__ import annotations

from collections.abc import Callable

from pdlink.store.eviction import EvictionPolicy, Key


class Cache:
    """What a store does with a policy: a key that does not fit has others evicted first."""

    def __init__(self, policy: EvictionPolicy, capacity_nbytes: int) -> None:
        self.policy = policy
        self.capacity_nbytes = capacity_nbytes
        self.resident: dict[Key, int] = {}
        self.leased: set[Key] = set()

    def put(self, key: Key, nbytes: int = 1) -> bool:
        """Whether the key is resident now; a known one is touched."""
        if key in self.resident:
            self.touch(key)
            return True
        while sum(self.resident.values()) + nbytes > self.capacity_nbytes:
            if self.evict() is None:
                return False
        self.resident[key] = nbytes
        self.policy.insert(key, nbytes)
        self.check()
        return True

    def touch(self, key: Key) -> bool:
        """Whether it was a hit."""
        self.policy.touch(key)
        self.check()
        return key in self.resident

    def evict(self, may_evict: Callable[[Key], bool] | None = None) -> Key | None:
        victim = self.policy.evict(may_evict or (lambda key: key not in self.leased))
        if victim is None:
            assert self.resident.keys() <= self.leased, "a key that may go was not found"
        else:
            assert victim in self.resident, "evicted what is not there"
            assert victim not in self.leased, "evicted what is leased"
            del self.resident[victim]
        self.check()
        return victim

    def remove(self, key: Key) -> None:
        self.policy.remove(key)
        self.resident.pop(key, None)
        self.check()

    def check(self) -> None:
        assert len(self.policy) == len(self.resident)


def key(number: int) -> Key:
    """Of 32 bytes, as the store's are."""
    return number.to_bytes(32, "little")
