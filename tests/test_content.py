"""The digest of a model's files: what changes it, what does not, and what it costs."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from pdlink.content import digest_of
from pdlink.errors import ConfigError

TOKENIZER = {"model": {"vocab": {"a": 0}}}
Tensors = dict[str, bytes]


def tensors(seed: int = 0, *, count: int = 3, nbytes: int = 40_000) -> Tensors:
    dice = random.Random(seed)
    return {f"layer.{index}.weight": dice.randbytes(nbytes) for index in range(count)}


def safetensors(path: Path, content: Tensors) -> None:
    header, at = {}, 0
    for name, values in content.items():
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [at, at + len(values)]}
        at += len(values)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content.values()))


def write(place: Path, content: Tensors | None = None, **config: object) -> Path:
    """A model's directory, as somebody downloads it."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"hidden_size": 8, "_name_or_path": str(place), **config}))
    (place / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    safetensors(place / "model.safetensors", content or tensors())
    return place


def test_same_files_in_two_directories_have_one_digest(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", transformers_version="4.1")
    (b / "README.md").write_text("another one")
    assert digest_of(a) == digest_of(b)
    assert len(digest_of(a)) == 32


def test_digest_does_not_depend_on_times_or_links(tmp_path: Path) -> None:
    """The hub's cache holds links to files named by their hashes."""
    a = write(tmp_path / "a")
    before = digest_of(a)
    for path in a.iterdir():
        os.utime(path, (1, 1))
    assert digest_of(a) == before
    links = tmp_path / "links"
    links.mkdir()
    for number, path in enumerate(a.iterdir()):
        path.rename(tmp_path / f"blob-{number}")
        (links / path.name).symlink_to(tmp_path / f"blob-{number}")
    assert digest_of(links) == before


@pytest.mark.parametrize("kind", [".safetensors", ".bin", ".pt", ".gguf"])
def test_weights_of_one_shape_and_one_name_differ(tmp_path: Path, kind: str) -> None:
    """A new fine-tune: equal sizes, equal names, other numbers."""
    digests = set()
    for seed in range(2):
        place = write(tmp_path / str(seed))
        if kind != ".safetensors":
            (place / "model.safetensors").unlink()
            (place / f"model{kind}").write_bytes(b"".join(tensors(seed).values()))
        else:
            safetensors(place / "model.safetensors", tensors(seed))
        digests.add(digest_of(place))
    assert len(digests) == 2


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of models that are too large to be read."""
    monkeypatch.setattr("pdlink.content._WHOLE_NBYTES", 0)


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(("count", "nbytes"), [(500, 5000), (9000, 40)])
def test_every_single_tensor_counts_however_many_there_are(tmp_path: Path, count: int, nbytes: int) -> None:
    content = tensors(count=count, nbytes=nbytes)
    base = digest_of(write(tmp_path / "base", content))
    for index in (0, 1, count // 2 + 1, count - 1):
        changed = dict(content)
        changed[f"layer.{index}.weight"] = random.Random(-index - 1).randbytes(nbytes)
        assert digest_of(write(tmp_path / str(index), changed)) != base


def test_every_byte_of_an_adapter_counts(tmp_path: Path) -> None:
    content = tensors(count=4, nbytes=200_000)
    base = digest_of(write(tmp_path / "base", content))
    for number, (name, at) in enumerate([("layer.0.weight", 100_001), ("layer.3.weight", 177_777)]):
        changed = dict(content)
        changed[name] = content[name][:at] + bytes([content[name][at] ^ 1]) + content[name][at + 1 :]
        assert digest_of(write(tmp_path / str(number), changed)) != base


PARTS = {"embed": 2_000_000, "q_proj": 500_000, "up_proj": 1_000_000, "bias": 2_000, "norm": 8_000}
"""Bytes of each tensor of a layer."""


def layers(trained: str = "", layer: int | None = None, share: float = 1.0) -> Tensors:
    """A model of which a part was trained, in one layer or in all: of it this share of the two-byte words changed."""
    content = {}
    for index in range(4):
        for part, nbytes in PARTS.items():
            values = random.Random(f"{index} {part}").randbytes(nbytes)
            if trained in (part, "all") and layer in (index, None):
                dice, changed = random.Random(f"new {index} {part}"), bytearray(values)
                for at in dice.sample(range(0, nbytes, 2), int(nbytes / 2 * share)):
                    changed[at] ^= 1
                values = bytes(changed)
            content[f"layer.{index}.{part}.weight"] = values
    return content


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize(
    ("trained", "layer", "share"),
    [("all", None, 0.01), ("bias", None, 0.1), ("norm", 2, 0.1), ("q_proj", 3, 0.05), ("up_proj", 0, 0.05)],
)
def test_fine_tunes_that_change_few_weights_differ(
    tmp_path: Path, trained: str, layer: int | None, share: float
) -> None:
    """A small step in bf16 leaves most words as they were; others train a part of a model."""
    base = digest_of(write(tmp_path / "base", layers()))
    assert digest_of(write(tmp_path / "tuned", layers(trained, layer, share))) != base


@pytest.mark.usefixtures("sampled")
def test_a_changed_row_of_large_embeddings_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the digest cannot see, as its page says: new embeddings of one token, 512 bytes of 2 MB."""
    monkeypatch.setattr("pdlink.content._NUM_SAMPLES", 400)
    content = layers()
    base = digest_of(write(tmp_path / "base", content))
    values = content["layer.0.embed.weight"]
    content["layer.0.embed.weight"] = values[:50_000] + bytes(512) + values[50_512:]
    assert digest_of(write(tmp_path / "tuned", content)) == base


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"hidden_size": 9}'),
        ("config.json", "no JSON"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1}}}'),
        ("tokenizer.model", "another tokenizer"),
        ("chat_template.jinja", "{{ messages }}"),
    ],
)
def test_config_and_tokenizer_count(tmp_path: Path, name: str, text: str) -> None:
    place = write(tmp_path / "a")
    before = digest_of(place)
    (place / name).write_text(text)
    assert digest_of(place) != before


def test_tokenizer_of_its_own_directory_counts(tmp_path: Path) -> None:
    model, words = write(tmp_path / "a"), write(tmp_path / "b")
    assert digest_of(model, words) == digest_of(model)
    (words / "tokenizer.json").write_text("{}")
    assert digest_of(model, words) != digest_of(model)


def test_only_the_files_that_a_server_loads_count(tmp_path: Path) -> None:
    """Beside its shards a model may lie there in one piece, or in another format."""
    place = write(tmp_path / "a")
    before = digest_of(place)
    for name in ("pytorch_model.bin", "training_args.bin"):
        (place / name).write_bytes(b"x")
    assert digest_of(place) == before
    index = {"weight_map": {"layer.0.weight": "model.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    safetensors(place / "consolidated.safetensors", tensors(1))
    assert digest_of(place) == before


def test_weights_that_a_server_makes_up_do_not_count(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", tensors(1))
    assert digest_of(a, weights=False) == digest_of(b, weights=False)


def test_files_exchanged_under_the_same_path_are_seen(tmp_path: Path) -> None:
    place = write(tmp_path / "a")
    before = digest_of(place)
    safetensors(place / "model.safetensors", tensors(1))
    os.utime(place / "model.safetensors", ns=(1, 2**60))
    assert digest_of(place) != before


@pytest.mark.parametrize("seed", range(20))
def test_files_that_are_no_models_have_a_digest_too(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    place = write(tmp_path / "a")
    text = dice.choice([b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b"\1\0\0\0\0\0\0\0", dice.randbytes(100)])
    (place / "model.safetensors").write_bytes(text)
    nonsense = {"t": {"data_offsets": dice.choice([[0], [1, 0], [0, 2**70], ["0", "1"], None])}}
    header = json.dumps(nonsense).encode()
    (place / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    assert len(digest_of(place)) == 32, seed


def test_directory_that_is_not_there_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        digest_of(tmp_path / "nowhere")


def test_a_hundred_gigabytes_take_less_than_a_second(tmp_path: Path) -> None:
    """Of CPU: 20 shards of 100 tensors in files with holes, so the time of the disk is not in it."""
    place = write(tmp_path / "a")
    (place / "model.safetensors").unlink()
    each = 50 * 10**6
    for shard in range(20):
        path = place / f"model-{shard}.safetensors"
        header = {str(index): {"data_offsets": [index * each, (index + 1) * each]} for index in range(100)}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + 100 * each)
    assert sum(path.stat().st_size for path in place.iterdir()) > 100 * 10**9
    times = []
    for _ in range(3):
        digest_of.__globals__["_digest"].cache_clear()
        began_s = time.process_time()
        digest_of(place)
        times.append(time.process_time() - began_s)
    assert min(times) < 1.0, times
    began_s = time.process_time()
    digest_of(place)
    assert time.process_time() - began_s < 0.1, "kept"
    print(f"first {min(times):.3f} s")
