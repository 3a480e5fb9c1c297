"""The router."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pdlink.config.listen import Address, HostPort, place_of
from pdlink.config.log import LogConfig
from pdlink.config.port_ranges import in_full
from pdlink.config.section import Seconds, Section, in_pairs, no_use
from pdlink.config.tracing import TracingConfig

DEFAULT_POLICIES: dict[Literal["prefill", "decode"], str] = {"prefill": "cost", "decode": "least_loaded"}
"""What `pdlink bench route` finds best; `cost` for decode, too, gains nothing there and takes twice the time."""

DialectName = Literal["pdlink", "vllm", "vllm-nixl", "sglang"]

MAX_ENGINES = 4096
"""Data-parallel engines of one server."""

DEFAULT_PORT = 8000
"""Of `listen` without one."""


class RateLimit(Section):
    """What one API key may ask in a minute; 0 sets no limit."""

    requests: int = Field(default=0, ge=0)
    """Requests."""
    tokens: int = Field(default=0, ge=0)
    """Tokens of prompts, and of answers as long as the request allows them."""


def _url(text: str) -> str:
    """As people type it: http:// may be left out."""
    return text if "://" in text or not text else f"http://{text}"


class ProxyConfig(Section):
    """The router in front of the two pools."""

    listen: Address = "127.0.0.1:8000"
    """HOST[:PORT] to serve HTTP on; port 0 takes a free one, which is printed."""
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), repr=False)
    """Clients must send one of these as `Authorization: Bearer KEY`. None here and no `api_key_file` lets all in."""
    api_key_file: str | None = None
    """More of them, one a line."""
    admin_key_file: str | None = None
    """Keys of operators, one a line. They may change the workers at run time (GET, PUT, POST, DELETE /workers), and
    see the requests of all `api_keys`; a client with one of several keys sees its own."""
    tls_cert: str | None = None
    """PEM file of the certificate chain to serve HTTPS with; needs `tls_key`."""
    tls_key: str | None = None
    """PEM file of its private key, which only this user can read."""
    worker_key_file: str | None = None
    """The workers' `security.http_key_file`: sent to them in X-Pdlink-Key. For vLLM a file with the key that it was
    given as --api-key, sent to it instead of the client's Authorization."""
    worker_ca: str | None = None
    """PEM file of the authority that signed the certificates of https:// workers; None trusts the system's."""
    dialect: DialectName = "pdlink"
    """What the workers run: pdlink's own engine; vLLM with PDLinkConnector (`vllm`) or with its own NixlConnector or
    NixlPushConnector (`vllm-nixl`); or SGLang."""
    prefill: tuple[str, ...] = ()
    """Base URLs of the prefill workers."""
    decode: tuple[str, ...] = ()
    """Base URLs of the decode workers."""
    both: tuple[str, ...] = ()
    """Base URLs of plain servers of any engine: they serve whole requests: what no pair can serve, and
    what begins sooner there."""
    discover: tuple[str, ...] = ()
    """Further sources of workers: file:PATH, dns:..., kubernetes:...; see docs/deploy.md. A source that is down keeps
    what it listed last."""
    token_file: str | None = None
    """The workers' `security.token_file`: in place of worker_key_file."""
    cells: dict[str, str] = {}
    """By base URL of a worker, the name of its cell (a rack, an RDMA network): KV moves within one only."""
    control: dict[str, tuple[str, ...]] = {}
    """Dialect vllm: by base URL of a prefill worker, the address its connector listens on, or a list with one for
    each tensor parallel rank: "tcp://10.0.0.1:8101", or "tcp://10.0.0.1:8101-8104" for several ports; with
    `data_parallel` those of the first engine, then of the second. Others say it themselves."""
    data_parallel: dict[str, Annotated[int, Field(ge=1, le=MAX_ENGINES)]] = {}
    """Dialect vllm: by base URL of a prefill worker, its --data-parallel-size, if it has several engines behind its
    port. Each is a worker of its own here, and gets its requests by X-data-parallel-rank."""
    kv_events: dict[str, tuple[str, ...]] = {}
    """By base URL of a worker, where it publishes which KV it has, so that `prefix` and `cost` need not guess:
    "tcp://HOST:5557", or "tcp://HOST:5557,tcp://HOST:5558" with its replay endpoint; a list if there are several. For
    --kv-events-config of vLLM and SGLang; workers of pdlink's own engine say it themselves."""
    stores: dict[str, Annotated[str, Field(min_length=1, max_length=512)]] = {}
    """Dialects vllm, sglang: by base URL of a worker, where other stores ask the one that it keeps KV in
    (`tiers.peer_port`): "tcp://HOST:8110". It pulls what others have of a prompt, and they from it. Others say it
    themselves."""
    tokenize_wait_s: float = Field(default=0.05, ge=0, le=5)
    """Longest wait for the token ids of a text, with which it is looked up in KV events. 0 never asks."""
    policy: str | dict[Literal["prefill", "decode"], str] = DEFAULT_POLICIES
    """How workers are chosen, for both legs or each: `round_robin`, `least_loaded`, `consistent_hash`, `session`,
    `prefix`, `cost` (docs/router.md); or `path.to.module:Class`."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes that serve the port together: routers that share nothing else. Each gets an equal part of
    `queue_size`, `max_connections`, `rate_limit` and `rate_limits`, rounded up, and counts in `routers`. The kernel
    gives each connection to one of them: a client with a single connection has the limits of one."""
    routers: int = Field(default=1, ge=1)
    """Proxies before these workers. With several, `least_loaded`, `prefix` and `cost` choose among two workers drawn
    by chance and the one that the beginning of the prompt draws: with a view of all, proxies send to the same one."""
    decode_alone_tokens: int = Field(default=0, ge=0)
    """Prompts of which the decode worker lacks at most so many tokens are computed there, without a prefill leg: a
    transfer would cost more than it saves."""
    decode_alone_idle_tokens: int = Field(default=0, ge=0)
    """The same for a decode worker that has nothing else to do."""
    retries: int = Field(default=1, ge=0)
    """New attempts, each with a new transfer id and other workers where there are some, before the first token."""
    eject_share: float = Field(default=0.34, ge=0, le=1)
    """Share of a pool that may be left out for failing or being slow far beyond its peers; of two or three workers
    one may be. 0 leaves none out."""
    recover_streams: int = Field(default=3, ge=0)
    """How often a stream of completions or of a chat goes on at another worker when its own died, where its answer
    can be repeated (docs/router.md). 0 ends such streams with an error."""
    queue_size: int = Field(default=1024, ge=0)
    """Requests that may wait for a worker; more are answered 503 `overloaded`. 0 never waits."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait while every decode worker is full, by its own account of free blocks, or every prefill worker by
    `prefill_queue_tokens`."""
    prefill_queue_tokens: int = Field(default=0, ge=0)
    """A prefill worker with so many tokens of prompts to compute gets no more requests: they wait here, where
    `shares` and priorities count. 0 sets no limit."""
    no_worker_timeout_s: float = Field(default=2.0, ge=0)
    """Longest wait while there is no healthy worker, as in a rolling update; then the answer is 503."""
    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default={}, repr=False)
    """Weights of those who wait, by API key or model; 1 for others. Each pair of key and model gets tokens in
    proportion."""
    rate_limit: RateLimit = RateLimit()
    """Of every API key that has none of its own: over it, the answer is 429. Without `api_keys` a client can call
    itself anything."""
    rate_limits: dict[str, RateLimit] = Field(default={}, repr=False)
    """By API key, in place of `rate_limit`."""
    on_no_prefill: Literal["fail", "decode_only"] = "decode_only"
    """When no prefill worker is healthy: let decode compute the prompt (counted), or answer an error."""
    health_interval_s: Seconds = 0.5
    """Time between two looks at a worker's /health. vLLM and SGLang servers are not asked while they answer requests
    well."""
    connect_timeout_s: Seconds = 2.0
    """Longest wait for a connection to a worker."""
    first_byte_timeout_s: Seconds = 600.0
    """Longest wait for a leg's answer to begin."""
    idle_timeout_s: Seconds = 120.0
    """Longest silence inside a stream."""
    request_timeout_s: Seconds = 1200.0
    """One request, all its attempts together; above the workers' `timeouts.request_s`."""
    kv_header_grace_s: float = Field(default=0.05, ge=0, le=1)
    """How long prefill's first token of a stream waits for decode to say whether it has the KV. After that
    X-Pdlink-KV is `transferring`, and the stream's last comment tells."""
    max_body_nbytes: int = Field(default=16 * 2**20, ge=1)
    """Largest body of a client's request; pdlink's own workers read 16 MiB."""
    max_connections: int = Field(default=0, ge=0)
    """Open connections to workers; 0 sets no limit."""
    decision_log: str | None = None
    """File that gets a line of JSON for each request that has ended: candidates with scores, choice, what became of
    both legs, and the fields of a trace. SIGHUP opens it again."""
    decision_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the requests that are written to `decision_log`, and whose candidates `pdlink explain` shows."""
    tracing: TracingConfig = TracingConfig()
    """Spans for OpenTelemetry."""
    log: LogConfig = LogConfig()
    """Lines on standard error."""
    summary_s: float = Field(default=10.0, ge=0)
    """Seconds between two lines of the log that sum up requests; none is written while nothing
    happens. 0 writes none."""
    page: bool = True
    """Serve a page for people at /pdlink/, and its data. Up to 64 workers are asked for more every 10 s; of a larger
    fleet nobody is while nobody looks."""
    drain_s: Seconds = 10.0
    """How long a proxy that was told to stop lets running requests finish."""

    @property
    def at(self) -> HostPort:
        """Where it listens."""
        return place_of(self.listen, DEFAULT_PORT)

    def policy_of(self, leg: Literal["prefill", "decode"]) -> str:
        """The name of one leg's policy."""
        return self.policy if isinstance(self.policy, str) else self.policy.get(leg, DEFAULT_POLICIES[leg])

    @field_validator("prefill", "decode", "both", mode="after")
    @classmethod
    def _with_scheme(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_url(text) for text in value)

    @field_validator("control", "kv_events", "data_parallel", "cells", "stores", mode="after")
    @classmethod
    def _keys_with_scheme(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {_url(text): found for text, found in value.items()}

    @field_validator("control", "kv_events", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {url: (found,) if isinstance(found, str) else found for url, found in value.items()}

    @field_validator("control", mode="after")
    @classmethod
    def _in_full(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {url: in_full(found) for url, found in value.items()}

    @model_validator(mode="after")
    def _complete(self) -> ProxyConfig:
        in_pairs(self, "", ("tls_cert", "tls_key"))
        if self.token_file is not None:
            no_use(self, "", ("worker_key_file",), "is made of token_file")
        if self.on_no_prefill == "fail" and (self.decode_alone_tokens or self.decode_alone_idle_tokens):
            raise ValueError(
                "decode_alone_tokens: is of no use with on_no_prefill: fail, which keeps prompts away from decode; "
                "leave one of them out"
            )
        if self.dialect != "vllm":
            no_use(self, "", ("control", "data_parallel"), f"is for dialect: vllm, and dialect is {self.dialect}")
        if self.dialect not in ("vllm", "sglang"):
            no_use(self, "", ("stores",), f"is for dialects vllm and sglang, and dialect is {self.dialect}")
        if self.dialect == "vllm":
            known = {url.rstrip("/") for url in self.control}
            for url in self.prefill:
                if url.rstrip("/") not in known:
                    raise ValueError(
                        f"control: no address for the prefill worker {url}; it is the `listen` of its "
                        "kv_connector_extra_config, as tcp://HOST:PORT"
                    )
            served = {url.rstrip("/").partition("://")[2]: url for url in (*self.prefill, *self.decode)}
            for url, addresses in self.control.items():
                for address in addresses:
                    if (other := served.get(address.partition("://")[2])) is not None:
                        raise ValueError(
                            f"control: {address}, given for {url}, is the HTTP port of {other}; it must be the "
                            "`listen` of that server's kv_connector_extra_config"
                        )
        return self
