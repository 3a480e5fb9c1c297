"""An adapter is what vLLM has loaded, whatever lies at its path when a request comes."""

from __future__ import annotations

from types import SimpleNamespace

from pdlink.integrations.vllm_parts.adapters import Adapter, LoadedAdapters


class Files:
    """Of adapters, by path; whatever lies there now is their content."""

    def __init__(self, **contents: str) -> None:
        self.contents = contents

    def __call__(self, path: str) -> str:
        return self.contents[path]


def manager_class(files: Files, replaced_while_read: str = "") -> type:
    """As far as the connector knows vLLM's class."""

    class Manager:
        def __init__(self) -> None:
            self.kept: dict[int, str] = {}

        def _load_adapter(self, request: SimpleNamespace) -> str:
            found = files(request.lora_path)
            if replaced_while_read:
                files.contents[request.lora_path] = replaced_while_read
            self.kept[request.lora_int_id] = found
            return found

        def list_adapters(self) -> set[int]:
            return set(self.kept)

    return Manager


def request(number: int, path: str) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_path=path)


def test_files_replaced_in_place_are_not_what_is_loaded_until_it_is_loaded_again() -> None:
    files = Files(sql="old")
    kind, loaded = manager_class(files), LoadedAdapters(files)
    loaded.watch(kind)
    manager = kind()
    assert manager._load_adapter(request(1, "sql")) == "old"
    files.contents["sql"] = "new"
    assert loaded.has(Adapter(1, "old")) is True
    assert loaded.has(Adapter(1, "new")) is False
    manager._load_adapter(request(1, "sql"))
    assert loaded.has(Adapter(1, "old")) is False
    assert loaded.has(Adapter(1, "new")) is True


def test_nothing_is_known_of_an_adapter_before_it_is_loaded_and_after_it_was_dropped() -> None:
    files = Files(sql="old")
    kind, loaded = manager_class(files), LoadedAdapters(files)
    loaded.watch(kind)
    manager = kind()
    assert loaded.has(Adapter(1, "old")) is None
    manager._load_adapter(request(1, "sql"))
    manager.kept.clear()
    assert loaded.has(Adapter(1, "old")) is None
    assert loaded.has(None) is True, "the base model"


def test_files_replaced_while_they_are_read_are_no_content_that_a_request_names() -> None:
    files = Files(sql="old")
    kind, loaded = manager_class(files, replaced_while_read="new"), LoadedAdapters(files)
    loaded.watch(kind)
    manager = kind()
    manager._load_adapter(request(1, "sql"))
    assert loaded.has(Adapter(1, "old")) is False
    assert loaded.has(Adapter(1, "new")) is False


def test_a_second_connector_of_a_process_watches_alone() -> None:
    files = Files(sql="old")
    kind, first, second = manager_class(files), LoadedAdapters(files), LoadedAdapters(files)
    first.watch(kind)
    second.watch(kind)
    manager = kind()
    manager._load_adapter(request(1, "sql"))
    assert first.has(Adapter(1, "old")) is None
    assert second.has(Adapter(1, "old")) is True
