"""Every setting of every role, with its unit and default: a file for each section.

A value comes from the default, a YAML file, the environment (`PDLINK_` + the path of the key, `__` between levels:
`PDLINK_TRANSPORT__KIND=mapped`) and the command line, the later winning; `loading` does that, and nothing else reads
the environment. Unknown keys are refused with the nearest valid name, because a mistyped setting that is silently
ignored is a setting that lies.
"""

from __future__ import annotations

from pdlink.config.cache import CacheConfig
from pdlink.config.engine import EngineConfig
from pdlink.config.kv_events import KVEventsConfig
from pdlink.config.loading import (
    ENVIRONMENT_PREFIX,
    environment_with,
    load,
    parse_assignments,
    parse_value,
    settings_of,
    state_directory,
)
from pdlink.config.model import ModelConfig
from pdlink.config.proxy import ProxyConfig
from pdlink.config.section import Port, Role, Seconds, Section, is_loopback
from pdlink.config.security import SecurityConfig, check_private, read_key, read_private, read_secrets, read_token
from pdlink.config.sglang import SglangConfig
from pdlink.config.sglang_servers import SglangServersConfig
from pdlink.config.store import StoreConfig
from pdlink.config.tiers import TiersConfig
from pdlink.config.timeouts import PatientTimeouts, TimeoutConfig
from pdlink.config.transport import TransportConfig
from pdlink.config.up import UpConfig
from pdlink.config.vllm import VllmConfig
from pdlink.config.worker import WorkerConfig

__all__ = [
    "ENVIRONMENT_PREFIX",
    "CacheConfig",
    "EngineConfig",
    "KVEventsConfig",
    "ModelConfig",
    "PatientTimeouts",
    "Port",
    "ProxyConfig",
    "Role",
    "Seconds",
    "Section",
    "SecurityConfig",
    "SglangConfig",
    "SglangServersConfig",
    "StoreConfig",
    "TiersConfig",
    "TimeoutConfig",
    "TransportConfig",
    "UpConfig",
    "VllmConfig",
    "WorkerConfig",
    "check_private",
    "environment_with",
    "is_loopback",
    "load",
    "parse_assignments",
    "parse_value",
    "read_private",
    "read_key",
    "read_secrets",
    "read_token",
    "settings_of",
    "state_directory",
]
