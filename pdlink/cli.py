"""`pdlink`: the commands people type. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from typing import TYPE_CHECKING, Any, get_args

from pdlink import __version__, logs
from pdlink.commands import engine, runs
from pdlink.commands.parser import Parser, add_log, add_log_behind, fill, no_command
from pdlink.commands.words import DESCRIPTIONS, FLAGS, LABORATORY, settings_help
from pdlink.config.proxy import DialectName
from pdlink.config.up import ENGINES
from pdlink.errors import ConfigError, PdlinkError
from pdlink.extras import needed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong usage or settings."""
    argv, flags = engine.split(sys.argv[1:] if argv is None else argv)
    parser = _parser(argv)
    args, unknown = parser.parse_known_args(argv, argparse.Namespace(flags=flags))
    if unknown and not args.lacking:
        args.parser.refuse(unknown)
    logs.set_up(args.log_level, args.log_format, getattr(args, "label", None) or "")
    run: Callable[[argparse.Namespace], int | None] = args.run
    try:
        with needed():
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
        runs.silence_stdout()
        return 1
    except OSError as error:  # the machine's word about a file, a port or memory that no command has translated
        log.debug("the command failed", exc_info=True)
        runs.silence_stdout()
        print(f"pdlink: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def whole_parser() -> Parser:
    """With the options of all commands; others pay only for those of the command that was typed."""
    return _parser([], whole=True)


def _parser(argv: Sequence[str], *, whole: bool = False) -> Parser:
    parser = Parser(
        prog="pdlink",
        description="Moves the KV cache of an LLM from prefill servers to decode servers.",
        epilog="""\
begin:        pdlink up               a whole deployment on this machine, no download, no GPU
look:         pdlink top              what it does; the same as a page at the proxy's /pdlink/
ask:          pdlink doctor [URL]     what is wrong, and what to do; then pdlink explain ID, of one request
one command:  pdlink COMMAND --help

exit status: 0 done, 1 failed, 2 wrong usage or settings, 130 stopped by Ctrl-C
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"pdlink {__version__}")
    add_log(parser, default=None)
    parser.set_defaults(run=lambda _: no_command(parser), lacking="")
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int | None], flags: Sequence[str]) -> Parser:
        command = commands.add_parser(
            name,
            help=text,
            description=DESCRIPTIONS[name],
            epilog=settings_help(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        add_log_behind(command)
        if flags:
            command.add_argument("--config", metavar="FILE", help="YAML file of settings; docs/settings.md has all")
            command.add_argument(
                "--set", action="append", default=[], metavar="KEY=VALUE", help="any setting; repeatable"
            )
        for flag in flags:
            command.add_argument(flag, dest=FLAGS[flag][0], metavar="VALUE", help=FLAGS[flag][1])
        return command

    up = add("up", "prefill, decode and proxy on this machine", runs.up, ("--listen", "--model", "--transport"))
    _add_numbers(up)
    up.add_argument(
        "--store",
        action="store_const",
        const=True,
        help="one store process that all workers share, instead of one in each",
    )
    up.add_argument("--engine", choices=["builtin", *ENGINES], help="what the workers run (builtin)")
    for role in ("prefill", "decode", "both"):
        text = {
            "prefill": "a worker that computes prompts and sends their KV",
            "decode": "a worker that receives KV and decodes",
        }
        worker = add(role, text.get(role, "a worker that takes either leg of a request"), runs.worker, tuple(FLAGS))
        worker.set_defaults(role=role)
        _add_parent(worker)
    proxy = add("proxy", "the router in front of the workers", runs.proxy, ("--listen",))
    proxy.add_argument("--prefill", action="append", metavar="URL", help="base URL of a prefill worker; repeatable")
    proxy.add_argument("--decode", action="append", metavar="URL", help="base URL of a decode worker; repeatable")
    proxy.add_argument("--processes", type=int, metavar="N", help="number of processes that share the port (1)")
    proxy.add_argument("--dialect", choices=get_args(DialectName), help="what the workers run (pdlink)")
    proxy.add_argument(
        "--control",
        action="append",
        type=_address_of,
        metavar="URL=TCP",
        help="dialect vllm: control address tcp://HOST:PORT of the prefill server URL; of several ranks, one each, "
        "separated by commas; repeatable",
    )
    proxy.add_argument(
        "--token", metavar="FILE", help="file with the secret of the deployment, as the workers' --token"
    )
    _add_parent(proxy)
    for name, (title, _) in engine.ENGINES.items():
        server = commands.add_parser(
            name,
            help=f"one {title} server with pdlink in it, for a deployment on several hosts",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_log_behind(server)
        engine.add_arguments(server, name)
    store = add("store", "keeps KV for all workers of this host, and outlives them", runs.store, ("--listen",))
    store.add_argument(
        "--socket",
        metavar="PATH",
        help="Unix socket that workers connect to; in a directory that no other user may enter",
    )
    store.add_argument("--memory", type=float, metavar="GIB", help="memory for KV (1)")
    store.add_argument(
        "--disk", metavar="DIR", help="directory for KV that memory has no room for; needs --disk-size"
    )
    store.add_argument("--disk-size", type=float, metavar="GIB", help="disk space to use")
    _add_parent(store)
    add("check", "what works on this machine, and why the rest does not", runs.check, ("--transport",))

    timeline = commands.add_parser(
        "timeline",
        help="the last requests and transfers as a trace for ui.perfetto.dev",
        description="Fetch what a proxy and all its workers did lately, or what one worker did, and write it as a "
        "trace: each\nrequest, and of each transfer when a layer was written, waited, moved and arrived. Open the "
        "file in\nui.perfetto.dev. docs/monitoring.md#timeline says how to read it.",
        epilog="  pdlink timeline 127.0.0.1:8000                     the last transfers of the whole deployment\n"
        "  pdlink timeline 127.0.0.1:8000 --request req-6a7a    one request, on all its workers\n"
        "  pdlink timeline 127.0.0.1:8100 -o prefill.pftrace   one worker alone\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    timeline.add_argument("url", metavar="URL", help="of a proxy, or of one worker; http:// may be left out")
    timeline.add_argument(
        "--request", metavar="ID", help="only this request: X-Request-Id or X-Pdlink-Transfer of its answer"
    )
    timeline.add_argument(
        "--key-file",
        metavar="FILE",
        help="file with the proxy's API key (where it has several: one of admin_key_file), or the worker's "
        "security.http_key_file",
    )
    timeline.add_argument(
        "-o", "--output", default="timeline.pftrace", metavar="FILE", help="file to write (%(default)s)"
    )
    timeline.set_defaults(run=runs.timeline)
    add_log_behind(timeline)

    explain = commands.add_parser(
        "explain",
        help="what the proxy did with a request, and why",
        description="Show each decision about one request: workers, their load, waits, failures, the end. The id is "
        "X-Request-Id of the answer; error messages have it, too.",
    )
    explain.add_argument("request", metavar="ID", help="X-Request-Id of the answer")
    explain.add_argument(
        "--proxy", default="127.0.0.1:8000", metavar="URL", help="base URL of the proxy (%(default)s)"
    )
    explain.add_argument("--key-file", metavar="FILE", help="file with one of the proxy's api_keys")
    explain.add_argument("--json", action="store_true", help="print what the proxy answers")
    explain.set_defaults(run=runs.explain)
    add_log_behind(explain)

    top = commands.add_parser("top", help="the workers, transfers and requests behind a proxy, live")
    add_log_behind(top)
    if whole or ("top" in argv and "cache" not in argv):
        from pdlink.observe import top as top_command

        fill(top, top_command)

    doctor = commands.add_parser("doctor", help="what is wrong with this machine or deployment, and what to do")
    add_log_behind(doctor)
    if whole or "doctor" in argv:
        from pdlink.doctor import command as doctor_command

        fill(doctor, doctor_command)

    plan = commands.add_parser("plan", help="how many prefill and decode workers your traffic needs")
    add_log_behind(plan)
    if whole or "plan" in argv:
        from pdlink.commands import plan as plan_command

        fill(plan, plan_command)
        plan.set_defaults(run=plan_command.run)

    keygen = commands.add_parser(
        "keygen",
        help="a key pair for one worker",
        description="Make DIR/NAME.key, for security.key_file of the worker called NAME, and print the line that "
        "goes into security.allow_file of every worker that it exchanges KV with. A key that exists is kept.",
    )
    keygen.add_argument("name", metavar="NAME", help="the worker's name")
    where = "directory of the key (.); if it is missing it is made, for this user only"
    keygen.add_argument("-d", "--directory", default=".", metavar="DIR", help=where)
    keygen.set_defaults(run=runs.keygen)
    add_log_behind(keygen)

    for title, about in LABORATORY.items():
        command = commands.add_parser(title, help=about)
        add_log_behind(command)
        if whole or title in argv:
            _fill_laboratory(command, title, argv, whole=whole)

    cache = commands.add_parser("cache", help="see and change what a running worker or store keeps of prompts")
    add_log_behind(cache)
    if whole or "cache" in argv:
        from pdlink.observe import cache_command

        cache.description, cache.epilog = cache_command.DESCRIPTION, cache_command.EPILOG
        cache.formatter_class = argparse.RawDescriptionHelpFormatter
        cache.commands = cache_command.add_arguments(cache)

    config = commands.add_parser("config", help="translate another system's settings into settings of pdlink")
    config.set_defaults(run=lambda _: no_command(config))
    add_log_behind(config)
    config.commands = ["from"]
    source = config.add_subparsers(metavar="ACTION").add_parser(
        "from",
        help="print settings of pdlink for LMCache's, vLLM's or SGLang's",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole or "config" in argv:
        from pdlink.commands import moving

        source.description = moving.DESCRIPTION
        moving.add_arguments(source)

    completion = commands.add_parser(
        "completion",
        help="a script with which a shell completes commands and options",
        description="Print a script for a shell, which then completes pdlink's commands, options and files.",
        epilog="  bash:  source <(pdlink completion bash)          in ~/.bashrc\n"
        '  zsh:   pdlink completion zsh > "${fpath[1]}/_pdlink"\n'
        "  fish:  pdlink completion fish > ~/.config/fish/completions/pdlink.fish\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    completion.set_defaults(run=_completion)
    add_log_behind(completion)

    parser.commands, parser.typed, known = list(commands.choices), argv, dict(commands.choices)
    parser.below = lambda: known if whole else whole_parser().below()
    topic = commands.add_parser("help", description="What a command does, and its options.")
    topic.add_argument("words", nargs="*", metavar="COMMAND")
    topic.set_defaults(run=lambda args: main([*args.words, "--help"]))
    version = commands.add_parser("version", description="Print the version.")
    version.set_defaults(run=lambda _: runs.say(f"pdlink {__version__}"))
    return parser


def _fill_laboratory(command: Parser, name: str, argv: Sequence[str], *, whole: bool) -> None:
    """With what the distribution says that brings the command, or with what to do where it is not installed."""
    for entry in importlib.metadata.entry_points(group="pdlink.commands", name=name):
        entry.load()(command, argv, whole=whole)
        return
    lacking = f"{name}: not installed; in a clone of pdlink, pip install ./benchmarks brings it"
    command.description = lacking
    command.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    command.set_defaults(run=_lacks, lacking=lacking)


def _lacks(args: argparse.Namespace) -> int:
    raise ConfigError(args.lacking)


def _add_numbers(command: argparse.ArgumentParser) -> None:
    for side in ("prefill", "decode"):
        command.add_argument(f"--{side}", type=int, metavar="N", help=f"number of {side} workers (1)")


def _add_parent(command: argparse.ArgumentParser) -> None:
    """What `pdlink up` starts its children with."""
    command.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    command.add_argument("--label", help=argparse.SUPPRESS)


def _address_of(text: str) -> tuple[str, list[str]]:
    url, equals, addresses = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"takes URL=tcp://HOST:PORT, got {text!r}")
    return url, addresses.split(",")


def _completion(args: argparse.Namespace) -> None:
    import shtab

    parser = whole_parser()
    _complete_paths(parser, {"FILE": shtab.FILE, "DIR": shtab.DIR})
    runs.say(shtab.complete(parser, args.shell))


def _complete_paths(parser: argparse.ArgumentParser, by_metavar: Mapping[str, Any]) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, by_metavar)
        elif action.metavar in by_metavar:
            action.complete = by_metavar[str(action.metavar)]  # type: ignore[attr-defined]
