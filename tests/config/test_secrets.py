"""No error and no line of the log shows a secret: API keys, and passwords and tokens in URLs."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pdlink import logs
from pdlink.config import (
    ProxyConfig,
    SglangConfig,
    StoreConfig,
    UpConfig,
    WorkerConfig,
    load,
    settings_of,
)
from pdlink.errors import ConfigError, PdlinkError, PeerLost
from pdlink.protocol.auth import ControlAddress
from pdlink.store.tiers.opening import open_tier
from pdlink_proxy.app import build_app
from pdlink_proxy.discovery.joined import Discovery

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "sk-planted-0123456789"
SETTINGS: list[dict[str, Any]] = [
    {"rate_limits": {SECRET: 5}},
    {"rate_limits": {SECRET: {"requests": "many"}}},
    {"rate_limits": {SECRET: {"requests": -1}}},
    {"rate_limits": {SECRET: {"odd": 1}}},
    {"rate_limits": {SECRET: {"requests": {SECRET: 1}}}},
    {"rate_limits": SECRET},
    {"rate_limits": [SECRET]},
    {"shares": {SECRET: 0}},
    {"shares": {SECRET: {SECRET: 1}}},
    {"shares": {SECRET: SECRET}},
    {"api_keys": SECRET},
    {"api_keys": {SECRET: 1}},
    {"api_keys": [{SECRET: 1}]},
    {"api_keys": [[SECRET]]},
]


@pytest.mark.parametrize("kind", [ProxyConfig, UpConfig])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_error_shows_a_planted_secret(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings if kind is ProxyConfig else {"proxy": settings}))
    with pytest.raises(ConfigError) as told:
        load(kind, path, environment={})
    assert SECRET not in str(told.value)
    assert next(iter(settings)) in str(told.value), "the setting is named"


@pytest.mark.parametrize(
    "text",
    [
        f"rate_limits:\n  {SECRET}: {{}}\n  {SECRET}: {{}}\n",
        f"api_keys: [{SECRET}\nretries: 1\n",
        f"api_keys: '{SECRET}\n",
        f"shares: {{{SECRET}: 1: 2}}\n",
        f"api_keys: @{SECRET}\n",
    ],
)
def test_a_file_that_is_no_yaml_is_told_by_line_and_column(text: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line") as told:
        load(ProxyConfig, path, environment={})
    assert SECRET not in str(told.value)


def test_a_key_that_is_given_twice_is_named_if_it_is_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("retries: 1\nretries: 2\n")
    with pytest.raises(ConfigError, match="'retries' is there twice, line 2"):
        load(ProxyConfig, path, environment={})


KINDS = (WorkerConfig, ProxyConfig, StoreConfig, UpConfig, SglangConfig)
PASSWORDS = [
    f"{scheme}://user:{SECRET}@host{rest}" for scheme, rest in (("http", ":99999"), ("redis", "/x"), ("", ""))
]
TOKENS = [f"s3://bucket?secret_access_key={SECRET}", f"user:{SECRET}@host:4318", f"http://[{SECRET}"]
HIDDEN = {"remote_url", "endpoint"}
"""Settings that may hold a secret anywhere."""


def shapes(text: str) -> Iterator[Any]:
    """What people write where one value, a list or keys are expected."""
    yield from (text, [text], {text: "x"}, {"x": text}, {text: [1]}, [[text]], {"x": {text: text}})


def told(kind: Any, name: str, value: Any) -> str:
    try:
        load(kind, environment={}, flags={name: value})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_of_any_setting_shows_the_password_of_a_url(kind: Any) -> None:
    refused = 0
    for name in settings_of(kind):
        for text in PASSWORDS:
            for value in shapes(text):
                said = told(kind, name, value)
                refused += bool(said)
                assert SECRET not in said, (name, value)
    assert refused > 100


@pytest.mark.parametrize("kind", KINDS)
def test_no_error_shows_a_secret_in_the_url_of_a_tier_or_a_collector(kind: Any) -> None:
    names = [name for name in settings_of(kind) if name.rpartition(".")[2] in HIDDEN and "kv_events" not in name]
    assert names or kind is SglangConfig
    for name in names:
        for text in TOKENS:
            for value in shapes(text):
                assert SECRET not in told(kind, name, value), (name, value)


@pytest.mark.parametrize("text", [*PASSWORDS, *TOKENS, f"file://user:{SECRET}@host/x", f"redis://:{SECRET}@host:bad"])
def test_nothing_that_opens_a_url_repeats_its_secret(text: str) -> None:
    def proxied(**settings: Any) -> None:
        build_app(load(ProxyConfig, environment={}, flags={"dialect": "vllm", **settings}))

    failures = []
    for use in (
        lambda: open_tier(text),
        lambda: proxied(decode=[text]),
        lambda: proxied(prefill=[text], control={text: ["tcp://h:1"]}),
        lambda: proxied(control={text: ["tcp://h:1"]}),
        lambda: proxied(data_parallel={text: 2}),
        lambda: ControlAddress.parse(text),
        lambda: Discovery.of((text,), None, lambda _: None, None),  # type: ignore[arg-type]
    ):
        try:
            use()
        except PdlinkError as error:
            failures.append(str(error))
    assert failures
    if text in PASSWORDS or text.startswith(("file:", "redis:")):
        assert SECRET not in " ".join(failures)
    else:
        assert SECRET not in failures[0], "the tier's"


@pytest.mark.parametrize("text", ["http://[x", "redis://[x", "s3://[x", "file://[x"])
def test_what_is_no_url_is_told_by_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^tiers\.remote_url: "):
        open_tier(text)
    assert told(ProxyConfig, "tracing.endpoint", text).startswith("tracing.endpoint: ")


def test_a_workers_url_with_a_password_is_refused_because_nobody_would_send_it() -> None:
    with pytest.raises(ConfigError, match=r"prefill: got 'http://\*\*\*@host:8100'; expected .*, without a user"):
        build_app(ProxyConfig(prefill=(f"http://user:{SECRET}@host:8100",)))


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_line_of_the_log_shows_the_password_of_a_url(form: str) -> None:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logs._Json("w") if form == "json" else logs._Text("w"))
    log = logging.Logger("other")
    log.addHandler(handler)
    log.warning("spans to %s are lost: %s", f"https://user:{SECRET}@host/v1", OSError(f"redis://:{SECRET}@h went"))
    log.warning("a password with @ in it: %s", f"redis://:p@{SECRET}@h")
    with contextlib.suppress(PeerLost):
        try:
            raise ValueError(f"amqp://{SECRET}@h")
        except ValueError as error:
            log.exception("no", exc_info=error)
            raise PeerLost(str(error)) from error
    written = handler.stream.getvalue()
    assert SECRET not in written
    assert written.count("://***@h") >= 4
