"""`pdlink vllm` and `pdlink sglang`: one server of a deployment on several hosts."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from pdlink.commands.runs import NO_DISK_SIZE, say
from pdlink.config import environment_with, parse_assignments
from pdlink.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pdlink.commands.parser import Parser

ENGINES = {"vllm": ("vLLM", ("prefill", "decode", "both")), "sglang": ("SGLang", ("prefill", "decode"))}
"""Name of the command to that of the engine, and what a server of it can be."""

DESCRIPTION = """\
Start one {engine} server with everything set for a deployment on several hosts, and print the command of its proxy.
The process becomes the {engine} server. Flags of {engine} go after --.

  openssl rand -hex 32 > token; chmod 600 token                   once; the same file on every host
  pdlink {command} prefill MODEL --listen 10.0.0.1 --token token -- {flags}
  pdlink {command} decode MODEL --listen 10.0.0.2 --token token -- {flags}
"""
_MORE = {
    "vllm": (
        "--max-model-len 8192",
        "  pdlink vllm both MODEL --disk /var/tmp/kv --disk-size 50        no proxy: keeps prompts on a disk\n",
    ),
    "sglang": ("--context-length 8192", ""),
}


def add_arguments(command: Parser, name: str) -> None:
    engine, roles = ENGINES[name]
    flags, more = _MORE[name]
    command.description = DESCRIPTION.format(engine=engine, command=name, flags=flags) + more
    command.add_argument("role", choices=roles, metavar="ROLE", help=", ".join(roles))
    command.add_argument("model", metavar="MODEL", help="local directory or hub id")
    command.add_argument(
        "--listen",
        default="127.0.0.1",
        metavar="HOST[:PORT]",
        help="address where others reach its HTTP (127.0.0.1; port 8100 for prefill, 8200 for decode, 8000 for "
        "both); the control plane listens 400 ports above",
    )
    command.add_argument(
        "--token",
        metavar="FILE",
        help="file with the secret of the deployment, the same on all servers and the proxy; required if other hosts "
        "reach the server (or --set security.insecure=true)",
    )
    if name == "vllm":
        command.add_argument("--disk", metavar="DIR", help="keep the KV of prompts there; needs --disk-size")
        command.add_argument("--disk-size", type=float, metavar="GIB", help="disk space to use")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable")
    command.add_argument("--print", action="store_true", help="print the command instead of running it")
    command.hint = f"; flags of {engine} go after --"
    command.set_defaults(run=run, engine=name)


def run(args: argparse.Namespace) -> None:
    from pdlink.fleet import alone, server

    settings: dict[str, Any] = {}
    if getattr(args, "disk", None) is not None:
        if args.disk_size is None:
            raise ConfigError(NO_DISK_SIZE)
        settings |= {"tiers.local_disk": os.path.join(os.path.abspath(args.disk), "{name}")}
    if getattr(args, "disk_size", None) is not None:
        settings |= {"tiers.max_local_disk_size": args.disk_size}
    token_file = None if args.token is None else os.path.abspath(args.token)
    asked = alone.Asked(
        args.role, args.model, args.listen, token_file, settings | parse_assignments(args.set), args.flags
    )
    executable = args.engine if args.print else server.find_program(args.engine, ENGINES[args.engine][0], None)
    line = (alone.vllm if args.engine == "vllm" else alone.sglang)(asked, executable)
    if args.print:
        say(f"{line.words}\n\n{line.proxy}")
        return
    print(f"pdlink: the proxy for it: {line.proxy}", file=sys.stderr, flush=True)
    try:
        os.execve(executable, line.command, environment_with(line.environment))
    except OSError as error:
        raise ConfigError(f"{shlex.quote(executable)}: cannot be run: {error.strerror}") from None


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words of the command, and those of the engine behind `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return (argv[:at], argv[at + 1 :]) if any(word in ENGINES for word in argv[:at]) else (argv, ())
