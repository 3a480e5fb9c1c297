"""What every section of the settings is made of."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Iterable

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Role = Literal["prefill", "decode", "both"]


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach an address with this host part. Names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Section(BaseModel):
    """Settings of one part. Each has a description: what it does, and its unit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    short: ClassVar[str | None] = None
    """The setting that is meant where one value is given instead of the section."""


def no_use(section: Section, prefix: str, names: Iterable[str], reason: str) -> None:
    """Refuse settings that nobody would look at, where they are not as they are by default."""
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{prefix}{name}: {reason}; leave it out")


def in_pairs(section: Section, prefix: str, *pairs: tuple[str, str]) -> None:
    """Each of these settings is there together with its other one, or neither is."""
    for first, second in pairs:
        for there, missing in ((first, second), (second, first)):
            if getattr(section, there) is not None and getattr(section, missing) is None:
                raise ValueError(f"{prefix}{missing}: missing, and {prefix}{there} is of no use without it")
