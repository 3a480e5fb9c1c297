"""Where a model is: a local directory, the hub's cache, or the hub.

Checked before heavy imports: transformers reports a missing model late, at length, and as a tokenizer's error.
"""

from __future__ import annotations

import http.client
import logging
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from pdlink.errors import ConfigError

if TYPE_CHECKING:
    from pdlink.config import ModelConfig

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TIMEOUT_S = 5.0
"""Longest wait for the hub's answer about one small file."""


def find_model(config: ModelConfig) -> bool:
    """Whether the model must be taken from the hub's cache, because the hub does not answer.

    Raises ConfigError, one line, for a model that is nowhere.
    """
    if config.path is None:
        return False
    place = Path(config.path)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ConfigError(f"model.path: {config.path} has no config.json; it must hold a transformers model")
        return False
    if place.exists():
        raise ConfigError(f"model.path: {config.path} is a file; name the directory that holds the model")
    if not _HUB_ID.fullmatch(config.path):
        hint = "; ~ is not expanded here" if config.path.startswith("~") else ""
        raise ConfigError(f"model.path: no such directory: {config.path}{hint}")
    return _find_on_hub(config.path, config.revision)


def _find_on_hub(name: str, revision: str) -> bool:
    from huggingface_hub import constants, get_token, try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    nowhere = f"model.path: {name!r} is no directory here, and not in the hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        if not cached:
            raise ConfigError(f"{nowhere}; HF_HUB_OFFLINE keeps it from being fetched")
        return True
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{constants.ENDPOINT}/{name}/resolve/{revision}/config.json"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method="HEAD"), timeout=_TIMEOUT_S):
            return False
    except urllib.error.HTTPError as error:
        reason = f"{constants.ENDPOINT} answers {error.code} for it"
        if error.code in (401, 403, 404):
            reason += "; it is misspelled, or private and `hf auth login` is missing"
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        reason = f"{constants.ENDPOINT} cannot be reached: {getattr(cause, 'strerror', None) or cause}"
    if not cached:
        raise ConfigError(f"{nowhere}; {reason}")
    log.warning("model.path: %r is taken from the cache; %s", name, reason)
    return True
