"""A file system of a process of ours, kept in memory: a test can freeze it, by SIGSTOP of that process, and turn it
read-only or writable, by SIGUSR1.

Speaks the kernel's FUSE protocol over /dev/fuse, as far as a disk tier needs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI7I")
_ATTR, _ENTRY, _OPEN = struct.Struct("<6Q10I"), struct.Struct("<4Q2I"), struct.Struct("<QIi")
_IO = struct.Struct("<QQIIQII")
_BIG_WRITES = 1 << 5
_SET_SIZE = 1 << 3
_MAX_WRITE_NBYTES = 128 << 10
_ROOT = 1
(_LOOKUP, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _OPEN_FILE, _READ, _WRITE) = (1, 3, 4, 9, 10, 14, 15, 16)
(_RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR) = (18, 20, 25, 26, 27, 28, 29)
(_CREATE, _FALLOCATE) = (35, 43)
_UNANSWERED = (2, 36, 42)
"""Forget, interrupt, forget several."""
_WRITES = (_SETATTR, _MKDIR, _UNLINK, _WRITE, _CREATE, _FALLOCATE)


@dataclass
class Node:
    mode: int
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, int] = field(default_factory=dict)


def mount(place: Path) -> int:
    """Mount it there, served by a child process; that one's number. Raises OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    mount_at("fuse", place, "fuse", options)
    child = os.fork()
    if child == 0:
        try:
            _serve(fd)
        finally:
            os._exit(1)
    os.close(fd)
    return child


def mount_at(source: str, place: Path, kind: str, options: str = "", flags: int = 0) -> None:
    """As mount(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = source.encode(), str(place).encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    if libc.mount(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"mount of {kind}: {os.strerror(code)}")


def _serve(fd: int) -> None:
    nodes = {_ROOT: Node(stat.S_IFDIR | 0o700)}
    is_read_only = False

    def turn(*_: object) -> None:
        nonlocal is_read_only
        is_read_only = not is_read_only

    signal.signal(signal.SIGUSR1, turn)
    while True:
        request = os.read(fd, _MAX_WRITE_NBYTES + (8 << 10))
        _, operation, unique, number, *_ = _IN.unpack_from(request)
        if operation in _UNANSWERED:
            continue
        try:
            if is_read_only and operation in _WRITES:
                raise OSError(errno.EROFS, "read-only")
            error, body = 0, _answer(nodes, operation, number, request[_IN.size :])
        except OSError as failed:
            error, body = -(failed.errno or errno.EIO), b""
        os.write(fd, _OUT.pack(_OUT.size + len(body), error, unique) + body)


def _answer(nodes: dict[int, Node], operation: int, number: int, said: bytes) -> bytes:  # noqa: PLR0911 - a line each
    if operation == _INIT:
        return _INIT_OUT.pack(7, 31, 0, _BIG_WRITES, 0, 0, _MAX_WRITE_NBYTES, 1, 0, 0, 0, *[0] * 7)
    node = nodes[number]
    if operation == _LOOKUP:
        child = node.children.get(said.rstrip(b"\0"))
        if child is None:
            raise OSError(errno.ENOENT, "no such file")
        return _entry(nodes, child)
    if operation == _UNLINK:
        del node.children[said.rstrip(b"\0")]
        return b""
    if operation in (_MKDIR, _CREATE):
        (mode,) = struct.unpack_from("<I", said, 0 if operation == _MKDIR else 4)
        name = said[8 if operation == _MKDIR else 16 :].rstrip(b"\0")
        made = node.children[name] = max(nodes) + 1
        nodes[made] = Node((stat.S_IFDIR if operation == _MKDIR else stat.S_IFREG) | stat.S_IMODE(mode))
        return _entry(nodes, made) + (_OPEN.pack(0, 0, 0) if operation == _CREATE else b"")
    if operation == _SETATTR:
        valid, _, _, nbytes = struct.unpack_from("<IIQQ", said)
        if valid & _SET_SIZE:
            _resize(node, nbytes)
    if operation in (_GETATTR, _SETATTR):
        return struct.pack("<QII", 0, 0, 0) + _attributes(nodes, number)
    if operation in (_OPEN_FILE, _OPENDIR):
        return _OPEN.pack(0, 0, 0)
    if operation == _READ:
        _, begin, nbytes, *_ = _IO.unpack_from(said)
        return bytes(node.data[begin : begin + nbytes])
    if operation == _WRITE:
        _, begin, nbytes, *_ = _IO.unpack_from(said)
        _resize(node, max(len(node.data), begin + nbytes))
        node.data[begin : begin + nbytes] = said[_IO.size : _IO.size + nbytes]
        return struct.pack("<II", nbytes, 0)
    if operation == _FALLOCATE:
        _, begin, nbytes, *_ = struct.unpack_from("<QQQII", said)
        _resize(node, max(len(node.data), begin + nbytes))
        return b""
    if operation == _READDIR:
        return _listed(node, *_IO.unpack_from(said)[1:3])
    if operation in (_RELEASE, _RELEASEDIR, _FLUSH, _FSYNC):
        return b""
    raise OSError(errno.ENOSYS, "not here")


def _resize(node: Node, nbytes: int) -> None:
    del node.data[nbytes:]
    node.data.extend(bytes(nbytes - len(node.data)))


def _entry(nodes: dict[int, Node], number: int) -> bytes:
    return _ENTRY.pack(number, 0, 0, 0, 0, 0) + _attributes(nodes, number)


def _attributes(nodes: dict[int, Node], number: int) -> bytes:
    node = nodes[number]
    size = len(node.data)
    return _ATTR.pack(
        number, size, -(-size // 512), 0, 0, 0, 0, 0, 0, node.mode, 1, os.getuid(), os.getgid(), 0, 4096, 0
    )


def _listed(node: Node, begin: int, nbytes: int) -> bytes:
    found = b""
    for index, (name, child) in enumerate(list(node.children.items())[begin:], begin + 1):
        entry = struct.pack("<QQII", child, index, len(name), 0) + name
        entry += bytes(-len(entry) % 8)
        if len(found) + len(entry) > nbytes:
            break
        found += entry
    return found
