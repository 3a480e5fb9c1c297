"""The installed SGLang: whether it is one that the integration was run with, and what its KV depends on."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from pdlink.content import digest_of
from pdlink.errors import LocalError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 5, 22), (0, 5, 23)


class UnsupportedSglang(LocalError):
    """A version of SGLang, or a setting of it, that the integration does not know."""

    code = "unsupported_sglang"


def check(version: str, *, accept_newer: bool) -> tuple[int, int, int]:
    """The number of an SGLang that can be used. Raises UnsupportedSglang, with the remedy."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise UnsupportedSglang(f"sglang: got version {version!r}; expected three numbers; install a release")
    found = int(match[1]), int(match[2]), int(match[3])
    limits = f"sglang: got {version}; expected {_text(OLDEST)} to {_text(NEWEST)}"
    if found < OLDEST:
        raise UnsupportedSglang(f"{limits}; update SGLang")
    if found > NEWEST and not accept_newer:
        raise UnsupportedSglang(f"{limits}; update pdlink, or try it with untested_sglang: accept")
    if found > NEWEST:
        log.warning("%s; with this one neither managers and caches nor servers nor GPUs were tried", limits)
    return found


def content(server_args: Any) -> str:
    """Digest of the files that this server loads; where they are not here, the model's name and revision."""
    model = str(server_args.model_path)
    if not Path(model).exists():
        return f"{model} {getattr(server_args, 'revision', None) or 'main'}"
    tokenizer = server_args.tokenizer_path
    made_up = str(getattr(server_args, "load_format", "")) == "dummy"
    return digest_of(model, None if tokenizer in (None, model) else tokenizer, weights=not made_up)


def num_kv_heads(num_mine: int, num_ranks: int, server_args: Any) -> int:
    """Of the model. Ranks with several heads share none: only one head a rank needs the model's config."""
    if num_mine > 1 or num_ranks == 1:
        return num_mine * num_ranks
    return int(model_config(server_args).get_total_num_kv_heads())


def model_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of this server. Cost: the model's config is read."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args)


def precision(server_args: Any) -> str:
    """What the bytes of KV depend on beside the model's files: how it is computed and kept."""
    return f"{server_args.dtype} {server_args.quantization} {server_args.kv_cache_dtype}"


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
