"""When Python's collector of cycles runs in a process that serves."""

from __future__ import annotations

import gc

from pdlink.serve import collector


def test_what_was_loaded_is_not_looked_at_while_requests_are_served() -> None:
    loaded = [object()]
    kept, threshold = gc.get_freeze_count(), gc.get_threshold()
    try:
        collector.pause()
        assert not gc.isenabled()
        with collector.over_requests_only():
            assert gc.isenabled()
            assert gc.get_freeze_count() > kept
            of_a_request = [object()]
            looked_at = {id(each) for each in gc.get_objects()}
            assert id(of_a_request) in looked_at
            assert id(loaded) not in looked_at
        assert gc.get_freeze_count() == 0, "an interpreter that ends has to see all cycles"
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
