"""What is wrong with this machine, and with settings as this machine sees them."""

from __future__ import annotations

import difflib
import os
import resource
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import yaml

from pdlink.config import ProxyConfig, StoreConfig, UpConfig, WorkerConfig, is_loopback, load, read_secrets
from pdlink.config.listen import HostPort
from pdlink.errors import ConfigError
from pdlink.extras import installing
from pdlink.memory.available import available_nbytes
from pdlink.observe.findings import Finding
from pdlink.serve.keys import load_credentials
from pdlink.store.line import Line
from pdlink.store.tiers.opening import open_tier

if TYPE_CHECKING:
    from pdlink.config import TiersConfig
    from pdlink.serve.check import Transports

Settings = WorkerConfig | ProxyConfig | StoreConfig | UpConfig

_FEW_DESCRIPTORS = 4096
_ANSWER_S = 5.0
"""For a directory, which may be on a frozen file system."""
_GIB = 2**30
_KINDS: tuple[type[WorkerConfig] | type[ProxyConfig] | type[StoreConfig] | type[UpConfig], ...] = (
    WorkerConfig,
    ProxyConfig,
    UpConfig,
    StoreConfig,
)


def read_settings(path: str) -> Settings:
    """A settings file of any role: of the role whose keys it uses most, or nearly. Raises ConfigError as that role's
    command."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        document = None  # `load` says why
    keys = set(document) if isinstance(document, dict) else set()
    # The proxy and `up` both have `prefill`: a list of URLs, or the settings of workers.
    lists = isinstance(document, dict) and any(isinstance(document.get(key), list) for key in ("prefill", "decode"))

    def fits(kind: type[WorkerConfig] | type[ProxyConfig] | type[StoreConfig] | type[UpConfig]) -> tuple[float, bool]:
        known = kind.model_fields
        misspelt = sum(bool(difflib.get_close_matches(str(key), known, n=1)) for key in keys - set(known))
        return len(keys & set(known)) + misspelt / 2, (kind is ProxyConfig) == lists

    return load(max(_KINDS, key=fits), path)  # type: ignore[type-var]


def of_transports(transports: Transports, kind: str) -> list[Finding]:
    """kind: `transport.kind` of the settings."""
    if transports.first is not None:
        return []
    reasons = "; ".join(f"{one.name}: {transports.probes[one].reason}" for one in transports.wanted)
    remedy = "set transport.kind to auto, or do what the reason says"
    text = f"transport.kind = {kind} cannot work here: {reasons}"
    return [Finding("bad", "transport", text, remedy, command="pdlink check")]


def of_machine(transports: Transports) -> list[Finding]:
    """Limits of this machine that pdlink meets."""
    found = []
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _FEW_DESCRIPTORS:
        text = f"a process may have {most} open files; each client and each peer takes some"
        found.append(
            Finding("warn", "open files", text, f"`ulimit -Hn {_FEW_DESCRIPTORS}` or more (systemd: LimitNOFILE)")
        )
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if locked != resource.RLIM_INFINITY:
            text = f"this machine has RDMA, and a process may lock only {locked // 1024} KiB"
            found.append(Finding("bad", "lockable memory", text, "`ulimit -l unlimited` (systemd: LimitMEMLOCK)"))
        if not any(one.kind == "ucx" and probe.ok for one, probe in transports.probes.items()):
            reason = next((probe.reason for one, probe in transports.probes.items() if one.kind == "ucx"), "")
            text = f"this machine has RDMA, and ucx, which would use it, does not work: {reason}"
            found.append(Finding("warn", "RDMA", text, installing("ucx")))
    return found


def of_settings(settings: Settings, *, running: bool) -> list[Finding]:
    """What looks wrong in valid settings. running: their processes may hold their ports already."""
    if isinstance(settings, UpConfig):
        parts: tuple[WorkerConfig | ProxyConfig | StoreConfig, ...] = (
            settings.prefill,
            settings.decode,
            settings.proxy,
        )
        return [finding for part in parts for finding in of_settings(part, running=running)]
    found = [] if running else _ports(settings)
    if isinstance(settings, ProxyConfig):
        files = {"api_key_file": settings.api_key_file, "worker_key_file": settings.worker_key_file}
        found += _secrets({**files, "admin_key_file": settings.admin_key_file})
        return found
    found += _tiers(settings.tiers, settings.name or "worker")
    if isinstance(settings, WorkerConfig):
        security = settings.security
        found += _secrets({"security.http_key_file": security.http_key_file})
        try:
            load_credentials(security)
        except ConfigError as error:
            found.append(_of_error(error))
        reachable = settings.listen.reachable
        if security.insecure and reachable:
            setting, host = next(iter(reachable.items()))
            text = f"{setting} = {host} lets other hosts in, without keys (security.insecure)"
            remedy = "right on a private network only; else `pdlink keygen`, docs/security.md"
            found.append(Finding("warn", "security", text, remedy))
        if not is_loopback(settings.listen.host) and security.http_key_file is None and security.token_file is None:
            text = "everybody who reaches its HTTP port may use it, past the proxy"
            remedy = "set security.http_key_file, and the proxy's worker_key_file to the same"
            found.append(Finding("warn", "security", text, remedy))
        if settings.on_transfer_failure == "fail" and settings.role != "prefill":
            text = "on_transfer_failure = fail: each lost transfer is an error for a client"
            found.append(Finding("warn", "on_transfer_failure", text, "recompute answers instead, later"))
    return found


def of_file(path: str, *, running: bool) -> list[Finding]:
    """Of a settings file."""
    try:
        return of_settings(read_settings(path), running=running)
    except ConfigError as error:
        return [_of_error(error)]


def _of_error(error: ConfigError) -> Finding:
    text, _, remedy = str(error).partition("; ")
    return Finding("bad", "settings", text, remedy or "correct it")


def _secrets(files: dict[str, str | None]) -> list[Finding]:
    found = []
    for setting, path in files.items():
        try:
            if path is not None:
                read_secrets(path, setting)
        except ConfigError as error:
            found.append(_of_error(error))
    return found


def _ports(settings: WorkerConfig | ProxyConfig | StoreConfig) -> list[Finding]:
    http = settings.at if isinstance(settings, ProxyConfig) else (settings.listen.host, settings.listen.port)
    wanted: dict[str, tuple[str, int]] = {"listen": http}
    if isinstance(settings, WorkerConfig):
        wanted["listen.control"] = settings.listen.control_host, settings.listen.control_port
    found = []
    for setting, (host, port) in wanted.items():
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            text = f"{setting}: {HostPort(host, port)} cannot be had: {error.strerror or error}"
            found.append(
                Finding("bad", "settings", text, "end the program that has it, or take another; 0 takes a free one")
            )
    return found


def _tiers(tiers: TiersConfig, name: str) -> list[Finding]:
    found = []
    if tiers.max_local_cpu_size * _GIB > (room := available_nbytes()):
        text = f"tiers.max_local_cpu_size = {tiers.max_local_cpu_size:g} GiB, and {room / _GIB:.1f} GiB are free"
        found.append(Finding("warn", "memory", text, "take less, or leave it as it is if others end first"))
    size = (tiers.max_local_disk_size or 0.0) / max(1, len(tiers.disks))
    for directory in tiers.disks:
        found += _disk("tiers.local_disk", Path(directory.replace("{name}", name)), size)
    urls = tiers.remote_url or ()
    for url in (urls,) if isinstance(urls, str) else urls:
        found += _remote(url)
    return found


def _remote(url: str) -> list[Finding]:
    """Asks a tier that others may share for a record that nobody has."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # not repeated: it may hold a password
        return [Finding("bad", "settings", "tiers.remote_url: got no URL", "correct it")]
    if parts.scheme == "file":
        return _disk("tiers.remote_url", Path(unquote(parts.path)))
    place = f"{parts.scheme}://{HostPort(host, port) if port else host}" if host else parts.scheme or url
    try:
        tier = open_tier(url)
        try:
            tier.contains([bytes(16)])
        finally:
            tier.close()
    except ConfigError as error:
        return [_of_error(error)]
    except Exception as error:  # noqa: BLE001  of a client of a store, or of code that the settings name
        text = f"tiers.remote_url: {place} does not answer: {str(error) or type(error).__name__}"
        return [Finding("warn", "remote tier", text, "start it, or correct the URL; until then it is a miss")]
    return []


def _disk(setting: str, path: Path, size: float | None = None) -> list[Finding]:
    """size: that is wanted, in GiB. Waits for the file system for some seconds."""
    looking = Line("pdlink-doctor-disk")
    looked = looking.submit(partial(_look_at_disk, setting, path, size))
    looking.end()
    try:
        return looked.result(_ANSWER_S)
    except TimeoutError:
        text = f"{path} has not answered for {_ANSWER_S:g} s; workers use it as soon as it does"
        return [Finding("warn", "disk", text, "look at its mount, or name another directory")]


def _look_at_disk(setting: str, path: Path, size: float | None) -> list[Finding]:
    there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        text = f"{setting}: {there} is no directory that can be written"
        return [Finding("bad", "disk", text, "name another directory")]
    if size is None:
        return []
    free = shutil.disk_usage(there).free + _used_nbytes(path)
    if size * _GIB > free:
        text = f"tiers.max_local_disk_size = {size:g} GiB in {path}, and {free / _GIB:.1f} GiB are free"
        return [Finding("warn", "disk", text, "take less: a full disk makes each write a miss")]
    return []


def _used_nbytes(path: Path) -> int:
    """What the tier has already, which counts as free."""
    try:
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    except OSError:
        return 0
