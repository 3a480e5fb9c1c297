"""The router."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pdlink.config.section import Port, Seconds, Section, in_pairs, no_use

DEFAULT_POLICIES: dict[Literal["prefill", "decode"], str] = {"prefill": "cost", "decode": "least_loaded"}
"""What `pdlink bench route` finds best; `cost` for decode, too, gains nothing there and takes twice the time."""


class ProxyConfig(Section):
    """The router in front of the two pools."""

    host: str = "127.0.0.1"
    """Address to serve HTTP on."""
    port: Port = 8000
    """HTTP. 0 takes a free one, which is printed."""
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), repr=False)
    """Clients must send one of these as `Authorization: Bearer KEY`. None here and no `api_key_file` lets all in."""
    api_key_file: str | None = None
    """More of them, one a line."""
    tls_cert: str | None = None
    """PEM file of the certificate chain to serve HTTPS with; needs `tls_key`."""
    tls_key: str | None = None
    """PEM file of its private key, which only this user can read."""
    worker_key_file: str | None = None
    """The workers' `security.http_key_file`: sent to them in X-Pdlink-Key. For vLLM a file with the key that it was
    given as --api-key, sent to it instead of the client's Authorization."""
    worker_ca: str | None = None
    """PEM file of the authority that signed the certificates of https:// workers; None trusts the system's."""
    dialect: Literal["pdlink", "vllm", "vllm-nixl"] = "pdlink"
    """What the workers run: pdlink's own engine, vLLM with PDLinkConnector, or vLLM with its own NixlConnector."""
    prefill: tuple[str, ...] = ()
    """Base URLs of the prefill workers."""
    decode: tuple[str, ...] = ()
    """Base URLs of the decode workers."""
    decode_ranks: int | None = Field(default=None, ge=1)
    """Dialect vllm: tensor parallel ranks of a decode server, where they are not as many as a prefill server's."""
    control: dict[str, tuple[str, ...]] = {}
    """Dialect vllm: by base URL of a prefill worker, the address its connector listens on ("tcp://10.0.0.1:8101"), or
    a list with one for each tensor parallel rank. Workers of pdlink's own engine say it themselves."""
    policy: str | dict[Literal["prefill", "decode"], str] = DEFAULT_POLICIES
    """How workers are chosen, for both legs or each: `round_robin`; `least_loaded` (fewest tokens to do);
    `power_of_two` (the less loaded of two, for many routers); `consistent_hash` (equal beginnings of prompts to one
    worker); `session` (by header X-Session-Id or `user`); `prefix` (where most of the prompt was sent before); `cost`
    (where the first token is expected soonest); or `path.to.module:Class`, a policy of your own."""
    retries: int = Field(default=1, ge=0)
    """New attempts, each with a new transfer id and other workers where there are some, before the first token."""
    queue_size: int = Field(default=1024, ge=0)
    """Requests that may wait for a worker; more are answered 429. 0 never waits."""
    queue_timeout_s: Seconds = 60.0
    """Longest wait while every decode worker is full, by its own account of free blocks."""
    no_worker_timeout_s: float = Field(default=2.0, ge=0)
    """Longest wait while there is no healthy worker, as in a rolling update; then the answer is 503."""
    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default={}, repr=False)
    """Weights of those who wait, by API key or model; both count, and 1 for others. Each pair of key and model gets
    tokens in proportion to its weight."""
    on_no_prefill: Literal["fail", "decode_only"] = "decode_only"
    """What to do when no prefill worker is healthy, or a request has lost its own and there is no other: let decode
    compute the prompt (counted), or answer an error. `fail` is for decode pools that prompts must not slow down."""
    health_interval_s: Seconds = 0.5
    """Time between two looks at a worker's /health."""
    connect_timeout_s: Seconds = 2.0
    """Longest wait for a connection to a worker."""
    first_byte_timeout_s: Seconds = 600.0
    """Longest wait for a leg's answer to begin."""
    idle_timeout_s: Seconds = 120.0
    """Longest silence inside a stream."""
    request_timeout_s: Seconds = 1200.0
    """One request, all its attempts together; above the workers' `timeouts.request_s`."""
    kv_header_grace_s: float = Field(default=0.05, ge=0, le=1)
    """How long prefill's first token of a stream waits for decode to say in its headers whether it has the KV. After
    that the client's X-Pdlink-KV is `transferring`, and the stream's last comment tells. 0 never waits."""
    max_body_nbytes: int = Field(default=16 * 2**20, ge=1)
    """Largest body of a client's request; pdlink's own workers read 16 MiB."""
    max_connections: int = Field(default=0, ge=0)
    """Open connections to workers; 0 sets no limit."""
    drain_s: Seconds = 10.0
    """How long a proxy that was told to stop lets running requests finish."""

    def policy_of(self, leg: Literal["prefill", "decode"]) -> str:
        """The name of one leg's policy."""
        return self.policy if isinstance(self.policy, str) else self.policy.get(leg, DEFAULT_POLICIES[leg])

    @field_validator("control", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {url: (found,) if isinstance(found, str) else found for url, found in value.items()}

    @model_validator(mode="after")
    def _complete(self) -> ProxyConfig:
        in_pairs(self, "", ("tls_cert", "tls_key"))
        if self.dialect != "vllm":
            no_use(self, "", ("control", "decode_ranks"), f"is for dialect: vllm, and dialect is {self.dialect}")
        if self.dialect == "vllm":
            known = {url.rstrip("/") for url in self.control}
            for url in self.prefill:
                if url.rstrip("/") not in known:
                    raise ValueError(
                        f"control: no address for the prefill worker {url}; it is the control_host and control_port "
                        "of its kv_connector_extra_config, as tcp://HOST:PORT"
                    )
            served = {url.rstrip("/").partition("://")[2]: url for url in (*self.prefill, *self.decode)}
            for url, addresses in self.control.items():
                for address in addresses:
                    if (other := served.get(address.partition("://")[2])) is not None:
                        raise ValueError(
                            f"control: {address}, given for {url}, is the HTTP port of {other}; it must be the "
                            "control_port of that server's kv_connector_extra_config"
                        )
        return self
