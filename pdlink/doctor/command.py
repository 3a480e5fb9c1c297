"""`pdlink doctor [URL]`: looks, asks and measures; prints what is wrong, worst first."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdlink.config import UpConfig, WorkerConfig, load, read_key
from pdlink.doctor import deployment, machine
from pdlink.doctor.deployment import speed_of
from pdlink.errors import ConfigError
from pdlink.observe.fetch import CannotFetch, ask, base_url
from pdlink.observe.findings import Finding, of_places, worst_first
from pdlink.observe.plain import add_row, plain
from pdlink.serve import check

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

DESCRIPTION = """\
Look for what is wrong, and say what to do about it. Without URL: this machine, and the settings in --config. With
the URL of a proxy: its workers, too, and one small real transfer between each prefill and each decode worker; of a
store process: its places.
"""
EPILOG = """\
  pdlink doctor --config configs/prefill.yaml    before a start
  pdlink doctor 127.0.0.1:8000                   a running deployment
  pdlink doctor 127.0.0.1:8000 --json            for a script, or for an issue

exit status: 0 nothing found, 1 something is wrong, 2 wrong usage
"""
_MARKS = {"bad": Text("✗", "red"), "warn": Text("!", "yellow")}
_PROBE_TIMEOUT_S = 60.0
_NEWS_S, _LOOK_S = 3.0, 0.2
"""How long to wait for news of the workers, and how often to look."""
_TIMES_AGAIN = 3
"""A pair that looks slow is measured so often before it is told of."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", metavar="URL", help="of a proxy or a store; http:// may be left out")
    parser.add_argument("--config", metavar="FILE", help="settings file to check, of any role")
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="file with the proxy's API key; where it has several, with one of admin_key_file",
    )
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="tokens to transfer between each pair (%(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=64, metavar="N", help="most pairs to measure (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.set_defaults(run=run)


class Examined(NamedTuple):
    """At a deployment."""

    findings: list[Finding]
    pairs: list[dict[str, Any]]
    """That were measured."""
    untried: int
    """Pairs that were not."""
    why_untried: str = ""


def run(args: argparse.Namespace) -> int:
    key = read_key(args.key_file)
    if args.tokens < 1 or args.pairs < 0:
        raise ConfigError(f"--tokens, --pairs: got {args.tokens} and {args.pairs}; at least 1 and 0")
    config = _worker_settings(args.config)
    transports = check.probed(config)
    looked = Examined([], [], 0)
    if args.url:
        looked = _deployment(base_url(args.url), key, args.tokens, args.pairs)
    findings = machine.of_transports(transports, config.transport.kind) + machine.of_machine(transports)
    if args.config:
        findings += machine.of_file(args.config, running=args.url is not None)
    proxy = f"{args.url} --key-file {shlex.quote(args.key_file)}" if args.key_file else args.url
    findings = worst_first(
        msgspec.structs.replace(each, command=each.command.replace("PROXY", str(proxy)))
        for each in findings + looked.findings
    )
    if args.json:
        said: dict[str, Any] = {"findings": list(map(msgspec.structs.asdict, findings)), "pairs": looked.pairs}
        said |= {"pairs_not_tried": looked.untried, "machine": check.machine(), "transports": _usable(transports)}
        print(json.dumps(said, indent=2))
    else:
        _print(findings, looked, transports)
        if findings and args.url:
            commands = [each.command for each in findings if each.command]
            print(f"next: {commands[0] if commands else f'pdlink top {proxy}'}")
        elif not args.url:
            print("a running deployment: `pdlink doctor URL`, with its proxy's")
    return 1 if findings else 0


def _worker_settings(path: str | None) -> WorkerConfig:
    """What says which transports count. A file that is wrong is a finding of its own."""
    try:
        found = machine.read_settings(path) if path else load(WorkerConfig)
    except ConfigError:
        return WorkerConfig()
    if isinstance(found, UpConfig):
        return found.prefill
    return found if isinstance(found, WorkerConfig) else WorkerConfig()


def _usable(transports: check.Transports) -> dict[str, dict[str, Any]]:
    return {
        one.name: {"usable": probe.ok, "reason": probe.reason, "facts": probe.facts}
        for one, probe in transports.probes.items()
    }


def _deployment(url: str, key: str | None, num_tokens: int, max_pairs: int) -> Examined:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        health = _fetched(url, "/health", headers)
    except CannotFetch as error:
        text, _, remedy = str(error).partition("; ")
        return Examined([Finding("bad", "proxy", text, remedy or "start the proxy, or correct the URL")], [], 0)
    if health.get("role") == "store":
        return Examined(of_places(health["name"], health.get("problems", {}), url), [], 0)
    well = {
        side: [worker for worker in health[side] if worker["state"] == "ok" and worker["health"]]
        for side in ("prefill", "decode")
    }
    wanted = [(prefill, decode) for prefill in well["prefill"] for decode in well["decode"]]
    probes: list[dict[str, Any]] = []
    why = "raise --pairs"
    for prefill, decode in wanted[:max_pairs]:
        asked = {"prefill": prefill["label"], "decode": decode["label"], "num_tokens": num_tokens}
        try:
            probes.append(_fetched(url, "/pdlink/probe", headers, asked))
        except CannotFetch as error:
            why = f"{error}; send a request, and look at X-Pdlink-KV"
            break
    for _ in range(_TIMES_AGAIN):
        for index in deployment.slow_pairs(probes):
            asked = {"prefill": probes[index]["prefill"], "decode": probes[index]["decode"], "num_tokens": num_tokens}
            with contextlib.suppress(CannotFetch):
                again = _fetched(url, "/pdlink/probe", headers, asked)
                probes[index] = dict(deployment.faster(probes[index], again))
    for probe in probes:
        probe["gb_per_s"] = speed_of(probe)
    if probes:
        health = _news(url, headers, health)
    measured = deployment.of_pairs(probes)
    told = {each.about for each in measured}
    known = msgspec.convert(health.get("findings", []), list[Finding])
    findings = [each for each in known if each.about not in told] + measured  # a probe says more of a misfit
    return Examined(findings, probes, len(wanted) - len(probes), why)


def _news(url: str, headers: Mapping[str, str], health: dict[str, Any]) -> dict[str, Any]:
    """The proxy's health once it has heard its healthy workers again: the probes made them ask all their tiers."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _NEWS_S:
        time.sleep(_LOOK_S)
        with contextlib.suppress(CannotFetch):
            health = _fetched(url, "/health", headers)
        since_s = time.monotonic() - began_s
        workers = (worker for side in ("prefill", "decode") for worker in health[side] if worker["state"] == "ok")
        if all(worker["heard_s_ago"] < since_s for worker in workers):
            break
    return health


def _fetched(url: str, path: str, headers: Mapping[str, str], body: dict[str, Any] | None = None) -> dict[str, Any]:
    """An answer in JSON. Raises CannotFetch with what to do."""
    data = None if body is None else json.dumps(body).encode()
    status, text = ask(url, path, headers, data, timeout_s=_PROBE_TIMEOUT_S)
    try:
        answer = json.loads(text)
    except ValueError:
        raise CannotFetch(f"{url} answered {status} with something else; is it a pdlink proxy?") from None
    if not isinstance(answer, dict):
        raise CannotFetch(f"{url} answered {status} with something else; is it a pdlink proxy?")
    if path == "/health" and status in (200, 503):  # 503: it lacks workers, which is to be told
        if isinstance(answer.get("prefill"), list) or answer.get("role") == "store":
            return answer
        if set(answer) != {"status"}:
            raise CannotFetch(f"{url} is no pdlink proxy; give the URL of the proxy or of a store, not of a worker")
        status = 401
    if status == 401:
        raise CannotFetch(f"{url} asks for a key; give --key-file FILE with one of its api_keys")
    if status != 200:
        error = answer.get("error")
        raise CannotFetch(f"{path} answered {status}: {error.get('message') if isinstance(error, dict) else text!r}")
    return answer


def _print(findings: list[Finding], looked: Examined, transports: check.Transports) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    kinds = Counter(each.kind for each in findings)
    for each in findings:
        console.print(Text.assemble(_MARKS[each.level], " ", plain(f"{each.about}: {each.text}", "bold")))
        console.print(plain(f"    → {each.remedy}"))
        if each.others >= kinds[each.kind]:
            console.print(plain(f"    and {each.others + 1 - kinds[each.kind]} more that are not listed"))
    if not findings:
        console.print(Text.assemble(("✓", "green"), " nothing wrong was found"))
    if looked.pairs:
        console.print()
        console.print(_pairs_table(looked.pairs))
    if looked.untried:
        console.print(plain(f"{looked.untried} pairs were not measured: {looked.why_untried}"))
    console.print()
    usable = ", ".join(one.name for one, probe in transports.probes.items() if probe.ok) or "none"
    console.print(plain(f"this machine: transports {usable} (details: `pdlink check`)"))


def _pairs_table(pairs: list[dict[str, Any]]) -> Table:
    table = Table(title="pairs, by one small transfer each", title_justify="left")
    for name in ("prefill", "decode", "KV", "lane", "MB", "GB/s", "exposed ms", "request ms"):
        table.add_column(name, justify="left" if name in ("prefill", "decode", "KV", "lane") else "right")
    for each in pairs:
        moved = each["nbytes"] > 0
        add_row(
            table,
            each["prefill"],
            each["decode"],
            each["error"] or each["kv"],
            each["lane"] or "–",
            f"{each['nbytes'] / 1e6:.1f}" if moved else "–",
            f"{each['gb_per_s']:.2f}" if each["gb_per_s"] else "–",
            f"{each['exposed_s'] * 1e3:.1f}" if moved else "–",
            f"{each['took_s'] * 1e3:.0f}",
            style="red" if each["error"] or not each["kv"].startswith(("transferred", "cached")) else "",
        )
    return table
