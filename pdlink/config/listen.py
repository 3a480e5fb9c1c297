"""Where a process listens, and what others reach it by: one address, HOST[:PORT], from which the others follow."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from pdlink.config.section import Section, is_loopback


class HostPort(NamedTuple):
    host: str
    port: int
    """0 takes a free one."""

    def __str__(self) -> str:
        return f"{in_url(self.host)}:{self.port}"


def in_url(host: str) -> str:
    """A host as it stands before a port: with brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def place_of(text: str, default_port: int = 0) -> HostPort:
    """HOST, HOST:PORT, [IPV6]:PORT or IPV6. Raises ValueError that says what was expected."""
    host, port = text, ""
    if text.startswith("ipc:"):
        raise ValueError("must be HOST or HOST:PORT; the Unix socket of a store is its setting `socket`")
    if "/" in text:
        raise ValueError("must be HOST or HOST:PORT, without http:// before it")
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError("must be [HOST]:PORT, with brackets around an IPv6 address")
        port = port[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or any(letter.isspace() for letter in host):
        raise ValueError("must be HOST or HOST:PORT")
    if port and not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError("must have a port from 0 to 65535; 0 takes a free one")
    return HostPort(host, int(port) if port else default_port)


def is_numeric(host: str) -> bool:
    """Whether it is an address, and no name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_every_address(host: str) -> bool:
    """0.0.0.0 or ::, which one can listen on but not dial."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _checked(text: str) -> str:
    try:
        place_of(text)
    except ValueError as error:
        raise PydanticCustomError("address", "{words}", {"words": str(error)}) from None
    return text


def _host_alone(text: str) -> str:
    if place_of(_checked(text)).host != text:
        raise PydanticCustomError("address", "must be a host without a port")
    return text


Address = Annotated[str, AfterValidator(_checked)]
"""HOST[:PORT]."""
Host = Annotated[str, AfterValidator(_host_alone)]


class LinkListen(Section):
    """Where an engine's server listens for other servers: its HTTP belongs to the engine."""

    short: ClassVar[str | None] = "address"

    address: Address = "127.0.0.1"
    """HOST[:PORT] where other servers reach this one: the control plane on that port (0 or none takes a free one),
    the tcp transport on a free port of the same host."""
    data: Host | None = None
    """Host that the tcp transport listens on; None is that of `listen`."""
    advertise: Host | None = None
    """Host that others are told instead of those listened on, which 0.0.0.0 needs."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {cls.short: given} if isinstance(given, str) else given

    @property
    def control_host(self) -> str:
        return place_of(self.address).host

    @property
    def control_port(self) -> int:
        return place_of(self.address).port

    def as_control(self) -> ListenConfig:
        """The same of a process whose HTTP is nobody's concern here."""
        return ListenConfig(control=self.address, data=self.data, advertise=self.advertise)

    def on_port(self, port: int) -> LinkListen:
        """The same on this port of the control plane."""
        return self.model_copy(update={"address": str(HostPort(self.control_host, port))})

    @property
    def reachable(self) -> dict[str, str]:
        """Hosts by which others than this host reach it, by the setting that names them."""
        hosts = {"listen": self.control_host, "listen.data": self.data, "listen.advertise": self.advertise}
        return {name: host for name, host in hosts.items() if host is not None and not is_loopback(host)}


class ListenConfig(LinkListen):
    """Where a process of pdlink listens."""

    address: Address = "127.0.0.1"
    """HOST[:PORT] where others reach this process: HTTP on that port (0 or none takes a free one, which is printed),
    the control plane and the tcp transport on free ports of the same host."""
    http: Address | None = None
    """HOST[:PORT] of HTTP instead."""
    control: Address | None = None
    """HOST[:PORT] of the control plane instead, which other workers dial."""

    @property
    def host(self) -> str:
        """Of HTTP."""
        return place_of(self.http or self.address).host

    @property
    def port(self) -> int:
        """Of HTTP."""
        return place_of(self.http or self.address).port

    @property
    def control_host(self) -> str:
        return place_of(self.control or self.address).host

    @property
    def control_port(self) -> int:
        return place_of(self.control).port if self.control else 0

    @property
    def link(self) -> LinkListen:
        """Without HTTP."""
        control = str(HostPort(self.control_host, self.control_port))
        return LinkListen(address=control, data=self.data, advertise=self.advertise)

    @property
    def reachable(self) -> dict[str, str]:
        http = "listen.http" if self.http else "listen"
        control = "listen.control" if self.control else "listen"
        hosts = {http: self.host, control: self.control_host}
        hosts |= {name: host for name, host in super().reachable.items() if name != "listen"}
        return {name: host for name, host in hosts.items() if not is_loopback(host)}

    def on(self, *, http: int | None = None, control: int | None = None) -> ListenConfig:
        """The same on these ports."""
        changed = {}
        if http is not None:
            changed["http"] = str(HostPort(self.host, http))
        if control is not None:
            changed["control"] = str(HostPort(self.control_host, control))
        return self.model_copy(update=changed)
