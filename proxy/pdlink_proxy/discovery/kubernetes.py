"""`kubernetes:prefill=SERVICE,decode=SERVICE`: the EndpointSlices of Services, listed and watched.

Every list replaces the table. A watch begins where the list ended, and after it everything is listed again, so that
an event that never came (a lost DELETED) does harm for `WATCH_S` at most. Our own probe judges the workers meanwhile.
An endpoint that is not ready, or terminating, gets no new request, whatever its /health says.
API: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import random
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from pdlink.config.proxy import MAX_ENGINES
from pdlink.errors import ConfigError

from ..members import ListedWorker, Members
from .base import ROLES, SourceDown, pairs_of
from .dns import url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

API = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, which is replaced every hour, and the certificate of the API server."""
WATCH_S = 60
_BREATH_S = 0.2
"""Between a watch and the next list: a server that ends every watch at once is not asked without a pause."""
_PAGE = 500
_ANSWER_S = 10.0
_MAX_EVENT_NBYTES = 8 << 20
"""A slice has at most 1,000 endpoints of some 250 bytes."""
_SERVICE = "kubernetes.io/service-name"
_PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    labels: dict[str, str] = {}
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    """None means ready."""
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class EndpointSlice(msgspec.Struct):
    """An EndpointSlice, as far as it is of use here."""

    metadata: _Meta
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[EndpointSlice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


def members_of(
    slices: Mapping[str, EndpointSlice],
    services: Mapping[str, str],
    port: str,
    control: str = "",
    cell: str = "",
    data_parallel: int = 1,
    store: str = "",
) -> Members:
    """Workers of these slices. services: role by name of a Service. port: by name; empty takes the first. control:
    what the names of the ports begin with that connectors of prefill workers listen on, a rank each; without such a
    port nobody is listed. data_parallel: engines of each prefill worker. store: the name of the port where other
    stores ask that of a worker (`ListedWorker.store`), if its Service has one.

    An address may be in two slices while one replaces the other: it is in use if either says so.
    """
    found: dict[str, dict[str, ListedWorker]] = {role: {} for role in ROLES}
    for each in slices.values():
        role = services.get(each.metadata.labels.get(_SERVICE, ""))
        number = next((one.port for one in each.ports or () if not port or one.name == port), None)
        if role is None or number is None:
            continue
        wanted = control if role == "prefill" else ""
        named = sorted(
            one.port for one in each.ports or () if wanted and one.port and (one.name or "").startswith(wanted)
        )
        if wanted and not named:
            continue
        lends = next((one.port for one in each.ports or () if store and one.name == store), None)
        for endpoint in each.endpoints or ():
            said = endpoint.conditions
            drains = said.ready is False or bool(said.terminating)
            for address in endpoint.addresses[:1]:  # further ones are of the same pod
                url = url_of(address, number)
                known = found[role].get(url)
                addresses = tuple(url_of(address, one, "tcp") for one in named)
                engines = data_parallel if role == "prefill" else 1
                drain = drains and (known is None or known.drain)
                at = "" if lends is None else url_of(address, lends, "tcp")
                found[role][url] = ListedWorker(url, drain, addresses, data_parallel=engines, cell=cell, store=at)
    return Members(*(tuple(each for _, each in sorted(found[role].items())) for role in ROLES))


class KubernetesSource:
    """Workers behind Services of one namespace."""

    def __init__(self, text: str, *, api: str = API, account: Path = ACCOUNT, watch_s: int = WATCH_S) -> None:
        """Raises ConfigError for another text."""
        pairs = pairs_of(text, f"kubernetes:{text}")
        self._port, self._namespace = pairs.pop("port", ""), pairs.pop("namespace", "")
        self._control, self._cell = pairs.pop("control", ""), pairs.pop("cell", "")
        self._store = pairs.pop("store", "")
        engines = pairs.pop("data_parallel", "1")
        several = engines != "1"
        if not engines.isdecimal() or not 1 <= int(engines) <= MAX_ENGINES or (several and not self._control):
            raise ConfigError(
                f"discover: got data_parallel={engines} in kubernetes:{text}; expected 1 to {MAX_ENGINES}, beside "
                "control=NAME; correct it"
            )
        self._data_parallel = int(engines)
        self._services = {service: role for role, service in pairs.items()}
        if not pairs or not pairs.keys() <= set(ROLES) or len(self._services) != len(pairs):
            raise ConfigError(
                f"discover: got kubernetes:{text}; expected ROLE=SERVICE with another Service for each role (roles "
                f"{', '.join(ROLES)}), and port=NAME, control=NAME, store=NAME, data_parallel=N, cell=NAME, "
                "namespace=NAME; correct it"
            )
        self._api, self._account, self._watch_s = api, account, watch_s

    @property
    def names_control(self) -> bool:
        return bool(self._control)

    def lists(self, role: str) -> bool:
        return role in self._services.values()

    async def follow(self, tell: Callable[[Members], None]) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_S, sock_read=self._watch_s + _ANSWER_S)
            connector = aiohttp.TCPConnector(ssl=self._tls())
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                while True:
                    slices, version = await self._list(session)
                    tell(self._members(slices))
                    await self._watch(session, slices, version, tell)
                    await asyncio.sleep(_BREATH_S * random.uniform(0.5, 1))
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:  # TimeoutError is an OSError
            raise SourceDown(f"{self._api}: {str(error) or type(error).__name__}") from None

    async def _list(self, session: aiohttp.ClientSession) -> tuple[dict[str, EndpointSlice], str]:
        slices: dict[str, EndpointSlice] = {}
        query = {"limit": str(_PAGE)}
        while True:
            async with asyncio.timeout(_ANSWER_S), self._get(session, query) as response:
                if response.status == 410 and "continue" in query:  # the list was compacted while it was read
                    slices, query = {}, {"limit": str(_PAGE)}
                    continue
                if response.status != 200:
                    raise SourceDown(f"{self._api}: GET endpointslices answered {response.status}")
                page = msgspec.json.decode(await response.read(), type=_List)
            slices |= {each.metadata.name: each for each in page.items or ()}
            if not page.metadata.continue_:
                return slices, page.metadata.resource_version
            query["continue"] = page.metadata.continue_

    async def _watch(
        self,
        session: aiohttp.ClientSession,
        slices: dict[str, EndpointSlice],
        version: str,
        tell: Callable[[Members], None],
    ) -> None:
        """Returns when all must be listed again."""
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(self._watch_s)
        async with self._get(session, query) as response:
            if response.status == 410:  # the version is too old
                return
            if response.status != 200:
                raise SourceDown(f"{self._api}: watch of endpointslices answered {response.status}")
            unread = bytearray()
            async for data in response.content.iter_any():
                unread += data
                *lines, rest = unread.split(b"\n")
                if len(rest) > _MAX_EVENT_NBYTES:
                    raise SourceDown(f"{self._api}: an event of more than {_MAX_EVENT_NBYTES} bytes")
                changed = False
                for line in filter(None, lines):
                    event = msgspec.json.decode(line, type=_Event)
                    if event.type == "BOOKMARK":  # says how far the watch is; the next list begins anew anyhow
                        continue
                    if event.type not in ("ADDED", "MODIFIED", "DELETED"):  # ERROR, mostly 410
                        return
                    said = msgspec.json.decode(event.object, type=EndpointSlice)
                    if event.type == "DELETED":
                        slices.pop(said.metadata.name, None)
                    else:
                        slices[said.metadata.name] = said
                    changed = True
                unread = rest
                if changed:
                    tell(self._members(slices))

    def _members(self, slices: Mapping[str, EndpointSlice]) -> Members:
        names = self._port, self._control, self._cell
        return members_of(slices, self._services, *names, data_parallel=self._data_parallel, store=self._store)

    def _get(self, session: aiohttp.ClientSession, query: Mapping[str, str]) -> Any:
        namespace = self._namespace or self._read("namespace")
        selector = f"{_SERVICE} in ({','.join(self._services)})"
        return session.get(
            self._api + _PATH.format(namespace),
            params={**query, "labelSelector": selector},
            headers={"Authorization": f"Bearer {self._read('token')}", "Accept": "application/json"},
        )

    def _read(self, name: str) -> str:
        path = self._account / name
        try:
            return path.read_text(encoding="ascii").strip()
        except OSError as error:
            raise SourceDown(
                f"cannot read {path}: {error.strerror}; run the proxy in a pod whose service account is mounted"
            ) from None

    def _tls(self) -> ssl.SSLContext | bool:
        if not self._api.startswith("https://"):
            return True
        return ssl.create_default_context(cadata=self._read("ca.crt"))
