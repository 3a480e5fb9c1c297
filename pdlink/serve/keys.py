"""Keys on disk: made by `pdlink keygen`, read when a process starts. What they mean is `pdlink/protocol/auth.py`."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from pdlink.config import read_secrets
from pdlink.errors import ConfigError, LocalError
from pdlink.protocol import auth

if TYPE_CHECKING:
    from pdlink.config import SecurityConfig, WorkerConfig


class KeyFileExists(LocalError):
    """`pdlink keygen` never overwrites a key: whoever trusts the old one would lose its peer."""

    code = "key_file_exists"


def keygen(name: str, directory: str) -> tuple[Path, str]:
    """Make a key pair in DIRECTORY/NAME.key, readable by this user only; returns the path and the line for
    allow-lists. Raises ConfigError for a name that cannot be one, KeyFileExists instead of overwriting."""
    if not auth.is_name(name):
        raise ConfigError(
            f"NAME: up to 64 letters, digits, '.', '_' and '-', the first a letter or digit, got {name!r}"
        )
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = auth.KeyPair(name, public, secret)
    path = Path(directory) / f"{name}.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL follows no link and takes no file that is there; the mode holds from the first byte on.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileExists(f"{path} is there already; a new key needs another name or directory") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(fd, "w") as file:
        file.write(auth.write_key_file(keys))
    return path, auth.allow_line(keys)


def load_credentials(security: SecurityConfig) -> auth.Credentials | None:
    """Who this worker is and whom it knows; None without keys. Raises ConfigError naming the setting and the file."""
    if security.key_file is None or security.allow_file is None:
        return None
    setting = "security.key_file"
    path = Path(security.key_file)
    keys = auth.parse_key_file(_read(path, setting), f"{setting}: {path}")
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"{setting}: every user of this host can read or change {path}; chmod 600 it")
    if zmq.curve_public(keys.secret.encode()).decode() != keys.public:
        raise ConfigError(f"{setting}: the two keys in {path} do not belong together")
    return auth.Credentials(keys, load_allow_list(security.allow_file))


def load_allow_list(path: str) -> auth.AllowList:
    """Raises ConfigError for a file that is none, or allows nobody."""
    setting = "security.allow_file"
    allowed = auth.parse_allow_list(_read(Path(path), setting), f"{setting}: {path}")
    if not len(allowed):
        raise ConfigError(f"{setting}: {path} allows nobody; add the lines that `pdlink keygen` printed")
    return allowed


def worker_name(config: WorkerConfig, credentials: auth.Credentials | None, port: int) -> str:
    """What this worker is called: as its key says, as configured, or after role and port.

    Raises ConfigError if key and configuration disagree: everybody who knows the key would refuse the name.
    """
    if credentials is None:
        return config.name or f"{config.role}-{port}"
    if config.name not in (None, credentials.keys.name):
        raise ConfigError(
            f"name: {config.name!r}, but security.key_file is the key of {credentials.keys.name!r}; "
            "leave out `name`, or make a key for it"
        )
    return credentials.keys.name


def http_key(security: SecurityConfig) -> str | None:
    """The secret that callers of a worker's HTTP interface must know; None lets everybody call."""
    if security.http_key_file is None:
        return None
    return read_secrets(security.http_key_file, "security.http_key_file")[0]


def server_tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """What HTTPS is served with; None for plain HTTP. Raises ConfigError if the two files cannot be used."""
    if cert is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password="")  # a key with a password is an error, not a question
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert, tls_key: cannot use {cert} with {key}: {error}") from None
    return context


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is not text") from None
