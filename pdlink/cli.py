"""`pdlink`: the commands people type. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import yaml

from pdlink import __version__
from pdlink.config import ProxyConfig, UpConfig, WorkerConfig, load, read_secrets
from pdlink.errors import ConfigError, PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SETTINGS_HELP = """\
settings come from the defaults, then --config FILE (YAML), then the environment
(PDLINK_CACHE__NUM_BLOCKS=2048), then the flags here; --set reaches every setting:
  --set cache.num_blocks=2048 --set transport.kind=ucx
"""

_FLAGS: dict[str, tuple[str, str]] = {
    "--host": ("host", "address to serve HTTP on"),
    "--port": ("port", "HTTP port; 0 takes a free one, which is printed"),
    "--name": ("name", "name of this worker, unique in the deployment"),
    "--model": ("model.path", "local directory or hub id of a transformers causal LM"),
    "--transport": ("transport.kind", "auto, mapped, ucx or tcp"),
    "--on-transfer-failure": ("on_transfer_failure", "what decode does without the KV: recompute or fail"),
}

_BENCHMARKS: dict[str, str] = {
    "transfer": "push KV between two processes over every transport",
    "overlap": "how much of a transfer hides behind prefill, on links of many speeds",
    "serving": "time to first token through prefill and decode, beside other connectors",
    "soak": "very many tiny transfers in a row, and what they leave behind",
    "control": "what the control plane costs: latency, transfers per second, idle CPU",
    "sharing": "many transfers at once over one link: who waits for whom",
    "bind": "how long the planner takes to turn block lists into byte runs",
    "tune": "how short a run must be for packing it to pay, per transport",
    "figures": "all of them, with JSON and pictures into one directory",
}
"""Modules of `pdlink_bench`, each with `add_arguments(parser)` and `run(args)`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong usage or settings."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        return run(args) or 0
    except ConfigError as error:
        print(f"pdlink: {error}", file=sys.stderr)
        return 2
    except PdlinkError as error:
        print(f"pdlink: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdlink",
        description="Moves the KV cache of an LLM from prefill servers to decode servers.",
        epilog="Begin with `pdlink up`: a whole deployment on this machine, no download, no GPU.",
    )
    parser.add_argument("--version", action="version", version=f"pdlink {__version__}")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, text: str, run: Callable[[argparse.Namespace], int | None], flags: Sequence[str]
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_SETTINGS_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        if flags:
            command.add_argument("--config", metavar="FILE", help="YAML file of settings; see configs/")
            command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting")
        for flag in flags:
            command.add_argument(flag, dest=_FLAGS[flag][0], metavar="VALUE", help=_FLAGS[flag][1])
        return command

    up = add("up", "prefill, decode and proxy on this machine", _up, ("--host", "--port", "--model", "--transport"))
    up.add_argument("--prefill", type=int, metavar="N", help="number of prefill workers (1)")
    up.add_argument("--decode", type=int, metavar="N", help="number of decode workers (1)")
    up.add_argument("--engine", choices=["builtin", "vllm"], help="what the workers run (builtin)")
    for role in ("prefill", "decode", "both"):
        text = {
            "prefill": "a worker that computes prompts and sends their KV",
            "decode": "a worker that receives KV and decodes",
        }
        worker = add(role, text.get(role, "a worker that takes either leg of a request"), _worker, tuple(_FLAGS))
        worker.set_defaults(role=role)
        worker.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    proxy = add("proxy", "the router in front of the workers", _proxy, ("--host", "--port"))
    proxy.add_argument("--prefill", action="append", metavar="URL", help="base URL of a prefill worker; repeatable")
    proxy.add_argument("--decode", action="append", metavar="URL", help="base URL of a decode worker; repeatable")
    proxy.add_argument("--dialect", choices=["pdlink", "vllm", "vllm-nixl"], help="what the workers run (pdlink)")
    proxy.add_argument(
        "--control",
        action="append",
        type=_address_of,
        metavar="URL=TCP",
        help="where the connector of the vLLM prefill server URL listens: tcp://HOST:PORT, or one for each rank with "
        "commas between; repeatable",
    )
    proxy.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    add("check", "what works on this machine, and why the rest does not", _check, ("--transport",))

    timeline = commands.add_parser(
        "timeline",
        help="the last transfers of a worker as a trace for ui.perfetto.dev",
        description="Fetch the last transfers of a running worker: when each layer was written, pushed and visible. "
        "Open the file at ui.perfetto.dev or chrome://tracing.",
    )
    timeline.add_argument("url", help="base URL of a prefill worker")
    timeline.add_argument("--key-file", metavar="FILE", help="the worker's security.http_key_file")
    timeline.add_argument("-o", "--output", default="timeline.json", metavar="FILE")
    timeline.set_defaults(run=_timeline)

    keygen = commands.add_parser(
        "keygen",
        help="a key pair for one worker",
        description="Make DIR/NAME.key, for security.key_file of the worker called NAME, and print the line that "
        "goes into security.allow_file of every worker it has to do with. An existing key is never overwritten.",
    )
    keygen.add_argument("name", metavar="NAME", help="the worker's name")
    keygen.add_argument("-d", "--directory", default=".", metavar="DIR", help="where to (.)")
    keygen.set_defaults(run=_keygen)

    bench = commands.add_parser("bench", help="measure this machine and this link").add_subparsers(
        required=True, metavar="BENCHMARK"
    )
    for title, help_text in _BENCHMARKS.items():
        benchmark = bench.add_parser(title, help=help_text)
        if "bench" in argv and title in argv:  # its options need the planner; no other command pays for that
            module = importlib.import_module(f"pdlink_bench.{title}")
            module.add_arguments(benchmark)
            benchmark.set_defaults(run=module.run)

    chaos = commands.add_parser("chaos", help="break a deployment on purpose, and judge what its clients see")
    if "chaos" in argv:
        from pdlink.chaos import command

        chaos.description, chaos.epilog = command.DESCRIPTION, command.EPILOG
        chaos.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(chaos)
        chaos.set_defaults(run=command.run, words=list(argv))
    return parser


def _settings(args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """The flags that were given, by dotted key; `--set` last."""
    given = {_FLAGS[flag][0]: getattr(args, _FLAGS[flag][0], None) for flag in flags}
    settings = {key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in given.items()}
    for item in args.set:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, got {item!r}")
        settings[key] = yaml.safe_load(value)
    return settings


def _address_of(text: str) -> tuple[str, list[str]]:
    url, equals, addresses = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes URL=tcp://HOST:PORT, got {text!r}")
    return url, addresses.split(",")


def _say(text: str) -> None:
    print(text, flush=True)


def _up(args: argparse.Namespace) -> None:
    from pdlink.serve.up import up

    settings = _settings(args)
    settings |= {"proxy.host": args.host, "proxy.port": args.port and int(args.port)}
    for side in ("prefill", "decode"):
        settings |= {
            f"{side}.model.path": getattr(args, "model.path"),
            f"{side}.transport.kind": getattr(args, "transport.kind"),
        }
    settings |= {"num_prefill": args.prefill, "num_decode": args.decode, "engine": args.engine}
    settings |= {"vllm.model": getattr(args, "model.path")}
    up(load(UpConfig, args.config, flags=settings), _say)


def _worker(args: argparse.Namespace) -> None:
    from pdlink.serve.process import Parent
    from pdlink.serve.roles import run_worker

    if args.parent_fd is not None:
        parent = Parent(args.parent_fd)
        run_worker(WorkerConfig.model_validate(parent.settings()), parent, lambda _: None)
        return
    config = load(WorkerConfig, args.config, flags={"role": args.role} | _settings(args, *_FLAGS))
    run_worker(config, None, _say)


def _proxy(args: argparse.Namespace) -> None:
    from pdlink.serve.process import Parent
    from pdlink.serve.roles import run_proxy

    if args.parent_fd is not None:
        parent = Parent(args.parent_fd)
        run_proxy(ProxyConfig.model_validate(parent.settings()), parent, lambda _: None)
        return
    settings = _settings(args, "--host", "--port") | {"prefill": args.prefill, "decode": args.decode}
    settings |= {"dialect": args.dialect, "control": dict(args.control) if args.control else None}
    run_proxy(load(ProxyConfig, args.config, flags=settings), None, _say)


def _check(args: argparse.Namespace) -> int:
    from pdlink.serve.check import check

    return check(load(WorkerConfig, args.config, flags=_settings(args, "--transport")))


def _timeline(args: argparse.Namespace) -> int:
    from pdlink.observe.fetch import fetch_timeline

    key = read_secrets(args.key_file, "--key-file")[0] if args.key_file else None
    _say(fetch_timeline(args.url, args.output, key=key))
    return 0


def _keygen(args: argparse.Namespace) -> None:
    from pdlink.serve.keys import keygen

    path, line = keygen(args.name, args.directory)
    print(f"# {path} is secret; this line is not, it goes into allow-lists:", file=sys.stderr)
    _say(line)
