"""Authentication of peers: names, keys, allow-lists, control addresses.

A worker is a name and a CURVE key pair. Its allow-list maps public keys to names. The same list decides who may
connect and which workers a request may make us dial. A name belongs to its listed keys: a peer that proves one key
cannot speak as the owner of another.

ZeroMQ's CURVE handshake proves the keys (`endpoint/channel.py`); this file only decides. Replays need no state here:
CURVE draws fresh keys for every connection and refuses a nonce that does not rise, so a recorded frame is noise on
any other connection. Epochs and session numbers drop frames of the same peer's earlier sessions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdlink.config import is_loopback
from pdlink.config.listen import HostPort
from pdlink.errors import ConfigError, InvalidRequest, PeerNotAllowed

if TYPE_CHECKING:
    from collections.abc import Iterable

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
"""Digits of ZeroMQ's base 85, by value (rfc.zeromq.org/spec/32)."""
_VALUE_OF = {character: value for value, character in enumerate(_Z85)}

KEY_CHARS = 40
"""A key of 32 bytes as text."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCHEME, _KEY_MARK = "tcp://", "?key="

_WORKER_NAME = re.compile(rf"{_NAME.pattern}(/{_NAME.pattern}){{0,3}}")

NAME_RULE = (
    "up to 4 parts of up to 64 letters, digits, '.', '_' and '-', each begun by a letter or digit, joined by '/'"
)
NAME_FACTOR = "name that goes with the key"
"""Factor of a refusal if a peer's name does not belong to its key."""
KEY_FACTOR = "key"
"""Factor of a refusal if a key is not allowed."""


def is_key(text: str) -> bool:
    """Whether this is the text of a key: 40 characters of Z85, every five of them a number below 2**32."""
    if len(text) != KEY_CHARS or not set(text) <= _VALUE_OF.keys():
        return False
    for start in range(0, KEY_CHARS, 5):
        number = 0
        for character in text[start : start + 5]:
            number = number * 85 + _VALUE_OF[character]
        if number >= 2**32:
            return False
    return True


def is_name(text: str) -> bool:
    """Whether this is a valid name of a key; such a name is also a safe file name."""
    return _NAME.fullmatch(text) is not None


def is_worker_name(text: str) -> bool:
    """Whether this is a valid name of a worker: `NAME`, or `NAME/PART` if several workers share a key or a setting.

    It goes unescaped into logs, labels and the names of sessions.
    """
    return _WORKER_NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class KeyPair:
    name: str
    public: str
    secret: str = field(repr=False)


class AllowList(dict[str, str]):
    """Allowed public keys, each with its one name; "" for a key that many share, which proves no name. A name may
    have several keys, so a key can be replaced without an outage."""


@dataclass(frozen=True, slots=True)
class Credentials:
    keys: KeyPair
    allowed: AllowList

    @property
    def owner(self) -> str | None:
        """The name that peers expect of this key's owner; None for a key that many share."""
        return self.keys.name or None


def write_key_file(keys: KeyPair) -> str:
    return (
        f"# The secret key of {keys.name}: only the user that runs it may read this file.\n"
        f"name {keys.name}\npublic {keys.public}\nsecret {keys.secret}\n"
    )


def parse_key_file(text: str, where: str) -> KeyPair:
    """The key pair in a file written by `pdlink keygen`. Raises ConfigError, which never contains a key."""
    found = {}
    for number, line in _lines(text):
        word, _, value = line.partition(" ")
        if word not in ("name", "public", "secret") or word in found:
            raise ConfigError(f"{where}:{number}: expected one line each of `name`, `public` and `secret`")
        found[word] = value.strip()
    for word in ("name", "public", "secret"):
        valid = is_name if word == "name" else is_key
        if not valid(found.get(word, "")):
            raise ConfigError(f"{where}: no valid `{word}`; make a new file with `pdlink keygen NAME`")
    return KeyPair(found["name"], found["public"], found["secret"])


def allow_line(keys: KeyPair) -> str:
    """The line for other workers' allow-lists that allows this one."""
    return f"{keys.name} {keys.public}"


def parse_allow_list(text: str, where: str) -> AllowList:
    """The allow-list in a file of lines `name public_key`; skips empty lines and lines that begin with #.

    Raises ConfigError with the line number for any other line, and for one key under two names.
    """
    names: dict[str, str] = {}
    for number, line in _lines(text):
        words = line.split()
        if len(words) != 2 or not is_name(words[0]) or not is_key(words[1]):
            raise ConfigError(
                f"{where}:{number}: expected `name public_key` as `pdlink keygen` prints it; "
                f"a key has {KEY_CHARS} characters, a name letters, digits, '.', '_' and '-'"
            )
        name, key = words
        if names.setdefault(key, name) != name:
            raise ConfigError(f"{where}:{number}: one key for two names, {names[key]} and {name}")
    return AllowList(names)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The address where a worker listens, and the key it must prove there.

    As text `tcp://host:port` or `tcp://host:port?key=PUBLIC_KEY`, unchanged from /health through the proxy to the
    dialing worker, so nothing in between handles keys.
    """

    host: str
    port: int
    public_key: str = ""

    @classmethod
    def parse(cls, text: str) -> ControlAddress:
        """Raises InvalidRequest for any other text."""
        place, mark, key = text.partition(_KEY_MARK)
        host, _, port = place.removeprefix(_SCHEME).rpartition(":")
        if (
            not place.startswith(_SCHEME)
            or not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", host)
            or not re.fullmatch(r"[1-9][0-9]{0,4}", port)
            or int(port) > 65535
            or (mark and not is_key(key))
        ):
            raise InvalidRequest(f"control address: got {text!r}; must be tcp://host:port or tcp://host:port?key=...")
        return cls(host.strip("[]"), int(port), key)

    @property
    def endpoint(self) -> str:
        """What ZeroMQ connects to."""
        return f"{_SCHEME}{HostPort(self.host, self.port)}"

    def __str__(self) -> str:
        return self.endpoint + (f"{_KEY_MARK}{self.public_key}" if self.public_key else "")


def check_dial(address: ControlAddress, credentials: Credentials | None, *, insecure: bool) -> None:
    """Raise PeerNotAllowed, with the remedy, unless a request may make this worker dial `address`.

    A request names the worker to fetch KV from, so without a check its sender could point this worker at any address
    (vllm#45230). With keys, the key in the address must be allowed; without, only this host is dialed, unless
    `insecure` is set.
    """
    where = address.endpoint
    if credentials is not None:
        if not address.public_key:
            raise PeerNotAllowed(f"the prefill worker at {where} uses no keys and this worker does; set its key_file")
        if address.public_key not in credentials.allowed:
            raise PeerNotAllowed(
                f"the key of the prefill worker at {where} is not on this worker's allow-list; "
                f"add its line `name {address.public_key}`"
            )
    elif address.public_key:
        raise PeerNotAllowed(f"the prefill worker at {where} uses keys and this worker has none; set its key_file")
    elif not insecure and not is_loopback(address.host):
        raise PeerNotAllowed(
            f"this worker has no keys and dials loopback addresses only, got {where}; "
            "set security.key_file and security.allow_file, or security.insecure: true"
        )


def name_problem(credentials: Credentials | None, public_key: str, name: str) -> tuple[str, str] | None:
    """None if the peer that proved `public_key` may use `name`; else (its allowed name, `name`).

    The owner of a key may also use names below its own (`owner/dp1`): processes of one server share its key. Without
    credentials, and with a key that many share, every name is allowed.
    """
    if credentials is None:
        return None
    owner = credentials.allowed.get(public_key)
    if owner == "" or (owner is not None and (name == owner or name.startswith(f"{owner}/"))):
        return None
    return owner or "a key that is not allowed", name
