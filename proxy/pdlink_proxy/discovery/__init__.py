"""Where the proxy finds its workers: one file for each kind of source."""
