"""A newcomer: types what README says in a Debian that has nothing, and says how long each step took.

    sudo python3 tools/newcomer.py [--tests] [--keep]

The Debian is made by debootstrap for this run. It has a user without rights, what README says to install before, the
configuration of this host's apt and pip (mirrors, certificates), and no cache. The checkout is cloned as it is
committed. A step that fails ends the run with status 1, and so does `make up` if it changes a package of the system
or a file outside of the home directory. The table comes last. Needs root, port 8000, and 4 GB in --folder.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKOUT = Path(__file__).resolve().parents[1]
USER, HOME = "newcomer", "home/newcomer"
READY_S = 90.0
"""What `make up` may take to an answer, on two idle cores."""
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
APT = ("sources.list", "sources.list.d", "apt.conf.d", "auth.conf.d", "keyrings", "trusted.gpg.d")


class Failed(Exception):
    """A step failed; the message is for people."""


@dataclass
class Newcomer:
    """What was typed, and what came of it."""

    root: Path
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def words(self, command: str, folder: str) -> list[str]:
        """The command in a login shell of the user, with nothing of our environment."""
        variables = [f"HOME=/{HOME}", f"USER={USER}", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]
        if (self.root / CERTIFICATES).exists():
            variables += [f"{name}=/{CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
        inside = ["chroot", f"--userspec={USER}:{USER}", str(self.root), "env", "-i", *variables]
        return [*inside, "sh", "-c", f"cd /{HOME}/{folder} && {command}"]

    def types(self, command: str, folder: str = "pdlink", says: str = "") -> str:
        """Run it to its end; what it wrote. Raises Failed if it fails, or lacks these words."""
        began_s = time.monotonic()
        done = subprocess.run(
            self.words(command, folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        took_s = time.monotonic() - began_s
        fine = done.returncode == 0 and says in done.stdout
        self.rows.append((command, took_s, "done" if fine else f"FAILED, exit status {done.returncode}"))
        if not fine:
            raise Failed(f"{command}:\n{done.stdout[-4000:]}")
        return done.stdout

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
            self.rows.append((f"make up, {say}", time.monotonic() - began_s, "ready"))
            self.types(curl.group(1), says='"text"')
            self.rows.append((f"make up, {say}: to the answer", time.monotonic() - began_s, "answered"))
            yield
            ended_s = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            status = process.wait(60)
            self.rows.append(("Ctrl-C", time.monotonic() - ended_s, f"exit status {status}"))
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
    parser.add_argument("--tests", action="store_true", help="`make test` too: an hour on two cores")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help="leave the Debian there afterwards")
    args = parser.parse_args()
    if os.geteuid():
        parser.error("needs root, to make the Debian; what README says is typed by a user without rights")
    if args.inside is not None:
        return live(args.inside, tests=args.tests)
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


def live(folder: Path, *, tests: bool) -> int:
    """In namespaces of its own."""
    newcomer = Newcomer(folder / "debian")
    failed = ""
    try:
        prepare(newcomer, folder)
        follow_readme(newcomer, tests=tests)
    except Failed as error:
        failed = str(error)
    print("\n| step | seconds | |\n|---|---|---|")
    for step, took_s, result in newcomer.rows:
        print(f"| `{step}` | {took_s:.1f} | {result} |")
    if failed:
        print(f"\n{failed}", file=sys.stderr)
    return 1 if failed else 0


def follow_readme(newcomer: Newcomer, *, tests: bool) -> None:
    lines = commands_of_readme()
    newcomer.types("git clone -q origin.git pdlink", folder=".")
    before, since_s = newcomer.packages(), time.time()
    with newcomer.up("first time"):
        answered_s = newcomer.rows[-1][1]
        newcomer.types("curl -sf http://127.0.0.1:8000/pdlink/", says="<html")
        newcomer.types("; ".join(lines[2:]), says="nothing wrong")
    with newcomer.up("again"):
        pass
    strange = newcomer.strange_files(since_s)
    verdict = "as before" if newcomer.packages() == before else "CHANGED"
    newcomer.rows.append(("dpkg -l, afterwards", 0.0, verdict))
    newcomer.rows.append(("files outside of the home directory", 0.0, f"{len(strange)} {' '.join(strange[:5])}"))
    newcomer.types("python3 -m venv ../env && . ../env/bin/activate && pip install -q . && pdlink --version")
    if tests:
        newcomer.types(lines[1])
    if verdict == "CHANGED" or strange:
        raise Failed("make up has changed the system")
    if answered_s > READY_S:
        print(f"slower than {READY_S:g} s, which two idle cores are promised")


def commands_of_readme() -> list[str]:
    """The indented lines of README's first section with any: `make up`, `make test`, and a look at it."""
    section = re.split(r"^## ", (CHECKOUT / "README.md").read_text(), flags=re.MULTILINE)[1]
    found = [line.partition("#")[0].strip() for line in re.findall(r"^    (\S.*)$", section, re.MULTILINE)]
    if found[:2] != ["make up", "make test"] or "pdlink doctor 127.0.0.1:8000" not in found:
        raise Failed(f"README begins with other commands: {found}")
    return found


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
    newcomer.rows.append(
        (f"Debian {suite}: apt install {' '.join(packages_of_readme())}", time.monotonic() - began_s, "")
    )


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
