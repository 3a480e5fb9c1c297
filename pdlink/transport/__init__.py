"""Ways to move bytes into a peer's pages, all behind `base.Transport`."""
