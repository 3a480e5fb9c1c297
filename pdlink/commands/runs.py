"""What each command runs: its settings put together, and the part of pdlink that does the work, imported then."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from pdlink import logs
from pdlink.commands.words import FLAGS
from pdlink.config import (
    ProxyConfig,
    StoreConfig,
    UpConfig,
    WorkerConfig,
    load,
    parse_assignments,
    read_key,
)
from pdlink.errors import ConfigError, PdlinkError
from pdlink.extras import needed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from pdlink.config.log import LogConfig
    from pdlink.serve.process import Parent

log = logging.getLogger("pdlink.cli")

NO_DISK_SIZE = "--disk-size: missing; say how many GiB of --disk may be used"


def settings_of_flags(args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """The flags that were given, by dotted key; `--set` last."""
    given = {FLAGS[flag][0]: getattr(args, FLAGS[flag][0], None) for flag in flags}
    return _given(given) | parse_assignments(args.set)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value is not None}


def _log_flags(args: argparse.Namespace) -> dict[str, Any]:
    return _given({"log.level": args.log_level, "log.format": args.log_format})


def _log_as(config: LogConfig, args: argparse.Namespace) -> None:
    """From now on, as the settings say."""
    logs.set_up(config.level, config.format, args.label if "label" in args and args.label else "")


def say(text: str) -> None:
    """For commands whose output is their purpose: raises OSError if it cannot be written."""
    print(text, flush=True)


def mention(text: str) -> None:
    """For processes that go on: a terminal that has gone or a full disk must not end them, nor keep them from their
    drain."""
    try:
        say(text)
    except OSError as error:
        log.warning("standard output cannot be written: %s; nothing more goes there", error.strerror)
        silence_stdout()


def silence_stdout() -> None:
    """What is written from now on, and what is still in the buffer, goes nowhere, so that no flush fails at exit."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: no descriptor under it, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def up(args: argparse.Namespace) -> None:
    from pdlink.fleet import keeping, up

    flags = {"proxy.listen": args.listen, "engine": args.engine, "share_store": args.store}
    flags |= {"num_prefill": args.prefill, "num_decode": args.decode}
    model, transport = getattr(args, "model.path"), getattr(args, "transport.kind")
    flags |= {"model": model, "prefill.transport.kind": transport, "decode.transport.kind": transport}
    config = load(UpConfig, args.config, flags=_given(flags) | _log_flags(args) | parse_assignments(args.set))
    _log_as(config.log, args)
    keeping.log.setLevel((config.log.level or "info").upper())  # a deployment that starts and changes is not silent
    up.up(config, mention)


def worker(args: argparse.Namespace) -> int | None:
    from pdlink.serve.roles import run_worker

    if args.parent_fd is not None:
        with _reporting(args.parent_fd) as parent:
            config = WorkerConfig.model_validate(parent.settings())
            _log_as(config.log, args)
            run_worker(config, parent, lambda _: None)
        return parent.status
    flags = _log_flags(args) | settings_of_flags(args, *FLAGS)
    config = load(WorkerConfig, args.config, flags=flags, defaults={"role": args.role})
    _log_as(config.log, args)
    if config.role != args.role:
        raise ConfigError(f"role: the settings say {config.role!r}; use `pdlink {config.role}`, or leave `role` out")
    run_worker(config, None, mention)
    return None


def store(args: argparse.Namespace) -> int | None:
    from pdlink.serve.roles import run_store

    if args.parent_fd is not None:
        with _reporting(args.parent_fd) as parent:
            config = StoreConfig.model_validate(parent.settings())
            _log_as(config.log, args)
            run_store(config, parent, lambda _: None)
        return parent.status
    flags = {"socket": args.socket, "tiers.max_local_cpu_size": args.memory}
    flags |= {"tiers.local_disk": args.disk, "tiers.max_local_disk_size": args.disk_size}
    settings = _given(flags) | _log_flags(args) | settings_of_flags(args, "--listen")
    try:
        config = load(StoreConfig, args.config, flags=settings)
    except ConfigError as error:
        if args.disk is not None and str(error).startswith("tiers.max_local_disk_size: missing"):
            raise ConfigError(NO_DISK_SIZE) from None
        raise
    _log_as(config.log, args)
    run_store(config, None, mention)
    return None


def proxy(args: argparse.Namespace) -> int | None:
    from pdlink.fleet.processes import PLACE, run_proxy

    if args.parent_fd is not None:
        with _reporting(args.parent_fd) as parent:
            found = parent.settings()
            place = found.pop(PLACE, None)
            config = ProxyConfig.model_validate(found)
            _log_as(config.log, args)
            run_proxy(config, parent, lambda _: None, place)
        return parent.status
    flags = {"prefill": args.prefill, "decode": args.decode, "dialect": args.dialect, "processes": args.processes}
    flags["token_file"] = args.token
    flags |= {"control": dict(args.control) if args.control else None}
    settings = _given(flags) | _log_flags(args) | settings_of_flags(args, "--listen")

    def reread() -> ProxyConfig:
        return load(ProxyConfig, args.config, flags=settings)

    config = reread()
    _log_as(config.log, args)
    run_proxy(config, None, mention, reread=reread)
    return None


@contextlib.contextmanager
def _reporting(fd: int) -> Iterator[Parent]:
    """The life of a child: an error before it is ready is its parent's to tell, so that it is told once."""
    from pdlink.serve.process import Parent

    parent = Parent(fd)
    try:
        with needed():
            yield parent
    except (PdlinkError, OSError) as error:
        if not parent.failed(str(error), 2 if isinstance(error, ConfigError) else 1):
            raise
    finally:
        parent.close()


def check(args: argparse.Namespace) -> int:
    from pdlink.serve.check import check

    return check(load(WorkerConfig, args.config, flags=settings_of_flags(args, "--transport")))


def timeline(args: argparse.Namespace) -> int:
    from pdlink.observe.fetch import fetch_timeline

    key = read_key(args.key_file)
    say(fetch_timeline(args.url, args.output, request=args.request, key=key))
    return 0


def explain(args: argparse.Namespace) -> None:
    import json

    from rich.console import Console

    from pdlink.observe.explain import advice, fetch_explanation, table_of
    from pdlink.observe.plain import plain

    key = read_key(args.key_file)
    found = fetch_explanation(args.proxy, args.request, key=key)
    if args.json:
        print(json.dumps(found._asdict(), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        console.print(table_of(found))
        for sentence in advice(found):
            console.print(plain(f"→ {sentence}"))


def keygen(args: argparse.Namespace) -> None:
    from pdlink.serve.keys import keygen

    missing = not os.path.isdir(args.directory)
    path, line = keygen(args.name, args.directory)
    if missing:
        print(f"# {args.directory} is new; only this user can enter it", file=sys.stderr)
    print(f"# {path} is secret; this line is not, it goes into allow-lists:", file=sys.stderr)
    say(line)
