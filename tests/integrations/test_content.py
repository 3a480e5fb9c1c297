"""What two vLLM servers compare of their models and adapters, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlink.integrations.vllm_parts import params, versions
from tests.test_content import safetensors, tensors, write


def config(model: object, *, load_format: str = "auto", tokenizer: object = None, **more: Any) -> Any:
    """The part of vLLM's settings that is read."""
    found = {"model": str(model), "tokenizer": str(tokenizer or model), "revision": None, **more}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=None), **found),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def request(name: str, path: object) -> Any:
    lora = SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(path))
    return SimpleNamespace(lora_request=lora, cache_salt=None, mm_features=None)


def adapter(place: Path, seed: int) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text('{"r": 8}')
    safetensors(place / "adapter_model.safetensors", tensors(seed))
    return place


def test_servers_with_the_same_files_in_two_directories_fit(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    assert versions.content(config(a)) == versions.content(config(b))


def test_weights_of_one_shape_under_one_served_name_do_not_fit(tmp_path: Path) -> None:
    """A rolling update to a new fine-tune: five of five answers were wrong."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", tensors(1))
    assert versions.content(config(a)) != versions.content(config(b))
    made_up = [versions.content(config(place, load_format="dummy")) for place in (a, b)]
    assert made_up[0] == made_up[1]


def test_another_tokenizer_does_not_fit(tmp_path: Path) -> None:
    model, words = write(tmp_path / "a"), write(tmp_path / "b")
    (words / "tokenizer.json").write_text("{}")
    assert versions.content(config(model)) != versions.content(config(model, tokenizer=words))


def test_models_that_are_not_on_this_host_are_compared_by_name_and_commit(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    here = versions.content(config("s3://bucket/model"))
    assert here == versions.content(config("s3://bucket/model")) != versions.content(config("s3://bucket/other"))
    assert here != versions.content(config("s3://bucket/model", revision="v2"))
    assert "compared by this name only" in caplog.text


def test_adapters_of_one_name_with_other_weights_never_match(tmp_path: Path) -> None:
    """An adapter loaded at start or at run time: the id of a transfer tells which one computed the KV."""
    one, copy, other = (adapter(tmp_path / name, seed) for name, seed in (("1", 0), ("2", 0), ("3", 1)))
    words = [versions.identity(request("sql", path)).words for path in (one, copy, other)]
    ids = [params.transfer_id("t", [1, 2], those) for those in words]
    assert ids[0] == ids[1] != ids[2]


def test_adapter_that_was_reloaded_with_other_weights_never_matches_its_old_self(tmp_path: Path) -> None:
    place = adapter(tmp_path / "1", 0)
    before = versions.identity(request("sql", place))
    safetensors(place / "adapter_model.safetensors", tensors(1, nbytes=50_000))
    assert versions.identity(request("sql", place)) != before


@pytest.mark.parametrize("path", ["", "owner/adapter", "/not/here", "no:name\0"])
def test_adapter_that_is_not_on_this_host_counts_by_where_it_comes_from(path: str) -> None:
    assert versions.identity(request("sql", path)).words == [f"lora sql {path}"]
