"""`pdlink cache`: what a running worker or store keeps, seen and changed from a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from pdlink.api.keys import KEY_HEADER
from pdlink.config import read_key
from pdlink.content import digest_of
from pdlink.errors import ConfigError
from pdlink.observe.fetch import CannotFetch, ask, base_url
from pdlink.observe.plain import add_row, plain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType

DESCRIPTION = "See and change what a running worker or store process keeps of prompts."
EPILOG = """\
examples (URL is of what keeps the KV, not of the proxy; http:// may be left out):
  pdlink cache stats 127.0.0.1:8100
  pdlink cache lookup 127.0.0.1:8100 --prompt "You are a helpful assistant. ..."
  pdlink cache pin 127.0.0.1:8100 --file system-prompt.txt --name system
  pdlink cache move 127.0.0.1:8100 --tokens 1,15,88,4 --from memory --to disk
  pdlink cache clear 127.0.0.1:8100 --everything --place disk
  pdlink cache stats 127.0.0.1:8200,127.0.0.1:8201      two ranks of an engine

Only a worker of pdlink takes text; a store process takes --tokens, and --model where it keeps KV of several models.

exit status: 0 done, 1 it was not done, 2 wrong usage
"""
_TIMEOUT_S = 60.0
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> list[str]:
    """The actions."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, text: str, run: Callable[[Namespace], None], *, of_prompt: bool = False) -> Any:
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        several = "" if name == "top" else "; of several, with commas between: all at once"
        action.add_argument("url", metavar="URL", help=f"base URL of the worker or store{several}")
        action.add_argument(
            "--key-file", metavar="FILE", help="its security.http_key_file, or http_key_file of a store"
        )
        action.add_argument("--json", action="store_true", help="print what it answers")
        if of_prompt:
            _add_prompt(action, required=name not in ("clear", "verify"))
        action.set_defaults(run=partial(_at_each, run), action=name, heading=False)
        return action

    add("stats", "what lies where, who keeps it, and which tiers answer", _stats)
    add("lookup", "how much of a prompt is kept, and where", _lookup, of_prompt=True)
    add("warm", "bring what is kept of a prompt into memory", _count, of_prompt=True)
    pin = add(
        "pin", "bring what is kept of a prompt into memory, and keep it there until `unpin`", _count, of_prompt=True
    )
    pin.add_argument("--name", required=True, help="name of the pin; several prompts may share one")
    unpin = add("unpin", "take back all pins of a name", _count)
    unpin.add_argument("--name", required=True, help="name of the pins")
    move = add("move", "move what one place keeps of a prompt to another place", _count, of_prompt=True)
    move.add_argument(
        "--from", dest="source", required=True, metavar="PLACE", help="memory, disk, ...; `stats` shows the places"
    )
    move.add_argument("--to", dest="destination", required=True, metavar="PLACE", help="memory, disk, ...")
    move.add_argument("--keep", action="store_true", help="copy it instead")
    clear = add("clear", "forget a prompt, or everything", _count, of_prompt=True)
    clear.add_argument("--everything", action="store_true", help="forget all prompts")
    clear.add_argument("--place", action="append", metavar="PLACE", help="only in this place; repeatable")
    freeze = add("freeze", "keep nothing new, and evict nothing, until --off", _freeze)
    freeze.add_argument("--off", action="store_true", help="keep and evict again")
    quota = add("quota", "memory for the KV of one cache_salt, or of each", _quota)
    quota.add_argument("--salt", default="", metavar="SALT", help="whose; else of each that has none of its own")
    quota.add_argument("--gib", type=float, metavar="GIB", help="without it, no quota of its own any more")
    compress = add("compress", "pack what a tier keeps of a prompt", _count, of_prompt=True)
    compress.add_argument("--place", required=True, metavar="PLACE", help="the tier")
    compress.add_argument("--codec", default="zstd", choices=["zstd", "raw"], help="raw unpacks (zstd)")
    add_tier = add("add-tier", "keep what comes from now on in a further tier, too", _count)
    add_tier.add_argument("--tier", required=True, metavar="URL", help="as tiers.remote_url")
    add_tier.add_argument("--codec", default="raw", choices=["zstd", "raw"], help="how it packs records (raw)")
    remove_tier = add("remove-tier", "write to a tier what it is to have, and use it no more", _count)
    remove_tier.add_argument("--place", required=True, metavar="PLACE", help="the tier")
    verify = add("verify", "compare records with their checksums, and drop wrong ones", _verify, of_prompt=True)
    verify.add_argument("--everything", action="store_true", help="instead of a prompt: all that is in memory")
    top = add("top", "stats and rates, live, until Ctrl-C", _top)
    top.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (2)")
    top.add_argument("--count", type=int, default=0, metavar="N", help="number of looks; 0: until Ctrl-C (0)")
    return list(actions.choices)


def _add_prompt(action: argparse.ArgumentParser, *, required: bool) -> None:
    prompt = action.add_mutually_exclusive_group(required=required)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt as text")
    prompt.add_argument("--tokens", metavar="IDS", help="as token ids with commas between")
    prompt.add_argument("--file", metavar="FILE", help="as text in a file; - is standard input")
    prompt.add_argument("--messages", metavar="FILE", help="as the JSON list of chat messages in a file")
    action.add_argument("--salt", default="", metavar="SALT", help="the cache_salt it was sent with")
    action.add_argument("--lora", default="", metavar="NAME", help="the adapter that it was sent to")
    action.add_argument("--adapter", metavar="DIR", help="its files: vLLM's keys depend on their content")
    action.add_argument("--model", default="", metavar="NAME", help="whose KV, where several models' is kept")
    action.add_argument("--scope", default="", metavar="ID", help="which, where `stats` lists several of one model")


def _at_each(run: Callable[[Namespace], None], args: Namespace) -> None:
    """`run` for all URLs at once. Raises when all have answered: the error of one URL, or a summary of several."""
    args.named = _named(args) if hasattr(args, "prompt") else {}  # once: standard input can be read once
    urls = args.url.split(",")
    if len(urls) == 1:
        run(args)
        return
    if args.action == "top":
        raise ConfigError(f"URL: got {len(urls)}; expected 1 for `top`; choose one")
    with ThreadPoolExecutor(len(urls)) as pool:
        asked = [pool.submit(run, Namespace(**{**vars(args), "url": url, "heading": True})) for url in urls]
    failed = [error for each in asked if (error := each.exception()) is not None]
    for error in failed:
        if not isinstance(error, CannotFetch):
            raise error
    if failed:
        raise CannotFetch("; ".join(map(str, failed)))


def _stats(args: Namespace) -> None:
    state = _ask(args, "GET", "/pdlink/cache")
    _show(args, state, Group(*_tables(state)))


def _lookup(args: Namespace) -> None:
    answer = _ask(args, "POST", "/pdlink/cache/lookup", args.named)
    summary = plain(f"{answer['tokens']} of {answer['prompt_tokens']} tokens are kept")
    table = Table()
    table.add_column("tokens", justify="right")
    table.add_column("place")
    begin = 0
    for run in answer["runs"]:
        add_row(table, f"{begin} to {begin + run['tokens'] - 1}", run["place"])
        begin += run["tokens"]
    _show(args, answer, Group(summary, table) if answer["runs"] else summary)


def _count(args: Namespace) -> None:
    """A verb that answers how much it did."""
    body: dict[str, Any] = {**args.named}
    if args.action in ("pin", "unpin"):
        body["name"] = args.name
    elif args.action == "move":
        body |= {"source": args.source, "destination": args.destination, "keep": args.keep}
    elif args.action == "clear":
        body |= {"everything": args.everything, "places": args.place}
    elif args.action == "add-tier":
        body = {"url": args.tier, "codec": args.codec}
    elif args.action == "remove-tier":
        body = {"place": args.place}
    elif args.action == "compress":
        body |= {"place": args.place, "codec": args.codec}
    answer = _ask(args, "POST", f"/pdlink/cache/{args.action.replace('-', '_')}", body)
    what, value = next(iter(answer.items()))
    done = {
        "warm": "are in memory",
        "pin": f"are pinned as {getattr(args, 'name', '')}",
        "unpin": "are not pinned any more",
        "move": f"are in {getattr(args, 'destination', '')}",
        "compress": f"are {getattr(args, 'codec', '')} in {getattr(args, 'place', '')}",
        "clear": "were in memory and are forgotten; tiers forget in the background",
    }
    said = f"{value} {what} {done[args.action]}" if args.action in done else f"{what}: {value}"
    if args.action == "pin" and not answer.get("durable", True):  # a store of before says nothing
        said += ", until the process ends"
    _show(args, answer, plain(said))
    if not answer.get("drained", True):
        raise CannotFetch(f"{args.url}: {args.place} is removed, and has not got all that it was to have")
    if args.action == "clear" and not answer.get("durable", True):
        raise CannotFetch(
            f"{args.url} could not note the clear, or has lost its store: what tiers have not forgotten yet is found "
            "again after a restart; make its tiers.state_dir writable, and clear again"
        )


def _freeze(args: Namespace) -> None:
    answer = _ask(args, "POST", "/pdlink/cache/freeze", {"on": not args.off})
    _show(args, answer, plain("frozen" if answer["frozen"] else "not frozen any more"))


def _quota(args: Namespace) -> None:
    answer = _ask(args, "POST", "/pdlink/cache/quota", {"cache_salt": args.salt, "gib": args.gib})
    quota = f"{_mib(answer['quota_nbytes'])} MiB" if answer["quota_nbytes"] else "none"
    used = f", of which {_mib(answer['used_nbytes'])} are used" if args.salt else ""
    ends = "" if answer["durable"] else ", until the process ends"
    _show(args, answer, plain(f"quota: {quota}{used}{ends}"))


def _verify(args: Namespace) -> None:
    """Ends with 1 where records were wrong."""
    answer = _ask(args, "POST", "/pdlink/cache/verify", {**args.named, "everything": args.everything})
    table = Table()
    for column in ("place", "right", "wrong", "unknown"):
        table.add_column(column, justify="left" if column == "place" else "right")
    for place, counts in answer.items():
        add_row(table, place, *(str(counts[name]) for name in ("right", "wrong", "unknown")))
    _show(args, answer, table)
    if wrong := sum(counts["wrong"] for counts in answer.values()):
        raise CannotFetch(f"{args.url} held {wrong} wrong records and has dropped them; look at its memory and disks")


def _top(args: Namespace) -> None:
    if args.interval <= 0:
        raise ConfigError(f"--interval: got {args.interval:g}; expected more than 0; give seconds")
    before: Counter[str] = Counter()
    before_s = looks = 0
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        while not args.count or looks < args.count:
            if looks:
                time.sleep(args.interval)
            state, now, now_s = _ask(args, "GET", "/pdlink/cache"), _counts(args), time.monotonic()
            rates = {name: (now[name] - before[name]) / (now_s - before_s) for name in now} if looks else {}
            live.update(Group(*_tables(state), _rates(rates)), refresh=True)
            before, before_s, looks = now, now_s, looks + 1  # type: ignore[assignment]


def _tables(state: Mapping[str, Any]) -> list[RenderableType]:
    places = Table(title="places", title_justify="left")
    for column in ("place", "MiB", "of", "records", "answers", "problem"):
        places.add_column(column, justify="left" if column in ("place", "answers", "problem") else "right")
    for place in state["places"]:
        capacity = _mib(place["capacity_nbytes"]) if place["capacity_nbytes"] else "?"
        records = "" if place["records"] is None else str(place["records"])
        answers = "yes" if place["answers"] else "NO"
        add_row(places, place["name"], _mib(place["nbytes"]), capacity, records, answers, place.get("problem", ""))
    kept = Table(title="kept in memory", title_justify="left")
    for column in ("as", "by", "for", "records", "MiB", "age s", "ends in s"):
        kept.add_column(column, justify="left" if column in ("as", "by", "for") else "right")
    for kind in ("pins", "leases"):
        for one in state[kind]:
            times = ["" if one[name] is None else f"{one[name]:.1f}" for name in ("age_s", "ends_in_s")]
            add_row(kept, kind[:-1], one["holder"], one["request"], str(one["records"]), _mib(one["nbytes"]), *times)
    sessions = Table(title="kept by sessions", title_justify="left")
    for column in ("session", "records", "of", "MiB", "waits", "ends in s"):
        sessions.add_column(column, justify="left" if column == "session" else "right")
    for one in state["sessions"]:
        told = str(one["records"]), str(one["asked"]), _mib(one["nbytes"]), "yes" if one["waits"] else ""
        add_row(sessions, one["name"], *told, f"{one['ends_in_s']:.0f}")
    scopes = Table(title="whose prompts", title_justify="left")
    for column in ("scope", "model", "tokens a chunk", "MiB a chunk", "revision"):
        scopes.add_column(column, justify="right" if "chunk" in column else "left")
    for one in state["scopes"]:
        size = str(one["chunk_tokens"]), _mib(sum(one["record_nbytes"]))
        add_row(scopes, one["scope"], one["model"], *size, one["revision"])
    line = plain(
        f"pinned {_mib(state['pinned_nbytes'])} of {_mib(state['pin_quota_nbytes'])} MiB; "
        f"kept by sessions {_mib(state['sessions_nbytes'])} MiB; "
        f"{state['writing']} records are being written{'; frozen' if state['frozen'] else ''}"
    )
    return [places, line, *(table for table in (scopes, kept, sessions) if table.row_count)]


def _rates(rates: Mapping[str, float]) -> RenderableType:
    table = Table(title="each second", title_justify="left")
    table.add_column("what")
    table.add_column("", justify="right")
    for name, rate in sorted(rates.items()):
        if rate:
            add_row(table, name, f"{rate / _MIB:.1f} MiB" if "bytes" in name else f"{rate:.1f}")
    return table if table.row_count else "nothing has changed since the last look"


def _counts(args: Namespace) -> Counter[str]:
    """Counters of the store and its tiers, by name and labels."""
    text = _fetch(args, "/metrics").decode()
    samples = re.findall(r"^pdlink_((?:store|tier)_\w+)_total(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    found: Counter[str] = Counter()
    for name, labels, value in samples:
        words = " ".join(re.findall(r'="([^"]*)"', labels))
        found[f"{name.replace('_', ' ')}: {words}"] = int(float(value))
    return found


def _named(args: Namespace) -> dict[str, Any]:
    """The prompt as the flags name it."""
    lora = args.lora if args.adapter is None else f"{args.lora} {digest_of(args.adapter)}"
    body: dict[str, Any] = {"cache_salt": args.salt, "lora": lora, "model": args.model, "scope": args.scope}
    if args.prompt is not None:
        body["prompt"] = args.prompt
    elif args.tokens is not None:
        try:
            body["prompt"] = [int(token) for token in args.tokens.split(",")]
        except ValueError:
            raise ConfigError(f"--tokens: got {args.tokens[:100]!r}; expected numbers with commas between") from None
    elif args.file is not None:
        body["prompt"] = _text("--file", args.file)
    elif args.messages is not None:
        try:
            body["messages"] = json.loads(_text("--messages", args.messages))
        except ValueError as error:
            raise ConfigError(f"--messages: {args.messages} is not JSON: {error}") from None
    return body


def _text(flag: str, path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: {path} is not text") from None


def _show(args: Namespace, answer: object, table: RenderableType) -> None:
    if args.json:
        text = json.dumps({args.url: answer} if args.heading else answer, indent=2)
        sys.stdout.write(f"{text}\n")  # in one piece: other URLs write theirs meanwhile
    else:
        told = Group(plain(args.url), table) if args.heading else table
        Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(told)


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}"


# --- HTTP


def _ask(args: Namespace, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    text = _fetch(args, path, None if method == "GET" else json.dumps(body).encode())
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CannotFetch(f"{args.url} answered with something else; is it a worker or store of pdlink?")
    return answer


def _fetch(args: Namespace, path: str, body: bytes | None = None) -> bytes:
    """Raises CannotFetch, or ConfigError where the worker takes the question for wrong."""
    url = base_url(args.url)
    key = read_key(args.key_file) or ""
    status, text = ask(url, path, {KEY_HEADER: key}, body, timeout_s=_TIMEOUT_S)
    if not 200 <= status < 300:
        raise _refusal(url, status, text, with_key=bool(key))
    return text


def _refusal(url: str, status: int, text: bytes, *, with_key: bool) -> CannotFetch | ConfigError:
    if status == 401:
        other = "it has another key; --key-file must be" if with_key else "it asks for its key; give --key-file FILE,"
        return CannotFetch(f"{url}: {other} its security.http_key_file, of a store http_key_file")
    if status == 404:
        if workers := _workers_of(url):
            return CannotFetch(f"{url} is a proxy, which keeps no KV; give one of its workers: {', '.join(workers)}")
        return CannotFetch(f"{url} keeps no KV: tiers.max_local_cpu_size is 0 there, or it is no pdlink worker")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"answered {status}"
    return (ConfigError if status < 500 else CannotFetch)(f"{url}: {message}")


def _workers_of(url: str) -> list[str]:
    """URLs of a proxy's workers; empty of a worker, and of a proxy that shows them to operators alone."""
    try:
        health = json.loads(ask(url, "/health", {})[1])
        return sorted({worker["url"] for side in ("prefill", "decode") for worker in health[side]})
    except (ValueError, KeyError, TypeError, CannotFetch):
        return []
