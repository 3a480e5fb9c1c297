"""A digest of what a model is: config, tokenizer and weights, without reading the weights.

Two servers may call different weights the same name: any update to a new fine-tune does. Their KV has one shape, and
one of them answering from the other's gives wrong tokens. So both send this digest in the handshake.

Small files count whole, and so do weights of up to 64 MiB, as of most adapters. Of more weights the headers count
(names, types, shapes, places of all tensors), the sizes, and pages sampled at fixed places: at least one of every
tensor, however many there are. Training changes nearly every page of what it trains, so a sample finds it: all
weights, one layer, one projection, norms or biases alone. What it cannot see is a change of a few rows, such as the
embeddings of some tokens, or one that was made to keep the samples.

The same files give the same digest in every directory, on every host and at every time. 100 GB take well under a
second, 100,000 tensors some more from a cold disk. A digest is kept while the files' sizes and times stay.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdlink.errors import ConfigError

_CONFIGS = ("config.json", "adapter_config.json", "params.json", "chat_template.jinja", "chat_template.json")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Kinds of weight files. The first kind of which there is a file counts, as in transformers and vLLM."""
_NOT_WEIGHTS = (
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "optimizer.bin",
    "scheduler.bin",
)

_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of JSON files that tell where and with what a model was saved."""

_PAGE_NBYTES = 4096
_NUM_SAMPLES = 4096
"""Pages read of all weight files together, or one of every tensor: 16 MB, 0.3 s from a disk that takes 80 µs each."""
_WHOLE_NBYTES = 64 * 2**20
"""Weights of up to so many bytes count whole: 0.1 s."""
_MAX_HEADER_NBYTES = 100_000_000
"""As the safetensors library (0.6) has it."""
_DIGEST_NBYTES = 16


def digest_of(model: str | Path, tokenizer: str | Path | None = None, *, weights: bool = True) -> str:
    """The digest of the model or adapter in a directory, or in one file, as 32 hex digits.

    tokenizer: where that is, if elsewhere. weights: False where the server makes them up.
    Raises ConfigError for what cannot be read.
    """
    place = Path(model)
    try:
        if place.is_file():
            files = [place]
        else:
            found = {path.name: path for path in place.iterdir() if path.is_file()}
            words = Path(tokenizer) if tokenizer is not None else place
            files = [found[name] for name in _CONFIGS if name in found]
            files += [path for name in _TOKENIZERS if (path := words / name).is_file()]
            files += _weight_files(found) if weights else []
        return _digest(tuple(_stamp(path) for path in files))
    except OSError as error:
        raise ConfigError(f"the content of model {str(model)!r} cannot be read: {error}") from error


def _weight_files(found: dict[str, Path]) -> list[Path]:
    for kind in _WEIGHTS:
        names = sorted(name for name in found if name.endswith(kind) and name not in _NOT_WEIGHTS)
        if not names:
            continue
        if kind == ".safetensors" and _INDEX in found:  # beside the shards there may be a copy of all in one
            listed = set(_json(found[_INDEX].read_bytes()).get("weight_map", {}).values())
            names = [name for name in names if name in listed] or names
        return [found[name] for name in names]
    return []


def _stamp(path: Path) -> tuple[str, int, int]:
    """Path, size and time of last change: what a kept digest is good for."""
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    paths = [Path(name) for name, _, _ in files]
    sizes = [nbytes for name, nbytes, _ in files if Path(name).suffix in _WEIGHTS]
    for path in paths:
        if path.suffix in _WEIGHTS and sum(sizes) > _WHOLE_NBYTES:
            part = _weights(path, _NUM_SAMPLES // len(sizes))
        elif path.suffix == ".json":
            part = _canonical(path.read_bytes())
        else:
            part = path.read_bytes()
        name = path.name if path.suffix != ".gguf" else ""  # given by its path, so its name may be anything
        digest.update(f"{name} {len(part)} ".encode() + part)
    return digest.hexdigest()


def _canonical(text: bytes) -> bytes:
    """A JSON object without the keys that are no content; anything else as it is."""
    values = _json(text)
    kept = {key: value for key, value in values.items() if key not in _NOT_CONTENT}
    return json.dumps(kept, sort_keys=True).encode() if kept else text


def _json(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _weights(path: Path, num_samples: int) -> bytes:
    """The digest of one weight file: its size, its header if it has one, and samples."""
    digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        digest.update(b"%d " % nbytes)
        spans = [(0, nbytes)]
        if path.suffix == ".safetensors":
            header_nbytes = int.from_bytes(os.pread(fd, 8, 0), "little")
            if header_nbytes <= min(nbytes - 8, _MAX_HEADER_NBYTES):
                header = os.pread(fd, header_nbytes, 8)
                digest.update(header)
                spans = _tensors(header, 8 + header_nbytes, nbytes) or spans
        for at in _places(spans, max(num_samples, 1)):
            digest.update(os.pread(fd, _PAGE_NBYTES, at))
        digest.update(os.pread(fd, _PAGE_NBYTES, max(0, nbytes - _PAGE_NBYTES)))  # a zip's directory of checksums
    finally:
        os.close(fd)
    return digest.digest()


def _tensors(header: bytes, base: int, nbytes: int) -> list[tuple[int, int]]:
    """Begin and end of every tensor in the file, in its order. Nothing of a header that makes no sense."""
    spans = []
    for value in _json(header).values():
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(item, int) for item in offsets):
            begin, end = offsets
            if 0 <= begin < end <= nbytes - base:
                spans.append((base + begin, base + end))
    return sorted(spans)


def _places(spans: list[tuple[int, int]], num_samples: int) -> list[int]:
    """Where pages are sampled: evenly in every span, at least one each."""
    each = max(1, num_samples // len(spans))
    places: set[int] = set()
    for begin, end in spans:
        room = max(0, end - begin - _PAGE_NBYTES)
        places.update(begin + room * index // max(each - 1, 1) for index in range(each))
    return sorted(places)
