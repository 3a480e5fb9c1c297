"""What SGLang's code asks of objects of its own, answered from ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdlink.integrations.sglang_parts import wire
    from pdlink.integrations.sglang_parts.rooms import PrefillRooms


class TransferInfo:
    """What SGLang's code asks of an entry of `transfer_infos`: where decode's manager listens."""

    def __init__(self, ask: wire.RoomAsked) -> None:
        self.endpoint, self.dst_port = ask.host, ask.port
        self.is_dummy, self.required_dst_info_num = ask.dummy, ask.receivers


class Outstanding:
    """SGLang's count of what is in flight for a room, from the transfers themselves."""

    def __init__(self, rooms: PrefillRooms) -> None:
        self._rooms = rooms

    def get(self, room: int, default: int = 0) -> int:
        return default if self._rooms.is_drained(room) else 1

    def pop(self, room: int, default: int = 0) -> int:
        return self.get(room, default)

    def __contains__(self, room: int) -> bool:
        return not self._rooms.is_drained(room)
