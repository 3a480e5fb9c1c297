"""A newcomer: types what README says in a Debian that has nothing, and says how long each step took.

    sudo python3 tools/newcomer.py [--tests [ARGUMENTS]] [--pictures FOLDER] [--keep]

The Debian is made by debootstrap for this run. It has a user without rights, what README says to install before, the
configuration of this host's apt and pip (mirrors, certificates), and no cache. The checkout is cloned as it is
committed. README's lines for two servers are typed in two network namespaces with a cable between them: those of vLLM
with `--print`, because it is not installed, and the same with pdlink's own workers, which answer a request.

A step that fails ends the run with status 1, and so do a package of the system and a file outside of the home
directory that were changed. The table comes last. Needs root, `ip` (iproute2), port 8000, and 4 GB in --folder; 7 GB
with --tests or --pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKOUT = Path(__file__).resolve().parents[1]
USER, HOME = "newcomer", "home/newcomer"
READY_S = 90.0
"""What `make up` may take to an answer, on two idle cores."""
MODEL = "Qwen/Qwen3-0.6B"
"""In README's lines for vLLM."""
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
APT = ("sources.list", "sources.list.d", "apt.conf.d", "auth.conf.d", "keyrings", "trusted.gpg.d")


class Failed(Exception):
    """A step failed; the message is for people."""


class Row(NamedTuple):
    """Of the table."""

    step: str
    took_s: float
    result: str
    bar_s: float | None = None


@dataclass
class Newcomer:
    """What was typed, and what came of it."""

    root: Path
    rows: list[Row] = field(default_factory=list)

    def words(self, command: str, folder: str) -> list[str]:
        """The command in a login shell of the user, with nothing of our environment."""
        variables = [f"HOME=/{HOME}", f"USER={USER}", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]
        if (self.root / CERTIFICATES).exists():
            variables += [f"{name}=/{CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
        inside = ["chroot", f"--userspec={USER}:{USER}", str(self.root), "env", "-i", *variables]
        return [*inside, "sh", "-c", f"cd /{HOME}/{folder} && {command}"]

    def types(self, command: str, folder: str = "pdlink", says: str = "", host: Sequence[str] = ()) -> str:
        """Run it to its end; what it wrote. host: what enters one of two. Raises Failed if it fails, or lacks these
        words."""
        began_s = time.monotonic()
        done = subprocess.run(
            [*host, *self.words(command, folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        took_s = time.monotonic() - began_s
        fine = done.returncode == 0 and says in done.stdout
        self.rows.append(Row(command, took_s, "done" if fine else f"FAILED, exit status {done.returncode}"))
        if not fine:
            raise Failed(f"{command}:\n{done.stdout[-4000:]}")
        return done.stdout

    @contextlib.contextmanager
    def starts(self, command: str, host: Sequence[str], ready: str) -> Iterator[None]:
        """Run it until the end of the block, which begins when it has said these words."""
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*host, *self.words(f"exec {command}", "pdlink")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if ready in line:
                    break
            else:
                raise Failed(f"{command} ended with {process.wait()}: {''.join(lines[-20:])}")
            self.rows.append(Row(command, time.monotonic() - began_s, "ready"))
            yield
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def up(self, say: str) -> Iterator[None]:
        """`make up`, and its curl line when that is there; after the block Ctrl-C."""
        began_s = time.monotonic()
        process = subprocess.Popen(
            self.words("exec make up", "pdlink"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                print(f"    {time.monotonic() - began_s:6.1f} {line}", end="", flush=True)
                if curl := re.match(r"\s*(curl .*)", line):
                    break
            else:
                raise Failed(f"make up ended with {process.wait()}: {''.join(lines[-20:])}")
            self.rows.append(Row(f"make up, {say}", time.monotonic() - began_s, "ready"))
            self.types(curl.group(1), says='"text"')
            self.rows.append(Row(f"make up, {say}: to the answer", time.monotonic() - began_s, "answered", READY_S))
            yield
            ended_s = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            status = process.wait(60)
            self.rows.append(Row("Ctrl-C", time.monotonic() - ended_s, f"exit status {status}"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    def packages(self) -> str:
        return output("chroot", str(self.root), "dpkg", "-l")

    def strange_files(self, since_s: float) -> list[str]:
        """Files outside of the home directory that are newer."""
        found = []
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            outside = {"proc", "sys", "dev", "tmp", HOME.partition("/")[0]} if here == self.root else set()
            folders[:] = [each for each in folders if each not in outside and not (here / each).is_mount()]
            for name in files:
                path = here / name
                if path.lstat().st_mtime > since_s:
                    found.append(f"/{path.relative_to(self.root)}")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="where to make the Debian (%(default)s)"
    )
    parser.add_argument(
        "--tests",
        nargs="?",
        const="",
        metavar="ARGUMENTS",
        help="`make test` too: an hour on two cores, or less with PYTEST_ARGS: --tests tests/store",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="`make pictures` too, and what it made goes there"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="leave the Debian there afterwards")
    args = parser.parse_args()
    if os.geteuid():
        parser.error("needs root, to make the Debian; what README says is typed by a user without rights")
    if args.inside is not None:
        return live(args.inside, args.tests, args.pictures)
    folder = tempfile.mkdtemp(prefix="pdlink-newcomer-", dir=args.folder)
    try:  # mounts and processes go with the namespaces, so nothing of this host is below the folder afterwards
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        again = [sys.executable, __file__, *sys.argv[1:], "--inside", folder]
        return subprocess.run([*inside, *again], check=False).returncode
    finally:
        if args.keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder)


def live(folder: Path, tests: str | None, pictures: Path | None) -> int:
    """In namespaces of its own."""
    newcomer = Newcomer(folder / "debian")
    failed = ""
    try:
        prepare(newcomer, folder)
        follow_readme(newcomer, tests, pictures)
    except Failed as error:
        failed = str(error)
    print("\n| step | seconds | bar | |\n|---|---|---|---|")
    for row in newcomer.rows:
        bar = "" if row.bar_s is None else f"{row.bar_s:g}"
        late = ", later than two idle cores are promised" if row.took_s > (row.bar_s or math.inf) else ""
        print(f"| `{row.step}` | {row.took_s:.1f} | {bar} | {row.result}{late} |")
    if failed:
        print(f"\n{failed}", file=sys.stderr)
    return 1 if failed else 0


def follow_readme(newcomer: Newcomer, tests: str | None, pictures: Path | None) -> None:
    lines = commands_of_readme()
    newcomer.types("git clone -q origin.git pdlink", folder=".")
    before, since_s = newcomer.packages(), time.time()
    with newcomer.up("first time"):
        newcomer.types("curl -sf http://127.0.0.1:8000/pdlink/", says="<html")
        newcomer.types("; ".join(lines[2:]), says="nothing wrong")
    with newcomer.up("again"):
        pass
    newcomer.types("python3 -m venv ../env && . ../env/bin/activate && pip install -q . && pdlink --version")
    follow_two_servers(newcomer)
    if tests is not None:
        newcomer.types(lines[1] + (f" PYTEST_ARGS={shlex.quote(tests)}" if tests else ""))
    if pictures is not None:
        newcomer.types("make pictures")
        pictures.mkdir(parents=True, exist_ok=True)
        for path in (newcomer.root / HOME / "pdlink/docs").glob("page*.png"):
            shutil.copy(path, pictures)
    changed, strange = newcomer.packages() != before, newcomer.strange_files(since_s)
    newcomer.rows.append(Row("dpkg -l, before and afterwards", 0.0, "CHANGED" if changed else "equal"))
    newcomer.rows.append(Row("new files outside of the home directory", 0.0, ", ".join(strange[:5]) or "none"))
    if changed or strange:
        raise Failed("README's lines have changed the system")


def follow_two_servers(newcomer: Newcomer) -> None:
    """Its lines for vLLM, as far as they go without vLLM, and the same with pdlink's own workers."""
    secret, prefill, decode, proxy = two_servers_of_readme()
    newcomer.types(secret)
    of_prefill, of_decode = re.findall(r"--(?:prefill|decode) http://(\S+)", proxy)
    with two_hosts(newcomer.root, of_prefill, of_decode) as (first, second):
        activated = f". .venv/bin/activate; MODEL={MODEL}; "
        newcomer.types(f"{activated}{prefill} --print", host=first, says="vllm serve")
        newcomer.types(f"{activated}{decode} --print", host=second, says="vllm serve")
        ours = [
            re.sub(r"vllm (prefill|decode) \$MODEL --listen \S+", rf"\1 --listen {place}", line)
            for line, place in ((prefill, of_prefill), (decode, of_decode))
        ]
        ours.append(re.sub(r" --(dialect|control) \S+", "", proxy))
        with contextlib.ExitStack() as stack:
            for line, host in zip(ours, (first, second, first), strict=True):
                stack.enter_context(newcomer.starts(f".venv/bin/{line}", host, "ready on"))
            ready = "until curl -sf http://127.0.0.1:8000/readyz; do sleep 0.2; done"
            newcomer.types(ready, host=first)
            newcomer.types(
                "curl -si http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json'"
                ' -d \'{"model": "pdlink-tiny", "prompt": "The KV cache crosses over", "max_tokens": 8}\'',
                host=first,
                says="X-Pdlink-KV: transferred",
            )
            newcomer.types(".venv/bin/pdlink doctor 127.0.0.1:8000", host=first, says=" tcp ")


@contextlib.contextmanager
def two_hosts(root: Path, *places: str) -> Iterator[tuple[list[str], ...]]:
    """What enters each of two that have the Debian in common: namespaces of network, processes and mounts, so that
    they share no memory. places: HOST:PORT of each."""
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    entered = ["sh", "-c", f'mount -t proc proc {shlex.quote(str(root / "proc"))} && exec "$@"', "sh"]
    with cabled(*(place.partition(":")[0] for place in places)) as names:
        yield tuple(["ip", "netns", "exec", name, *alone, *entered] for name in names)


@contextlib.contextmanager
def cabled(*addresses: str) -> Iterator[list[str]]:
    """Two network namespaces with these addresses of one /24 and a cable between them, by name. Raises Failed, and
    OSError without `ip`."""
    names = [f"pdlink-{number}-{os.getpid()}" for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        ends = [("name", "pdl0", "netns", name) for name in names]
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, addresses, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "pdl0")
            for device in ("lo", "pdl0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def commands_of_readme() -> list[str]:
    """The indented lines of README's first section with any: `make up`, `make test`, and a look at it."""
    section = re.split(r"^## ", (CHECKOUT / "README.md").read_text(), flags=re.MULTILINE)[1]
    found = [line.partition("#")[0].strip() for line in re.findall(r"^    (\S.*)$", section, re.MULTILINE)]
    if found[:2] != ["make up", "make test"] or "pdlink doctor 127.0.0.1:8000" not in found:
        raise Failed(f"README begins with other commands: {found}")
    return found


def two_servers_of_readme() -> list[str]:
    """What makes the secret, and the lines of prefill, decode and proxy."""
    found = re.search(
        r"\*\*vLLM on two servers\.\*\* `(.*?)`.*?\n\n((?:    .*\n)+)", (CHECKOUT / "README.md").read_text()
    )
    if found is None:
        raise Failed("README has no lines for vLLM on two servers")
    secret, block = found.groups()
    return [secret, *(" ".join(line.split()) for line in block.replace("\\\n", " ").splitlines())]


def packages_of_readme() -> list[str]:
    """What it says to install before."""
    found = re.search(r"apt install ([^`\n]+)", (CHECKOUT / "README.md").read_text())
    if found is None:
        raise Failed("README does not say what to install before")
    return found.group(1).split()


# ---- the Debian


def prepare(newcomer: Newcomer, folder: Path) -> None:
    """Make it, with the user and a repository to clone."""
    root, began_s = newcomer.root, time.monotonic()
    suite, mirror = mirror_of_host()
    debootstrap(folder, suite, mirror, root)
    for name in APT:
        given = Path("/etc/apt") / name
        if given.is_dir():
            shutil.copytree(given, root / "etc/apt" / name, dirs_exist_ok=True)
        elif given.exists():
            shutil.copy(given, root / "etc/apt" / name)
    for name in ("etc/resolv.conf", "etc/hosts"):
        shutil.copy(f"/{name}", root / name)
    (root / "dev/shm").mkdir(exist_ok=True)
    for kind, place in (("proc", "proc"), ("sysfs", "sys"), ("tmpfs", "dev/shm")):
        run("mount", "-t", kind, kind, str(root / place))
    inside = ("chroot", str(root), "env", "DEBIAN_FRONTEND=noninteractive")
    run(*inside, "apt-get", "-qq", "update")
    run(
        *inside,
        "apt-get",
        "-qq",
        "install",
        "-y",
        "--no-install-recommends",
        "ca-certificates",
        *packages_of_readme(),
    )
    shutil.copy(f"/{CERTIFICATES}", root / CERTIFICATES)
    run("chroot", str(root), "useradd", "--create-home", USER)
    pip_as_here(root)
    run("git", "clone", "-q", "--bare", str(CHECKOUT), str(root / HOME / "origin.git"))
    run("chroot", str(root), "chown", "-R", f"{USER}:", f"/{HOME}")
    installed = f"Debian {suite}: apt install {' '.join(packages_of_readme())}"
    newcomer.rows.append(Row(installed, time.monotonic() - began_s, ""))


def mirror_of_host() -> tuple[str, str]:
    """Suite and URL of the Debian that this host is."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    lines = output(
        "apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"
    ).splitlines()
    for line in lines:
        name, _, url = line.partition(" ")
        if name == suite:
            return suite, url
    raise Failed(f"apt knows no mirror of {suite or 'a Debian'}")


def debootstrap(folder: Path, suite: str, mirror: str, root: Path) -> None:
    """A minimal system. The program is taken out of its package if this host has none."""
    program, environment = shutil.which("debootstrap"), dict(os.environ)
    if program is None:
        subprocess.run(
            ["apt-get", "-qq", "download", "debootstrap"], cwd=folder, check=True, stderr=subprocess.DEVNULL
        )
        (package,) = folder.glob("debootstrap_*.deb")
        run("dpkg-deb", "-x", str(package), str(folder / "tool"))
        program = str(folder / "tool/usr/sbin/debootstrap")
        environment["DEBOOTSTRAP_DIR"] = str(folder / "tool/usr/share/debootstrap")
    words = [program, "--variant=minbase", suite, str(root), mirror]
    done = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"{shlex.join(words)}: {done.stdout[-2000:]}")


def pip_as_here(root: Path) -> None:
    """Mirrors, folders of wheels and constraints that this host's pip takes."""
    kept, mounted = dict[str, str](), set[str]()
    for line in output(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        key, text = name.rpartition(".")[2], value.strip("'").replace("\\n", " ")
        if key not in ("index-url", "extra-index-url", "find-links", "trusted-host", "constraint"):
            continue
        kept.setdefault(key, text)  # of the environment first
        for place in text.split():
            path = Path(place.removeprefix("file://"))
            if not path.is_absolute() or not path.exists():
                continue
            inside = root / path.relative_to("/")
            if path.is_file():
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, inside)
            elif (top := path.parts[1]) not in mounted:  # of the whole: indexes have links to their neighbours
                mounted.add(top)
                (root / top).mkdir(exist_ok=True)
                run("mount", "--bind", "-o", "ro", f"/{top}", str(root / top))
    lines = ["[global]", *(f"{key} = {text}" for key, text in kept.items())]
    (root / "etc/pip.conf").write_text("\n".join([*lines, ""]))


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}: {done.stdout[-2000:]}")


def output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
