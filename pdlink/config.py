"""Every setting of every role, with its unit and default, and the one place that reads the environment.

A value comes from the default, a YAML file, the environment (`PDLINK_` + the path of the key, `__` between levels:
`PDLINK_TRANSPORT__KIND=mapped`) and the command line, the later winning. Unknown keys are refused with the nearest
valid name, because a mistyped setting that is silently ignored is a setting that lies.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT_PREFIX = "PDLINK_"

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


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(_Section):
    """Which model a worker holds."""

    path: str | None = None
    """Local directory or hub id of a transformers causal LM. None makes a small Llama from `seed` on the spot."""
    revision: str = "main"
    """Revision on the hub; part of every block key and compared in the handshake."""
    name: str = "pdlink-tiny"
    """Name clients use in `model`; also the name of the built model. Defaults to the last part of `path`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and KV."""
    seed: int = 0
    """Of the built model's weights."""
    num_layers: int = Field(default=8, ge=1)
    """Layers of the built model."""
    max_tokens: int = Field(default=8192, ge=1)
    """Longest prompt plus answer, in tokens."""

    @model_validator(mode="before")
    @classmethod
    def _name_from_path(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("path") and not data.get("name"):
            return {**data, "name": Path(str(data["path"])).name}
        return data


class CacheConfig(_Section):
    """The paged KV cache of a worker."""

    block_tokens: int = Field(default=16, ge=1)
    """Tokens per block. The two sides of a link may differ."""
    num_blocks: int = Field(default=1024, ge=2)
    """Blocks in the pool."""
    memory_fraction: float | None = Field(default=None, gt=0, lt=1)
    """With `engine.device` on a GPU: share of its whole memory that the pool takes, instead of `num_blocks`. Workers
    on one GPU share it: their fractions, and what their models need, must fit together."""
    order: str = "LPBTH"
    """Order of the axes layer, part (K/V), block, token, head in memory; see `pdlink.kv.layout.paged_layout`."""
    share_prefixes: bool = True
    """Reuse the blocks of an equal prefix inside this worker."""


class EngineConfig(_Section):
    """Scheduling of the built-in engine."""

    max_batched_tokens: int = Field(default=512, ge=1)
    """Most tokens of one forward pass; longer prompts are prefilled in chunks of this."""
    max_running: int = Field(default=64, ge=1)
    """Most requests in one forward pass."""
    max_waiting: int = Field(default=256, ge=0)
    """Requests queued beyond the running ones before a new one is answered 503."""
    threads: int = Field(default=1, ge=1)
    """CPU threads torch may use."""
    device: str = Field(default="cpu", pattern="^(cpu|cuda(:[0-9]{1,3})?)$")
    """Where the model computes and the KV is: "cpu", "cuda" (the first GPU) or "cuda:1". Not run on a GPU yet."""


class SharingConfig(_Section):
    """How the transfers of one transport share it; `pdlink/endpoint/order.py` says what follows from these."""

    order: Literal["shortest", "fcfs"] = "shortest"
    """Which transfer goes next: the one that lacks the fewest bytes, with ageing, or the one that came first. The
    second is there to compare with (`pdlink bench sharing`)."""
    window_nbytes: int = Field(default=64 * 2**20, ge=1)
    """Most bytes handed to a transport and not landed, over all peers that keep up."""
    peer_window_nbytes: int = Field(default=32 * 2**20, ge=1)
    """Most of them to one peer: what a new transfer to it has to wait for. The link runs dry if they land before
    this process has noticed, which takes up to 5 ms while Python code runs (`sys.getswitchinterval`): keep it above
    5 ms of the link, 32 MiB at 6 GB/s."""
    part_nbytes: int = Field(default=4 * 2**20, ge=1)
    """Larger pushes are cut, between blocks, into parts of about this size."""
    ageing: float = Field(default=0.05, gt=0, le=1)
    """Bytes of advantage for every byte the link moves while a transfer waits: one of S bytes is passed only by
    smaller ones that come while the link moves the next S / ageing. Less brings the small ones through sooner, and
    lets the large ones wait longer. Simulated, lognormal lengths, 80 % of one link: the mean time to ready is 30 % of
    first come first served's without ageing and with 0.05, 36 % with 0.2, 73 % with 1."""

    @model_validator(mode="after")
    def _nested(self) -> SharingConfig:
        sizes = [(name, getattr(self, name)) for name in ("part_nbytes", "peer_window_nbytes", "window_nbytes")]
        for (name, value), (later, limit) in zip(sizes, sizes[1:], strict=False):
            if value > limit:
                raise ValueError(f"transport.sharing: {name} = {value} must be at most {later} = {limit}")
        return self


class StagingConfig(_Section):
    """How short runs are packed on their way; see `pdlink.transport.staging`."""

    table: str | None = None
    """File of measured lengths, made by `pdlink bench tune --write FILE`; None takes the package's own."""
    tcp: int | None = Field(default=None, ge=0, le=131072)
    """Runs shorter than this many bytes are packed over tcp, 0 packs none; None takes the table's."""
    ucx: int | None = Field(default=None, ge=0, le=131072)
    """The same over every lane of UCX."""


class TransportConfig(_Section):
    """How bytes travel."""

    kind: Literal["auto", "mapped", "ucx", "tcp"] = "auto"
    """auto takes whatever works between two workers, `prefer` first."""
    prefer: Literal["mapped", "ucx", "tcp"] = "mapped"
    """Mapped memory is the faster one where it can work, which is on one host. Behind it comes ucx where there is
    RDMA, then tcp."""
    require: str | None = None
    """Lane that must really be used ("mapped", "cma", "tcp", "rc"); connecting fails if it is another one."""
    ucx_tls: str = "auto"
    """UCX transports: "tcp", "shm" (same host, cross-memory attach), or any UCX_TLS list. auto leaves it to UCX."""
    ucx_devices: str = "auto"
    """Devices that UCX may use, and listens on without asking anybody for a key: "eth1", "mlx5_0:1", a list of them,
    or "all". auto takes "lo" for a worker that only this host can reach, else "all". See docs/security.md."""
    tcp_host: str | None = None
    """Address that the tcp transport listens on; None uses `control_host`. Bytes are sent in the clear."""
    tcp_streams: int = Field(default=1, ge=1, le=16)
    """Connections of the tcp transport to each peer."""
    tcp_congestion: str | None = None
    """Congestion control of those ("cubic", "bbr", …); None takes cubic on one host, else the system's."""
    staging: StagingConfig = StagingConfig()
    """When short runs are packed."""
    ucx_library: str | None = None
    """Path of libucp.so.0 to load instead of the one found; "off" runs without UCX."""
    verify: Literal["off", "sample", "all"] = "off"
    """Checksums of what decode receives, compared before a request may use it: of every pushed layer, of one in
    eight, or none. A difference fails the transfer. Costs one more read of the bytes on each side."""
    batch_timeout_s: Seconds = 10.0
    """What was handed to the transport and has not landed by then fails the peer. UCX itself never reports a stalled
    one."""
    sharing: SharingConfig = SharingConfig()

    @field_validator("ucx_library", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads off as a boolean


class TimeoutConfig(_Section):
    """One table of deadlines: heartbeat < peer < lease < request < proxy, checked at start."""

    heartbeat_s: Seconds = 0.25
    peer_s: Seconds = 3.0
    """A peer that has not been heard for this long is lost."""
    connect_s: Seconds = 5.0
    """Handshake, from the first message to the data connection."""
    lease_s: Seconds = 10.0
    """How long a promise about memory holds without a sign of life from the other side."""
    offer_s: Seconds = 5.0
    """While requests wait for blocks here, a finished prompt whose receiver offers nothing for this long is given up,
    so that two full workers that hold what the other waits for do not stand still; decode falls back."""
    request_s: Seconds = 600.0
    """One request on one worker."""
    drain_s: Seconds = 10.0
    """How long a worker that was told to stop lets running requests finish."""

    @model_validator(mode="after")
    def _ordered(self) -> TimeoutConfig:
        table = [("heartbeat_s", self.heartbeat_s), ("peer_s", self.peer_s), ("lease_s", self.lease_s)]
        table.append(("request_s", self.request_s))
        for (name, value), (later, limit) in zip(table, table[1:], strict=False):
            if value >= limit:
                raise ValueError(f"timeouts.{name} = {value} s must be below timeouts.{later} = {limit} s")
        return self


class ChaosConfig(_Section):
    """Faults of the control channel, for tests only: what this worker sends is lost, repeated or late."""

    seed: int = 0
    """With the worker's name it decides which frames are hit."""
    drop: float = Field(default=0.0, ge=0, lt=1)
    """Share of control frames that are lost."""
    duplicate: float = Field(default=0.0, ge=0, lt=1)
    """Share of control frames that are sent twice, the second time late."""
    delay_s: float = Field(default=0.0, ge=0)
    """Most seconds a control frame is late; the order of a connection stays."""

    @property
    def enabled(self) -> bool:
        """Whether anything is to happen at all."""
        return bool(self.drop or self.duplicate or self.delay_s)


class SecurityConfig(_Section):
    """Who may talk to a worker; docs/security.md says what that protects and what it cannot.

    A worker that others than this host can reach does not start without keys, unless `insecure` is written out.
    """

    key_file: str | None = None
    """This worker's key pair, made by `pdlink keygen NAME`. With it the control plane is encrypted."""
    allow_file: str | None = None
    """Workers that this one has sessions with: lines `name public_key`. Read again on SIGHUP."""
    http_key_file: str | None = None
    """A secret that callers of this worker's HTTP interface must send in X-Pdlink-Key (GET /health and GET /metrics
    excepted); the proxy's `worker_key_file`. The file's first line that is not empty or a comment."""
    tls_cert: str | None = None
    """PEM file of the certificate chain to serve HTTPS with; needs `tls_key`."""
    tls_key: str | None = None
    insecure: bool = False
    """Written out, it lets a worker without keys listen to more than loopback, and dial any address it is told."""

    @model_validator(mode="after")
    def _complete(self) -> SecurityConfig:
        _in_pairs(self, "security.", ("key_file", "allow_file"), ("tls_cert", "tls_key"))
        if self.insecure and self.key_file is not None:
            raise ValueError("security.insecure: has no effect with security.key_file; leave out one of them")
        return self


def _in_pairs(section: _Section, prefix: str, *pairs: tuple[str, str]) -> None:
    """Each of these settings is there together with its other one, or neither is."""
    for first, second in pairs:
        for there, missing in ((first, second), (second, first)):
            if getattr(section, there) is not None and getattr(section, missing) is None:
                raise ValueError(f"{prefix}{missing}: missing, and {prefix}{there} is of no use without it")


class WorkerConfig(_Section):
    """A prefill, decode or both-role worker."""

    role: Role = "both"
    name: str | None = None
    """Unique in the deployment; None takes role and HTTP port."""
    host: str = "127.0.0.1"
    port: Port = 0
    """HTTP. 0 takes a free one, which is printed and published in /health."""
    control_host: str = "127.0.0.1"
    control_port: Port = 0
    """ZeroMQ."""
    advertise_host: str | None = None
    """Address other hosts reach this worker by; None uses `control_host`."""
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    security: SecurityConfig = SecurityConfig()
    on_transfer_failure: Literal["recompute", "fail"] = "recompute"
    """What decode does when the KV does not arrive: compute the prompt itself, or answer 502."""
    timeline: str | None = None
    """File that a Perfetto trace of every transfer is written to at exit; None writes none."""
    simulate_layer_s: float = Field(default=0.0, ge=0)
    """Extra seconds per layer of every prefill step; makes a small model as slow as a large one in demonstrations."""
    chaos: ChaosConfig = ChaosConfig()
    """For tests only; see `pdlink chaos`."""

    @model_validator(mode="after")
    def _fits_the_device(self) -> WorkerConfig:
        if self.engine.device == "cpu":
            if self.cache.memory_fraction is not None:
                raise ValueError("cache.memory_fraction: is of a GPU's memory; set engine.device or cache.num_blocks")
        elif self.transport.verify != "off":
            raise ValueError(
                f"transport.verify: {self.transport.verify!r} reads host memory; with engine.device "
                f"{self.engine.device!r} it must be off"
            )
        return self

    @model_validator(mode="after")
    def _locked(self) -> WorkerConfig:
        if self.reachable and not self.security.insecure and self.security.key_file is None:
            setting, host = next(iter(self.reachable.items()))
            raise ValueError(
                f"{setting}: other hosts can reach {host}, and this worker has no keys; make them "
                "with `pdlink keygen NAME` and set security.key_file and security.allow_file, or write out "
                "security.insecure: true"
            )
        return self

    @property
    def reachable(self) -> dict[str, str]:
        """Settings that let more than this host reach this worker, and the hosts they name."""
        hosts = {"host": self.host, "control_host": self.control_host, "advertise_host": self.advertise_host}
        hosts["transport.tcp_host"] = self.transport.tcp_host
        return {setting: host for setting, host in hosts.items() if host is not None and not is_loopback(host)}


class ProxyConfig(_Section):
    """The router in front of the two pools."""

    host: str = "127.0.0.1"
    port: Port = 8000
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), repr=False)
    """Clients must send one of these as `Authorization: Bearer KEY`. None here and no `api_key_file` lets all in."""
    api_key_file: str | None = None
    """More of them, one a line."""
    tls_cert: str | None = None
    """PEM file of the certificate chain to serve HTTPS with; needs `tls_key`."""
    tls_key: str | None = None
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
    policy: Literal["round_robin", "least_loaded"] = "least_loaded"
    retries: int = Field(default=1, ge=0)
    """New attempts, each with a new transfer id and other workers where there are some, before the first token."""
    on_no_prefill: Literal["fail", "decode_only"] = "fail"
    """What to do when no prefill worker is healthy: answer 503, or let decode compute the prompt (counted)."""
    health_interval_s: Seconds = 0.5
    connect_timeout_s: Seconds = 2.0
    first_byte_timeout_s: Seconds = 600.0
    """Longest wait for a leg's answer to begin."""
    idle_timeout_s: Seconds = 120.0
    """Longest silence inside a stream."""
    request_timeout_s: Seconds = 1200.0
    max_body_nbytes: int = Field(default=64 * 2**20, ge=1)
    max_connections: int = Field(default=0, ge=0)
    """Open connections to workers; 0 sets no limit."""
    drain_s: Seconds = 10.0

    @field_validator("control", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {url: (found,) if isinstance(found, str) else found for url, found in value.items()}

    @model_validator(mode="after")
    def _complete(self) -> ProxyConfig:
        _in_pairs(self, "", ("tls_cert", "tls_key"))
        if self.dialect == "vllm":
            known = {url.rstrip("/") for url in self.control}
            for url in self.prefill:
                if url.rstrip("/") not in known:
                    raise ValueError(
                        f"control: no address for the prefill worker {url}; it is the control_host and control_port "
                        "of its kv_connector_extra_config, as tcp://HOST:PORT"
                    )
        return self


class VllmConfig(_Section):
    """vLLM servers started by `pdlink up --engine vllm`."""

    executable: str | None = None
    """The `vllm` command. None takes the one beside this Python, the first on PATH, or what `make vllm` installed
    here. Where it is in another environment, pdlink must be installed there too."""
    model: str | None = None
    """Local directory or hub id. None writes a small Llama to disk and serves that."""
    model_name: str = "pdlink-tiny"
    """Name clients use in `model`."""
    connector: Literal["pdlink", "nixl", "nixl-push"] = "pdlink"
    """What moves the KV: PDLinkConnector, or NixlConnector or NixlPushConnector of vLLM, to compare."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, of every server: ["--dtype", "bfloat16", "--block-size", "128"]."""
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    """More environment of every server, VLLM_CPU_KVCACHE_SPACE for example."""
    prefill_devices: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of each prefill server in turn: ["0", "1"], or ["0,1"] for one with two ranks."""
    decode_devices: tuple[str, ...] = ()
    connector_config: dict[str, Any] = {}
    """`kv_connector_extra_config` of every server; its name and control_port are made here."""
    transfer_config: dict[str, Any] = {}
    """More fields of --kv-transfer-config, as `kv_buffer_device: cpu` for NixlConnector on CPUs."""
    on_transfer_failure: Literal["recompute", "fail"] = "recompute"
    """What decode does when the KV does not arrive (`kv_load_failure_policy`)."""
    prefill_ranks: int = Field(default=1, ge=1)
    """--tensor-parallel-size of each prefill server."""
    decode_ranks: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    prefill_port: Port = 8100
    """HTTP port of the first prefill server; the next ones count up. 0 takes free ones."""
    decode_port: Port = 8200
    control_port: Port = 8500
    """First of the ports that prefill servers listen on for decode servers, one for each rank."""
    start_timeout_s: Seconds = 600.0
    """Longest wait for a server; loading a large model and compiling take most of it."""
    log_dir: str | None = None
    """Where each server's output goes, NAME.log. None takes a directory that is removed at the end."""


class UpConfig(_Section):
    """`pdlink up`: a whole deployment on this machine."""

    engine: Literal["builtin", "vllm"] = "builtin"
    """What the workers run. With vllm, `vllm` says how, and `prefill` and `decode` here are not used."""
    vllm: VllmConfig = VllmConfig()
    proxy: ProxyConfig = ProxyConfig()
    prefill: WorkerConfig = WorkerConfig(role="prefill")
    decode: WorkerConfig = WorkerConfig(role="decode")
    num_prefill: int = Field(default=1, ge=1)
    num_decode: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> UpConfig:
        for side, worker in (("prefill", self.prefill), ("decode", self.decode)):
            if worker.timeouts.request_s >= self.proxy.request_timeout_s:
                raise ValueError(
                    f"{side}.timeouts.request_s = {worker.timeouts.request_s} s must be below "
                    f"proxy.request_timeout_s = {self.proxy.request_timeout_s} s"
                )
        return self


_Config = TypeVar("_Config", WorkerConfig, ProxyConfig, UpConfig)


def load(
    kind: type[_Config],
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> _Config:
    """The settings of one role: defaults < file < environment < flags.

    flags: dotted keys ("cache.num_blocks") to values; None values are left out.
    Raises ConfigError that names the key, the value and what would be valid.
    """
    data: dict[str, Any] = {}
    if path is not None:
        data = _read_file(Path(path))
    for key, value in _from_environment(kind, os.environ if environment is None else environment):
        _put(data, key, value)
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(data, dotted.split("."), value)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(kind, item) for item in error.errors())) from None


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and more, for a child that is not ours."""
    return {**os.environ, **more}


def read_secrets(path: str, setting: str) -> tuple[str, ...]:
    """The secrets in a file, one a line; empty lines and those that begin with # are skipped.

    Raises ConfigError, which names the setting and never shows a secret, for a file that holds none.
    """
    try:
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{setting}: cannot read {path}: {reason}") from None
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{setting}: no secret in {path}")
    if not all(secret.isascii() and secret.isprintable() for secret in found):
        raise ConfigError(f"{setting}: {path} holds something that cannot be sent in a header")
    return found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold keys and values, got a {type(data).__name__}")
    return data


def _from_environment(kind: type[BaseModel], environment: Mapping[str, str]) -> list[tuple[list[str], Any]]:
    found = []
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        found.append((key, yaml.safe_load(text) if text else text))
    return found


def _put(data: dict[str, Any], key: list[str], value: Any) -> None:
    for part in key[:-1]:
        below = data.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{'.'.join(key)}: {part} is a single value, not a section")
        data = below
    data[key[-1]] = value


def _explain(kind: type[BaseModel], item: Any) -> str:
    """One line of help for one pydantic error."""
    where = [str(part) for part in item["loc"]]
    name = ".".join(where) or kind.__name__
    if item["type"] == "extra_forbidden":
        section: type[BaseModel] = kind
        for part in where[:-1]:
            section = _section_at(section, part)
        near = difflib.get_close_matches(where[-1], section.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(section.model_fields)}"
        return f"unknown setting {name!r}; {hint}"
    if item["type"] == "value_error":  # one of ours, which names the setting itself
        return str(item["ctx"]["error"])
    return f"{name}: {item['msg']}, got {item.get('input')!r}"


def _section_at(section: type[BaseModel], part: str) -> type[BaseModel]:
    annotation = section.model_fields[part].annotation
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return section
