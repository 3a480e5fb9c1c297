"""What every request is checked for before a worker is involved: key, body, model and rate; and which of its headers
are passed on."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from aiohttp import web

from pdlink.api.errors import refusal_of, refused
from pdlink.api.fields import BadField
from pdlink.api.keys import key_of
from pdlink.api.openai import GENERATE, Call, parse
from pdlink.api.pages import refused_page
from pdlink.api.session import ID_HEADER, TTL_HEADER, asked_session
from pdlink.config import is_loopback
from pdlink.config.proxy import RateLimit
from pdlink.errors import InvalidApiKey, InvalidRequest, NoWorker, RateLimited, UnknownModel

from .access import admin_keys, api_keys, clean, may_enter
from .fleet import wanted
from .ids import new_id
from .limits import RateLimits
from .spans import TRACE_HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multidict import CIMultiDictProxy

    from pdlink.config import ProxyConfig

    from .pools import Pools

MAX_OWNERS = 8192
"""Requests of which the key is known: more than are shown."""
_PASSED_ON = (*TRACE_HEADERS, ID_HEADER, TTL_HEADER)
"""Without the first two each worker would begin a trace of its own."""
_ADDRESS_MARKS = ("___prefill_addr_", "___decode_addr_")
"""With these in X-Request-Id a client could name the servers that vLLM's P2pNccl and MoRI-IO connectors talk to."""


class Entry:
    """Of one proxy."""

    def __init__(self, config: ProxyConfig, pools: Pools, *, keyed: bool, unserved: Mapping[str, str]) -> None:
        """keyed: workers get the proxy's own Authorization. unserved: of the dialect.

        Raises ConfigError for a key file without keys."""
        self._config, self._pools, self._keyed = config, pools, keyed
        self._unserved = unserved
        self._admin_keys = admin_keys(config)
        self.read_keys()
        self._loopback = is_loopback(config.at.host)
        self._owners: OrderedDict[str, str] = OrderedDict()
        """By id of a request, the key that it came with, where several have one; empty if it came with two."""
        self.limits = _limits(config)
        """None where nothing is limited."""
        self.draining = False
        """Nothing is let in any more."""

    def read_keys(self) -> None:
        """Raises ConfigError, and keeps those it has."""
        self.api_keys = api_keys(self._config)
        self.tenants = len(self.api_keys) > 1
        """There are several keys."""
        sent = (f"Bearer {key.decode(errors='surrogateescape')}" for key in self.api_keys)
        self._bearers = frozenset(each for each in sent if clean(each))
        """As most clients send them, of those that may be sent on. To look one up takes no longer for a key that is
        nearly right: a set compares texts of equal hashes alone, and those have a random seed."""

    def adopt(self, config: ProxyConfig, *, anew: bool) -> None:
        """These are the settings from now on. anew: rates are counted anew."""
        self._config = config
        if anew:
            self.limits = _limits(config)

    def taken(self, path: str, said: dict[str, str], body: bytes) -> Call | None:
        """A request that may be served, read from its head and body; None for one that is to be refused, or judged by
        `checked`."""
        if len(body) > self._config.max_body_nbytes or not self.admits(said):
            return None
        try:
            call = parse(path, body)
            fields = call.said
            if ID_HEADER in said or fields.session_id or fields.session_ttl_s is not None:  # else no call for it
                asked_session(fields.session_id, fields.session_ttl_s, said)
        except BadField:
            return None
        if not (self._pools.serves(call.model) and self._unserved.keys().isdisjoint(call.fields)):
            return None
        limits = self.limits
        if limits is not None and limits.take(key_of(said), wanted(call, None).total_tokens, time.monotonic()):
            return None
        return call

    def admits(self, said: Mapping[str, str]) -> bool:
        """Whether a request with this head may come in, whatever its body is: looked at before that is waited for."""
        if self.draining:
            return False
        if self.api_keys:
            return said.get("authorization") in self._bearers or may_enter(self.api_keys, said)
        if said.get("content-type") == "application/json" and "origin" not in said and "sec-fetch-site" not in said:
            return True  # nearly all; what a page sends has one of these
        return not self._refused_page(said)

    async def checked(self, request: web.Request) -> Call | web.Response:
        """The client's checked request, or the error response."""
        data = await self.admitted(request)
        if isinstance(data, web.Response):
            return data
        try:
            models = self._pools.models() if request.path == GENERATE else ()
            call = parse(request.path, data, models[0] if len(models) == 1 else None)
            if len(request.headers.getall(ID_HEADER, ())) > 1:
                raise BadField("X-Session-ID: got several; expected one; leave the others out")
            asked_session(call.said.session_id, call.said.session_ttl_s, request.headers)
            self._refuse_unserved(call)
        except BadField as error:
            return refusal_of(error)
        return self.unknown_model(call.model) or call

    def _refuse_unserved(self, call: Call) -> None:
        """Raises BadField."""
        for name in self._unserved.keys() & call.fields.keys():
            if bytes(call.fields[name]) != b"null":
                raise BadField(f"{name}: {self._unserved[name]}; leave it out", name)

    async def admitted(self, request: web.Request, *, operators: bool = False) -> bytes | web.Response:
        """The body of a request that may be served, or the error response. operators: may send it, too."""
        if not (self.may_look(request) if operators else self.may_enter(request)):
            return self.no_entry(request)
        if self.draining:
            refusal = refused(503, "the proxy is shutting down", NoWorker.code)
            refusal.force_close()
            return refusal
        try:
            return await self._body(request)
        except web.HTTPRequestEntityTooLarge:
            limit = self._config.max_body_nbytes
            return refused(413, f"the body is larger than max_body_nbytes = {limit}", InvalidRequest.code)
        except TimeoutError:
            limit_s = self._config.idle_timeout_s
            return refused(408, f"the body did not arrive within {limit_s:g} s", InvalidRequest.code)

    async def _body(self, request: web.Request) -> bytes:
        """Raises HTTPRequestEntityTooLarge, TimeoutError."""
        content = request.content
        if content.is_eof():  # it came with the head: nothing to wait for
            data = content.read_nowait()
            if len(data) > self._config.max_body_nbytes:
                raise web.HTTPRequestEntityTooLarge(self._config.max_body_nbytes, len(data))
            return data
        async with asyncio.timeout(self._config.idle_timeout_s):
            return await request.read()

    def may_enter(self, request: web.Request) -> bool:
        """Whether the caller has a key, if the proxy has some; without any, whether no foreign page calls."""
        if self.api_keys:
            return may_enter(self.api_keys, request.headers)
        return not self._refused_page(request.headers)

    def may_look(self, request: web.Request) -> bool:
        """The same for what is told of the proxy, its workers and requests, which operators may see, too."""
        return self.may_enter(request) or self._is_operator(request)

    def sees_only(self, request: web.Request) -> str | None:
        """The key of a caller who may see his own requests alone: one of several. None for an operator, with a key of
        `admin_key_file`; for the only key; and where there are none."""
        if not self.tenants or self._is_operator(request):
            return None
        return key_of(request.headers)

    def owns(self, key: str, request_id: str) -> bool | None:
        """Whether the request of this id came with this key, and with no other one; None if it is not known here."""
        owner = self._owners.get(request_id)
        return None if owner is None else owner == key != ""

    def _is_operator(self, request: web.Request) -> bool:
        return bool(self._admin_keys) and may_enter(self._admin_keys, request.headers)

    def _refused_page(self, said: Mapping[str, str]) -> str:
        return refused_page(said, loopback=self._loopback, setting="api_keys")

    def own(self, request_id: str, said: Mapping[str, str]) -> None:
        """A request with this head was let in: those who send its key may see it. Of `tenants`."""
        key = key_of(said)
        if self._owners.setdefault(request_id, key) != key:
            self._owners[request_id] = ""
        self._owners.move_to_end(request_id)  # of two requests of one id the later one is shown longer
        while len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def operators_only(self) -> web.Response:
        """The answer to one of several keys that asks for what is of all."""
        return refused(403, "this shows or does what is of all keys; send a key of admin_key_file", "forbidden")

    def no_entry(self, request: web.Request) -> web.Response:
        """The answer without a valid key. It closes the connection, so that the client stops sending the body."""
        if not self.api_keys:
            refusal = refused(403, self._refused_page(request.headers), "forbidden")
            refusal.force_close()
            return refusal
        refusal = refused(
            InvalidApiKey.http_status, "send a valid key as `Authorization: Bearer KEY`", InvalidApiKey.code
        )
        refusal.headers["WWW-Authenticate"] = "Bearer"
        refusal.force_close()
        return refusal

    def unknown_model(self, model: str) -> web.Response | None:
        """The error response if no worker serves it, also none that has not answered yet."""
        return None if self._pools.serves(model) else self.no_model(model)

    def no_model(self, model: str) -> web.Response:
        message = f"model {model!r} is not served here; known: {', '.join(self._pools.models())}"
        return refused(UnknownModel.http_status, message, UnknownModel.code, "model")

    def over_limit(self, request: web.Request, tokens: int) -> web.Response | None:
        """Counts a request of so many tokens; the error response if its key is over its rate limit."""
        if self.limits is None:
            return None
        wait_s = self.limits.take(key_of(request.headers), tokens, time.monotonic())
        if not wait_s:
            return None
        message, status = f"rate limit exceeded; retry in {wait_s:.0f} s", RateLimited.http_status
        return refused(status, message, RateLimited.code, retry_after_s=math.ceil(wait_s))

    def leg_headers(self, said: dict[str, str] | CIMultiDictProxy[str]) -> dict[str, str]:
        """What is passed on of a client's headers, with an X-Request-Id."""
        request_id = clean(said["x-request-id"]) if "x-request-id" in said else None
        if request_id is None or any(mark in request_id for mark in _ADDRESS_MARKS):
            request_id = f"req-{new_id()}"
        headers = {"X-Request-Id": request_id}
        for name in _PASSED_ON:
            if name in said:
                value = said[name] if isinstance(said, dict) else ",".join(said.getall(name))
                if kept := clean(value):
                    headers[name] = kept
        if not self._keyed and (sent := said.get("authorization")) and (sent in self._bearers or clean(sent)):
            headers["Authorization"] = sent
        return headers


def _limits(config: ProxyConfig) -> RateLimits | None:
    limited = config.rate_limits or config.rate_limit != RateLimit()
    return RateLimits(config.rate_limit, config.rate_limits) if limited else None
