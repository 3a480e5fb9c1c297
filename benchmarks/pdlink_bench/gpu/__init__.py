"""Benchmarks that need a GPU, and the script that builds, checks and runs everything on a machine that has one."""
