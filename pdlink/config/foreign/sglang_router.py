"""Flags of sglang-router (0.3): settings of `pdlink proxy` in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdlink.config.listen import HostPort

from .applying import Vocabulary
from .flags import taken_apart, value_of
from .verdicts import NoCounterpart, NotNeeded, OurSettings, lacking, same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .verdicts import Rule, Verdict

_POLICIES = {
    "cache_aware": "cost",
    "cache_aware_zmq": "cost",
    "bucket": "cost",
    "round_robin": "round_robin",
    "random": "round_robin",
    "power_of_two": "least_loaded",
    "prefix_hash": "prefix",
    "consistent_hashing": "consistent_hash",
    "manual": "session",
}
"""The policy of ours that is nearest."""
_DISCOVERY = NoCounterpart("it goes by Services: discover: [kubernetes:prefill=SERVICE,decode=SERVICE]")
_SECRET = "secrets stand in files: "


def _policy(*legs: str) -> Callable[[Any], Verdict]:
    def rule(value: Any) -> Verdict:
        ours = _POLICIES.get(str(value))
        if ours is None:
            return NoCounterpart(f"policies that are known here: {', '.join(_POLICIES)}")
        why = "" if ours == value else "the nearest; docs/router.md"
        return OurSettings({f"policy.{leg}": ours for leg in legs}, why)

    return rule


def _log_level(value: Any) -> Verdict:
    return OurSettings({"log.level": "warning" if value == "warn" else value})


def _prefill(value: Any) -> Verdict:
    return OurSettings({"prefill": value}, "each says its bootstrap port itself")


def _retries(value: Any) -> Verdict:
    return OurSettings({"retries": 0}) if value is True else NoCounterpart("a flag without a value")


def _no_breaker(value: Any) -> Verdict:
    return (
        OurSettings({"eject_share": 0}, "no worker is left out") if value is True else NoCounterpart("takes no value")
    )


def _one_file(value: Any) -> Verdict:
    return OurSettings({"worker_ca": value[0] if isinstance(value, list) and len(value) == 1 else value})


RULES: dict[str, Rule] = {
    "--host": "listen",
    "--port": "listen",
    "--prefill": _prefill,
    "--decode": "decode",
    "--worker-urls": "both",
    "--policy": _policy("prefill", "decode"),
    "--prefill-policy": _policy("prefill"),
    "--decode-policy": _policy("decode"),
    "--max-payload-size": "max_body_nbytes",
    "--request-timeout-secs": "request_timeout_s",
    "--shutdown-grace-period-secs": "drain_s",
    "--queue-size": "queue_size",
    "--queue-timeout-secs": "queue_timeout_s",
    "--retry-max-retries": "retries",
    "--disable-retries": _retries,
    "--disable-circuit-breaker": _no_breaker,
    "--health-check-interval-secs": "health_interval_s",
    "--tls-cert-path": "tls_cert",
    "--tls-key-path": "tls_key",
    "--ca-cert-paths": _one_file,
    "--log-level": _log_level,
    "--log-dir": NoCounterpart("lines go to standard error; your service manager keeps them"),
    "--api-key": NoCounterpart(_SECRET + "worker_key_file for the workers, api_key_file for clients"),
    "--otlp-traces-endpoint": NoCounterpart("spans go over HTTP: tracing.endpoint: http://HOST:4318"),
    "--enable-trace": NotNeeded("tracing.endpoint turns it on"),
    "--dp-aware": lacking("ranks of one server are not told apart here"),
    "--service-discovery-namespace": _DISCOVERY,
    "--max-concurrent-requests": lacking("decode's free blocks, prefill_queue_tokens and queue_size limit it"),
    "--rate-limit-tokens-per-second": lacking("rate_limit counts requests and tokens of an API key in a minute"),
    "--request-id-headers": NoCounterpart("X-Request-Id is what is read"),
    "--cors-allowed-origins": lacking("let the web server in front of it answer for CORS"),
    "--disable-health-check": lacking("workers are always looked after"),
    **same(
        _DISCOVERY, "--service-discovery --selector --service-discovery-port --prefill-selector --decode-selector"
    ),
    **same(NotNeeded("the server says its bootstrap port itself"), "--bootstrap-port-annotation"),
    **same(
        NotNeeded("the proxy always serves two pools, of several models"),
        "--pd-disaggregation --mini-lb --enable-igw",
    ),
    **same(
        NotNeeded("the proxy starts without workers, and follows them"),
        "--worker-startup-timeout-secs --worker-startup-check-interval",
    ),
    **same(
        NotNeeded("`cost` weighs cached tokens against load, without thresholds"),
        "--cache-threshold --balance-abs-threshold --balance-rel-threshold --bucket-adjust-interval-secs"
        " --eviction-interval --eviction-interval-secs --max-tree-size --max-idle-secs --assignment-mode",
    ),
    **same(
        NotNeeded("GET /metrics on the port of `listen`"),
        "--prometheus-port --prometheus-host --prometheus-duration-buckets",
    ),
    **same(
        NotNeeded("another worker is tried at once"),
        "--retry-initial-backoff-ms --retry-max-backoff-ms --retry-backoff-multiplier --retry-jitter-factor",
    ),
    **same(
        NotNeeded("workers far worse than their peers are left out for a while, up to eject_share of them"),
        "--cb-failure-threshold --cb-success-threshold --cb-timeout-duration-secs --cb-window-duration-secs"
        " --health-failure-threshold --health-success-threshold --health-check-timeout-secs --health-check-endpoint",
    ),
    **same(
        NotNeeded("the servers tokenise and parse; tokenizers has files for texts"),
        "--model-path --tokenizer-path --chat-template --tokenizer-cache-enable-l0"
        " --tokenizer-cache-l0-max-entries --tokenizer-cache-enable-l1 --tokenizer-cache-l1-max-memory"
        " --reasoning-parser --tool-call-parser --backend",
    ),
    **same(NoCounterpart("a proxy shows no certificate to workers"), "--client-cert-path --client-key-path"),
    **same(
        lacking("operators have admin_key_file"),
        "--control-plane-api-keys --control-plane-audit-enabled --jwt-issuer --jwt-audience --jwt-jwks-uri"
        " --jwt-role-mapping",
    ),
    **same(
        lacking("the proxy keeps no conversations, and calls no tools"),
        "--mcp-config-path --history-backend --oracle-wallet-path --oracle-tns-alias --oracle-connect-descriptor"
        " --oracle-username --oracle-password --oracle-pool-min --oracle-pool-max --oracle-pool-timeout-secs"
        " --postgres-db-url --postgres-pool-max --redis-url --redis-pool-max --redis-retention-days",
    ),
}


def _plain(key: str) -> str:
    return key.replace("_", "-").replace("--router-", "--")


ROUTER = Vocabulary("sglang-router", RULES, _plain, pairs=(("tls_cert", "tls_key"),))


def flat(words: Sequence[str]) -> dict[str, Any]:
    """Every flag. Those of the address have all of it, those of workers the URLs of all times."""
    flags = taken_apart(words).flags
    found = {name: value_of(times) for name, times in flags.items()}
    host, port = (
        next((value for name, value in found.items() if _plain(name) == flag), default)
        for flag, default in (("--host", "0.0.0.0"), ("--port", "30000"))
    )
    for name, times in flags.items():
        if _plain(name) in ("--host", "--port"):
            found[name] = str(HostPort(str(host), int(port))) if str(port).isdecimal() else f"{host}:{port}"
        elif _plain(name) in ("--prefill", "--decode"):
            found[name] = [each[0] for each in times if each]
        elif _plain(name) == "--worker-urls":
            found[name] = [url for each in times for url in each]
    return dict(sorted(found.items(), key=lambda each: _plain(each[0]) == "--policy"))  # behind those of one leg
