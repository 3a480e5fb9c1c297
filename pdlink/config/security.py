"""Who may talk to whom, and how secrets are read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import model_validator

from pdlink.config.section import Section, in_pairs, no_use
from pdlink.errors import ConfigError

_MIN_TOKEN_CHARS = 20
MADE_OF_A_TOKEN = ("key_file", "allow_file", "http_key_file")


class SecurityConfig(Section):
    """Who may talk to a worker; docs/security.md says what that protects and what it cannot.

    A worker that others than this host can reach does not start without keys, unless `insecure` is written out.
    """

    key_file: str | None = None
    """This worker's key pair, made by `pdlink keygen NAME`. With it the control plane is encrypted."""
    allow_file: str | None = None
    """Workers that this one has sessions with: lines `name public_key`. Read again on SIGHUP."""
    token_file: str | None = None
    """A secret of 20 characters or more that all processes of a deployment share, in place of key_file, allow_file
    and http_key_file: their keys are made of it. `openssl rand -hex 32` makes one."""
    http_key_file: str | None = None
    """A secret that callers of this worker's HTTP interface must send in X-Pdlink-Key (all but GET /health, /livez,
    /readyz and /metrics); the proxy's `worker_key_file`. The file's first line that is not empty or a comment."""
    tls_cert: str | None = None
    """PEM file of the certificate chain to serve HTTPS with; needs `tls_key`."""
    tls_key: str | None = None
    """PEM file of its private key, which only this user can read."""
    insecure: bool = False
    """Written out, it lets a worker without keys listen to more than loopback, and dial any address it is told."""

    @model_validator(mode="after")
    def _complete(self) -> SecurityConfig:
        in_pairs(self, "security.", ("key_file", "allow_file"), ("tls_cert", "tls_key"))
        if self.token_file is not None:
            no_use(self, "security.", MADE_OF_A_TOKEN, "is made of security.token_file")
        if self.insecure and self.has_keys:
            raise ValueError("security.insecure: has no effect with keys; leave out one of them")
        return self

    @property
    def has_keys(self) -> bool:
        return self.key_file is not None or self.token_file is not None


def check_private(path: str | int, setting: str, *, secret: bool = True, name: str = "") -> None:
    """Raises ConfigError if every user of this host can change a file or, where it is `secret`, read it.

    path: or an open descriptor, with the file's `name`. Raises OSError if there is no such file.
    """
    mode = os.stat(path).st_mode
    if mode & (stat.S_IWOTH | (stat.S_IROTH if secret else 0)):
        can, remedy = ("read or change", "chmod 600") if secret else ("change", "chmod o-w")
        raise ConfigError(f"{setting}: every user of this host can {can} {name or path}; {remedy} it")


def read_private(path: str, setting: str, *, secret: bool = True) -> str:
    """The text of a file that keys are taken from. Raises ConfigError as `check_private`, or if it cannot be read."""
    try:
        with Path(path).open() as file:
            check_private(file.fileno(), setting, secret=secret, name=path)
            return file.read()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {path} is not text") from None


def read_secrets(path: str, setting: str) -> tuple[str, ...]:
    """The secrets in a file, one a line; skips empty lines and lines that begin with #.

    Raises ConfigError, which names the setting and never shows a secret, for a file that holds none, or that every
    user of this host can read or change.
    """
    lines = [line.strip() for line in read_private(path, setting).splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ConfigError(f"{setting}: no secret in {path}")
    if not all(secret.isascii() and secret.isprintable() for secret in found):
        raise ConfigError(f"{setting}: {path} holds something that cannot be sent in a header")
    return found


def read_key(path: str | None) -> str | None:
    """The first secret in the file that a command's --key-file names; None without the flag. Raises ConfigError."""
    return read_secrets(path, "--key-file")[0] if path else None


def read_token(path: str, setting: str) -> str:
    """The secret that a deployment shares. Raises ConfigError as `read_secrets`, and for one that can be guessed."""
    token = read_secrets(path, setting)[0]
    if len(token) < _MIN_TOKEN_CHARS:
        raise ConfigError(
            f"{setting}: {path} has a secret of {len(token)} characters; expected {_MIN_TOKEN_CHARS} or more; "
            "`openssl rand -hex 32` makes one"
        )
    return token
