"""A process of its own over UCX: connects to the worker address of an invitation and says what it likes there."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

from pdlink.transport import ucx

if TYPE_CHECKING:
    from types import TracebackType

NOTE = struct.Struct("<IIQQQQ")
NOTE_MAGIC, NOTE_ID = 0x4E554450, 1
"""csrc/ucx/staging.h, written down a second time: magic, slot, number and bytes of runs, writer, number."""
REPLY = 1
"""UCP_AM_SEND_FLAG_REPLY: the receiver is told how to answer."""
_EAGER_AND_COPIED = 2 | 8
_FEATURE_AM = 1 << 6
_BIGGER_THAN_ANY = 256
"""Bytes for a structure of UCX's; what its field mask does not name is not looked at."""


def _words(*words: int) -> ctypes.Array[ctypes.c_char]:
    """A structure that begins with these 64-bit words."""
    return ctypes.create_string_buffer(struct.pack(f"<{len(words)}Q", *words), _BIGGER_THAN_ANY)


class UcxStranger:
    def __init__(self, invitation: bytes) -> None:
        self._ucp = ctypes.CDLL(ucx._load(None).path)
        self._ucp.ucp_am_send_nbx.restype = self._ucp.ucp_ep_close_nbx.restype = ctypes.c_void_p
        self._context, self._worker, self._endpoint = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        config = ctypes.c_void_p()
        self._must("ucp_config_read", None, None, ctypes.byref(config))
        self._must("ucp_config_modify", config, b"TLS", b"tcp")
        features = _words(1, _FEATURE_AM)  # UCP_PARAM_FIELD_FEATURES
        self._must("ucp_init_version", *ucx.NEEDED_UCX, features, config, ctypes.byref(self._context))
        self._ucp.ucp_config_release(config)
        self._must("ucp_worker_create", self._context, _words(0), ctypes.byref(self._worker))
        address = ctypes.create_string_buffer(ucx._unpack(invitation).address + bytes(4096))
        there = _words(1, ctypes.addressof(address))  # UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        self._must("ucp_ep_create", self._worker, there, ctypes.byref(self._endpoint))

    def _must(self, function: str, *arguments: object) -> None:
        status = ctypes.c_int8(getattr(self._ucp, function)(*arguments)).value
        assert status == 0, f"{function}: {status}"

    def __enter__(self) -> UcxStranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._ucp.ucp_worker_destroy(self._worker)
        self._ucp.ucp_cleanup(self._context)

    def say(self, header: bytes, payload: bytes = b"", flags: int = REPLY) -> None:
        how = ctypes.create_string_buffer(struct.pack("<II", 1 << 4, flags | _EAGER_AND_COPIED), _BIGGER_THAN_ANY)
        self._payload = payload  # UCX may read it later
        self._ucp.ucp_am_send_nbx(
            self._endpoint, NOTE_ID, header, ctypes.c_size_t(len(header)), payload, ctypes.c_size_t(len(payload)), how
        )

    def progress(self) -> None:
        while self._ucp.ucp_worker_progress(self._worker):
            pass
