"""No error of the settings shows a secret: API keys stand as values and as keys of settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pdlink.config import ProxyConfig, UpConfig, load
from pdlink.errors import ConfigError

if TYPE_CHECKING:
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
