"""Who may talk to whom, and how secrets are read."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from pdlink.config.section import Section, in_pairs
from pdlink.errors import ConfigError


class SecurityConfig(Section):
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
        in_pairs(self, "security.", ("key_file", "allow_file"), ("tls_cert", "tls_key"))
        if self.insecure and self.key_file is not None:
            raise ValueError("security.insecure: has no effect with security.key_file; leave out one of them")
        return self


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
