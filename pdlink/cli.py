"""`pdlink`: the commands people type. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from pdlink import __version__
from pdlink.config import ProxyConfig, UpConfig, WorkerConfig, load, parse_assignments, read_secrets
from pdlink.errors import ConfigError, PdlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdlink.serve.process import Parent

log = logging.getLogger(__name__)

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
    "tune": "how short a run must be for packing it to pay over tcp",
    "tiers": "records on disk beside bare reads and writes of the same size, and a restart",
    "replay": "hit rates of eviction policies on a trace of requests, beside the best there can be",
    "route": "routing policies of the proxy, in a simulated fleet",
    "figures": "all of them: a page of tables, and pictures, into one directory",
}
"""Modules of `pdlink_bench`, each with `add_arguments(parser)` and `run(args)`."""


_LEVELS = ("debug", "info", "warning", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong usage or settings."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser(argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    who = f"{label} " if (label := getattr(args, "label", None)) else ""
    form = f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s"
    logging.basicConfig(level=(args.log_level or "warning").upper(), format=form)
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        status = run(args) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"pdlink: {error}", file=sys.stderr)
        return 2
    except PdlinkError as error:
        print(f"pdlink: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `pdlink check | head -1`: nobody is interested in the rest
        _silence_stdout()
        return 1
    except OSError as error:  # the machine's word about a file, a port or memory that no command has translated
        log.debug("the command failed", exc_info=True)
        _silence_stdout()
        print(f"pdlink: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviations, and says what was probably meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.commands: list[str] = []
        """Words that may stand here, for the one that is wrong."""
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (COMMAND|BENCHMARK): invalid choice: '(.*?)' \(", message)
        if wrong is None:
            super().error(message)
        kind, word = wrong.group(1).lower(), wrong.group(2)
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.5)
        hint = f"did you mean `{self.prog} {near[0]}`?" if near else f"there are {', '.join(self.commands)}"
        self.exit(2, f"pdlink: no {kind} {word!r}; {hint}\n")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """End with what is said about arguments that nobody takes."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hints = []
        for word in words:
            near = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.6)
            hints.append(f"{word} (did you mean {near[0]}?)" if near and word.startswith("-") else word)
        self.error(f"unrecognized arguments: {' '.join(hints)}")


def _parser(argv: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="pdlink",
        description="Moves the KV cache of an LLM from prefill servers to decode servers.",
        epilog="Begin with `pdlink up`: a whole deployment on this machine, no download, no GPU.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"pdlink {__version__}")
    parser.add_argument("--log-level", choices=_LEVELS, help="least important line that is logged (warning)")
    parser.set_defaults(run=lambda _: _no_command(parser))
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int | None], flags: Sequence[str]) -> _Parser:
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=_SETTINGS_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        _add_level(command)
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
        _add_parent(worker)
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
    _add_parent(proxy)
    add("check", "what works on this machine, and why the rest does not", _check, ("--transport",))

    timeline = commands.add_parser(
        "timeline",
        help="the last transfers of a worker as a trace for ui.perfetto.dev",
        description="Fetch the last transfers of a running worker: when each layer was written, pushed and visible. "
        "Open the file at ui.perfetto.dev. A prefill worker knows of every layer, a decode worker only when a "
        "transfer ended.",
    )
    timeline.add_argument("url", help="base URL of a worker, not of the proxy; http:// may be left out")
    timeline.add_argument("--key-file", metavar="FILE", help="the worker's security.http_key_file")
    timeline.add_argument("-o", "--output", default="timeline.json", metavar="FILE")
    timeline.set_defaults(run=_timeline)
    _add_level(timeline)

    keygen = commands.add_parser(
        "keygen",
        help="a key pair for one worker",
        description="Make DIR/NAME.key, for security.key_file of the worker called NAME, and print the line that "
        "goes into security.allow_file of every worker it has to do with. An existing key is never overwritten.",
    )
    keygen.add_argument("name", metavar="NAME", help="the worker's name")
    where = "where to (.); made if it is not there, for this user only"
    keygen.add_argument("-d", "--directory", default=".", metavar="DIR", help=where)
    keygen.set_defaults(run=_keygen)
    _add_level(keygen)

    bench = commands.add_parser("bench", help="measure this machine and this link")
    bench.set_defaults(run=lambda _: _no_command(bench))
    bench.commands = list(_BENCHMARKS)
    benchmarks = bench.add_subparsers(metavar="BENCHMARK")
    for title, help_text in _BENCHMARKS.items():
        benchmark = benchmarks.add_parser(title, help=help_text)
        _add_level(benchmark)
        if "bench" in argv and title in argv:  # its options need the planner; no other command pays for that
            module = importlib.import_module(f"pdlink_bench.{title}")
            module.add_arguments(benchmark)
            benchmark.set_defaults(run=module.run)

    chaos = commands.add_parser("chaos", help="break a deployment on purpose, and judge what its clients see")
    _add_level(chaos)
    if "chaos" in argv:
        from pdlink.chaos import command

        chaos.description, chaos.epilog = command.DESCRIPTION, command.EPILOG
        chaos.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_arguments(chaos)
        chaos.set_defaults(run=command.run, words=list(argv))

    parser.commands = list(commands.choices)
    topic = commands.add_parser("help", description="What a command does, and its options.")
    topic.add_argument("words", nargs="*", metavar="COMMAND")
    topic.set_defaults(run=lambda args: main([*args.words, "--help"]))
    commands.add_parser("version").set_defaults(run=lambda _: _say(f"pdlink {__version__}"))
    return parser


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _add_level(command: argparse.ArgumentParser) -> None:
    """`--log-level` behind the command too; there it is not looked for first, but where people write it."""
    command.add_argument(
        "--log-level",
        choices=_LEVELS,
        default=argparse.SUPPRESS,
        help="least important line that is logged (warning)",
    )


def _add_parent(command: argparse.ArgumentParser) -> None:
    """What `pdlink up` starts its children with."""
    command.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    command.add_argument("--label", help=argparse.SUPPRESS)


def _settings(args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """The flags that were given, by dotted key; `--set` last."""
    given = {_FLAGS[flag][0]: getattr(args, _FLAGS[flag][0], None) for flag in flags}
    return _given(given) | parse_assignments(args.set)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flags.items() if value is not None}


def _address_of(text: str) -> tuple[str, list[str]]:
    url, equals, addresses = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes URL=tcp://HOST:PORT, got {text!r}")
    return url, addresses.split(",")


def _say(text: str) -> None:
    """For commands whose output is their purpose: raises OSError if it cannot be written."""
    print(text, flush=True)


def _mention(text: str) -> None:
    """For processes that go on: a terminal that has gone or a full disk must not end them, nor keep them from their
    drain."""
    try:
        _say(text)
    except OSError as error:
        log.warning("standard output cannot be written: %s; nothing more goes there", error.strerror)
        _silence_stdout()


def _silence_stdout() -> None:
    """What is written from now on, and what is still in the buffer, goes nowhere, so that no flush fails at exit."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: no descriptor under it, or closed
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _up(args: argparse.Namespace) -> None:
    from pdlink.serve import up

    up.log.setLevel((args.log_level or "info").upper())  # a deployment that starts and changes is not silent
    flags = {"proxy.host": args.host, "proxy.port": args.port, "engine": args.engine}
    flags |= {"num_prefill": args.prefill, "num_decode": args.decode}
    model, transport = getattr(args, "model.path"), getattr(args, "transport.kind")
    flags |= {"model": model, "prefill.transport.kind": transport, "decode.transport.kind": transport}
    up.up(load(UpConfig, args.config, flags=_given(flags) | parse_assignments(args.set)), _mention)


def _worker(args: argparse.Namespace) -> int | None:
    from pdlink.serve.roles import run_worker

    if args.parent_fd is not None:
        with _reporting(args.parent_fd) as parent:
            run_worker(WorkerConfig.model_validate(parent.settings()), parent, lambda _: None)
        return parent.status
    config = load(WorkerConfig, args.config, flags=_settings(args, *_FLAGS), defaults={"role": args.role})
    if config.role != args.role:
        raise ConfigError(f"role: the settings say {config.role!r}; use `pdlink {config.role}`, or leave `role` out")
    run_worker(config, None, _mention)
    return None


def _proxy(args: argparse.Namespace) -> int | None:
    from pdlink.serve.roles import run_proxy

    if args.parent_fd is not None:
        with _reporting(args.parent_fd) as parent:
            run_proxy(ProxyConfig.model_validate(parent.settings()), parent, lambda _: None)
        return parent.status
    flags = {"prefill": args.prefill, "decode": args.decode, "dialect": args.dialect}
    flags |= {"control": dict(args.control) if args.control else None}
    settings = _given(flags) | _settings(args, "--host", "--port")
    run_proxy(load(ProxyConfig, args.config, flags=settings), None, _mention)
    return None


@contextlib.contextmanager
def _reporting(fd: int) -> Iterator[Parent]:
    """The life of a child: an error before it is ready is its parent's to tell, so that it is told once."""
    from pdlink.serve.process import Parent

    parent = Parent(fd)
    try:
        yield parent
    except (PdlinkError, OSError) as error:
        if not parent.failed(str(error), 2 if isinstance(error, ConfigError) else 1):
            raise
    finally:
        parent.close()


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

    missing = not os.path.isdir(args.directory)
    path, line = keygen(args.name, args.directory)
    if missing:
        print(f"# {args.directory} is new; only this user can enter it", file=sys.stderr)
    print(f"# {path} is secret; this line is not, it goes into allow-lists:", file=sys.stderr)
    _say(line)
