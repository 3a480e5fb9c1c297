"""Key files: made by `pdlink keygen`, read when a process starts. `pdlink/protocol/auth.py` gives their meaning."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from pdlink.config import check_private, read_private, read_secrets, read_token
from pdlink.endpoint.token import credentials_of, http_key_of
from pdlink.errors import ConfigError, LocalError
from pdlink.protocol import auth

if TYPE_CHECKING:
    from pdlink.config import SecurityConfig, WorkerConfig


class KeyFileExists(LocalError):
    """`pdlink keygen` never overwrites a key: peers that trust the old one would lose this worker."""

    code = "key_file_exists"


def keygen(name: str, directory: str) -> tuple[Path, str]:
    """Make a key pair in DIRECTORY/NAME.key, readable by this user only; returns the path and the line for
    allow-lists. Raises ConfigError for an invalid name, KeyFileExists instead of overwriting."""
    if not auth.is_name(name):
        raise ConfigError(
            f"NAME: up to 64 letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = auth.KeyPair(name, public, secret)
    path = Path(directory) / f"{name}.key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_EXCL follows no link and opens no existing file; the mode holds from the first byte on.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileExists(f"{path} is there already; a new key needs another name or directory") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(fd, "w") as file:
        file.write(auth.write_key_file(keys))
    return path, auth.allow_line(keys)


def load_credentials(security: SecurityConfig) -> auth.Credentials | None:
    """This worker's keys and allow-list; None without keys. Raises ConfigError with the setting and the file."""
    if security.token_file is not None:
        return credentials_of(read_token(security.token_file, "security.token_file"))
    if security.key_file is None or security.allow_file is None:
        return None
    setting = "security.key_file"
    path = security.key_file
    keys = auth.parse_key_file(read_private(path, setting), f"{setting}: {path}")
    if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
        raise ConfigError(f"{setting}: the two keys in {path} do not belong together")
    return auth.Credentials(keys, load_allow_list(security.allow_file))


def load_allow_list(path: str) -> auth.AllowList:
    """Raises ConfigError if the file is not an allow-list, is writable by other users, or is empty."""
    setting = "security.allow_file"
    allowed = auth.parse_allow_list(read_private(path, setting, secret=False), f"{setting}: {path}")
    if not len(allowed):
        raise ConfigError(f"{setting}: {path} allows nobody; add the lines that `pdlink keygen` printed")
    return allowed


def worker_name(config: WorkerConfig, credentials: auth.Credentials | None, port: int) -> str:
    """The name of this worker: configured, or of its key, or made of role, host and port.

    Host and port make it unique: of two workers of one name only the first gets sessions. Raises ConfigError for a
    name that every peer would refuse: invalid characters, or not the key's name.
    """
    name = config.name
    if name is not None and not auth.is_worker_name(name):
        raise ConfigError(f"name: got {name!r}; a name is {auth.NAME_RULE}")
    owner = None if credentials is None else credentials.owner
    if owner is None:
        return name or f"{config.role}-{as_name(socket.gethostname().partition('.')[0], 32)}-{port}"
    if name is not None and name != owner and not name.startswith(f"{owner}/"):
        raise ConfigError(
            f"name: {name!r}, but security.key_file is the key of {owner!r}; leave out `name`, or make a key for it"
        )
    return name or owner


def as_name(text: str, max_chars: int = 64) -> str:
    """`text` as a valid part of a worker's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:max_chars].lstrip("._-") or "x"


def http_key(security: SecurityConfig) -> str | None:
    """The secret for callers of a worker's HTTP interface; None lets everybody call."""
    if security.token_file is not None:
        return http_key_of(read_token(security.token_file, "security.token_file"))
    if security.http_key_file is None:
        return None
    return read_secrets(security.http_key_file, "security.http_key_file")[0]


def server_tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The TLS context of the server; None for plain HTTP. Raises ConfigError if the files cannot be used."""
    if cert is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        check_private(key, "tls_key")
        context.load_cert_chain(cert, key, password="")  # a key with a password raises, instead of prompting
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert, tls_key: cannot use {cert} with {key}: {error}") from None
    return context
