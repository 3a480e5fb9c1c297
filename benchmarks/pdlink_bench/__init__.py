"""Benchmarks of pdlink (installed as `pdlink_bench`): each figure beside a limit or a peer of the same run."""
