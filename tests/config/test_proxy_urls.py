"""Base URLs of workers as people type them."""

from __future__ import annotations

from pdlink.config import ProxyConfig, load


def test_http_may_be_left_out_of_a_workers_url_everywhere() -> None:
    flags = {
        "dialect": "vllm",
        "prefill": ["10.0.0.1:8100", "https://10.0.0.3:8100"],
        "decode": ["10.0.0.2:8200"],
        "control": {"10.0.0.1:8100": "tcp://10.0.0.1:8500", "https://10.0.0.3:8100": "tcp://10.0.0.3:8500"},
        "cells": {"10.0.0.2:8200": "rack-1"},
    }
    config = load(ProxyConfig, environment={}, flags=flags)
    assert config.prefill == ("http://10.0.0.1:8100", "https://10.0.0.3:8100")
    assert config.decode == ("http://10.0.0.2:8200",)
    assert config.control == {
        "http://10.0.0.1:8100": ("tcp://10.0.0.1:8500",),
        "https://10.0.0.3:8100": ("tcp://10.0.0.3:8500",),
    }
    assert config.cells == {"http://10.0.0.2:8200": "rack-1"}
