"""`Node`: a worker's end of every link. Opens, registers memory, listens, and hands out one object per transfer.

    import pdlink

    node = pdlink.Node("prefill-0", pdlink.KVGroups((pdlink.paged_layout(...),)))
    with node.send(transfer_id, [blocks], num_tokens) as outgoing:
        for layer in range(num_layers):
            compute(layer)
            outgoing.layer_ready(layer)
        outgoing.finish(first_token)

    incoming = node.receive(transfer_id, "tcp://prefill:8500", [blocks], range(num_tokens))
    for layer in range(num_layers):
        incoming.wait_layer(layer)
        attend(layer)

A node has one thread of its own (`pdlink/endpoint`) and one or two native ones per transport; they sleep while
nothing is to be done. It sends and receives, with any number of peers at once.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from pdlink.config import TransportConfig
from pdlink.config.listen import LinkListen, is_every_address
from pdlink.endpoint.channel import Channel
from pdlink.endpoint.data_path import Outgoing as Outgoing
from pdlink.endpoint.driver import Endpoint
from pdlink.endpoint.marks import Marks
from pdlink.endpoint.receiver import Incoming as Incoming
from pdlink.errors import ConfigError, TransferFailed, TransportUnavailable
from pdlink.kv.plan import warm_up
from pdlink.memory.borrowed import buffers_of
from pdlink.memory.checksums import Checksums
from pdlink.memory.host import host_id
from pdlink.node import report
from pdlink.node.launched import LaunchedIncoming, LaunchedOutgoing
from pdlink.protocol.auth import NAME_RULE, ControlAddress, check_dial, is_worker_name
from pdlink.protocol.deadlines import Deadlines
from pdlink.protocol.handshake import ModelId
from pdlink.protocol.messages import VERSION, Identity
from pdlink.reasons import Code, Reason
from pdlink.transport.choice import open_transports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from pdlink.endpoint.half import Transfer
    from pdlink.endpoint.live import LiveTransfer
    from pdlink.kv.groups import BlockLists, KVGroups
    from pdlink.memory.blocks import BlockPool
    from pdlink.memory.buffers import AnyBuffer, HostBuffer
    from pdlink.node.report import NodeReport
    from pdlink.protocol.auth import AllowList, Credentials
    from pdlink.transport.base import Transport

    Pages = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]


_UNCHECKED = object()
_MAX_DIALABLE = 4096
_LOCAL, _ANY_TRANSPORT, _DEADLINES, _ANY_MODEL = LinkListen(), TransportConfig(), Deadlines(), ModelId()
"""The defaults of a node."""


class Node:
    """One worker as others see it. Open from the constructor on until `close`; also a context manager.

    Every method may be called from any thread.
    """

    name: str
    address: str
    """What `receive` of another node takes as `peer`: tcp://host:port, with the public key where there is one."""
    groups: KVGroups
    """The layers of the KV cache, as given."""
    buffers: list[AnyBuffer]
    """The memory of the KV cache, by region index of the layout."""
    short_of_blocks: Callable[[], bool]
    """Whether requests here wait for blocks that transfers hold; asked twice per heartbeat. Set it when you know."""

    def __init__(
        self,
        name: str,
        groups: KVGroups,
        buffers: Sequence[Any] | None = None,
        *,
        listen: LinkListen = _LOCAL,
        model: ModelId = _ANY_MODEL,
        pool: BlockPool | None = None,
        transport: TransportConfig = _ANY_TRANSPORT,
        transports: Sequence[Transport] | None = None,
        deadlines: Deadlines = _DEADLINES,
        credentials: Credentials | None = None,
        insecure: bool = False,
        channel: Callable[[str], Channel] = Channel,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Open transports, register the memory, bind the control port and start to listen. Takes up to a second the
        first time, while the planner is compiled.

        name: unique among the workers that meet; a restarted one keeps its name.
        groups: where each byte of the KV cache lies: a layout (`paged_layout`) for each group of layers that keep the
            same tokens. Most models have one group. Blocks of a transfer are one list for each group.
        buffers: memory that is *borrowed*, for region 0, 1, … of the layouts: contiguous torch tensors (CPU or CUDA),
            numpy arrays, objects with `__dlpack__` or the buffer protocol; or buffers of `pdlink.memory`. It must
            outlive the node. None allocates shared memory, which peers on this host can map: the fastest lane.
        listen: where peers reach it. Others than this host can reach anything but loopback, which takes
            `credentials`, or `insecure=True` on a private network.
        model: must be equal on both sides of a link.
        deadlines: how long it waits for others.
        credentials: who this node is and whom it knows, from files that `pdlink keygen` has made:
            `pdlink.load_credentials(pdlink.SecurityConfig(key_file=..., allow_file=...))`. The control plane is
            encrypted then. insecure: without keys, let other hosts reach this node and dial any address.
        pool: counts the blocks. The node then holds a reference of its own to the blocks of each transfer until
            nothing can touch them. None leaves that to the caller, who waits for `released`.
        transport: by default whatever works between two nodes, the fastest first.
        transports: ready-made ones instead; the node opens and closes them.
        channel: makes the control channel from an identity, NAME@EPOCH; one that loses frames tests what follows.
        on_death: called in the node's thread if its loop dies, which only a bug can do. All transfers have failed.

        Raises ConfigError (name, listen), LayoutMismatch (a buffer is too small), InvalidRequest (an object that
        cannot be borrowed), TransportUnavailable, OSError (not enough memory).
        """
        if not is_worker_name(name):
            raise ConfigError(f"name: got {name!r}; a name is {NAME_RULE}")
        open_to = listen.reachable
        if open_to and credentials is None and not insecure:
            what, one = next(iter(open_to.items()))
            raise ConfigError(
                f"{what}: other hosts can reach {one}, and this node has no keys; pass credentials, or insecure=True "
                "on a private network"
            )
        groups.check("own")
        self.name, self.groups, self.pool = name, groups, pool
        self._insecure, self._verify = insecure, transport.verify
        self.short_of_blocks = lambda: False
        self._closed = False
        self._dialable: dict[str, object] = {}
        """Addresses that may be dialed, with the credentials that they were checked by."""
        with ExitStack() as opened:
            self.buffers = buffers_of(groups, buffers, opened)
            kind = self.buffers[0].kind
            self._marks: Marks | None = None
            if kind == "cuda":
                memory = cast("Any", self.buffers[0])
                self._marks = Marks(memory.make_event, memory.make_bells())
                opened.callback(self._marks.close)
            if transports is None:
                told = listen.advertise if listen.data is None or is_every_address(listen.data) else None
                host = listen.data or listen.control_host
                transports = open_transports(transport, self.buffers, host, told, this_host_only=not open_to)
            else:
                for made in transports:
                    opened.callback(made.close)
                    made.open()
                    for buffer in self.buffers:
                        made.register(buffer)
            for made in transports:
                opened.callback(made.close)
            warm_up()
            self.endpoint = Endpoint(
                name,
                Identity(
                    VERSION,
                    model.name,
                    model.revision,
                    model.num_ranks,
                    groups.layouts[0],
                    host_id(),
                    model.content,
                    os.getpid(),
                    kind,
                    groups.layouts[1:],
                ),
                transports,
                deadlines,
                batch_timeout_s=transport.batch_timeout_s,
                require_lane=transport.require,
                credentials=credentials,
                checksums=Checksums(groups, cast("list[HostBuffer]", self.buffers)) if kind == "host" else None,
                channel=channel,
                on_death=lambda: self._died(on_death),
                short_of_blocks=lambda: self.short_of_blocks(),
                pool=pool,
                marks=self._marks,
            )
            opened.callback(self.endpoint.close)
            self.endpoint.open(listen.control_host, listen.control_port, listen.advertise)
            self._opened = opened.pop_all()
        obstacles = [made.no_invitations for made in transports]
        self._no_invitations = "; ".join(obstacles) if all(obstacles) else ""
        self.address = self.endpoint.address

    # -- transfers ---------------------------------------------------------------------------------------------------

    def send(
        self,
        transfer_id: str,
        blocks: BlockLists | None = None,
        num_tokens: int = 0,
        num_cached_tokens: int = 0,
    ) -> Outgoing:
        """Send the KV of one prompt to the node that asks for `transfer_id`, layer by layer while it is computed.

        transfer_id: names one attempt of one request, up to 128 characters; both sides must use the same one, once.
        blocks: where the KV of the `num_tokens` tokens will be, from token 0 on; None if they are not reserved yet:
        call `Outgoing.publish` then. num_cached_tokens: so many of the first tokens are in them already.
        Returns at once; the receiver may come before or after. Raises InvalidRequest if the id was used before, and
        TransferFailed if the transfer was stopped already, or this node is closed.
        """
        if self._closed:
            raise self._closed_error()
        sender, marks = self.endpoint.sender, self._marks
        outgoing = Outgoing(sender, transfer_id) if marks is None else LaunchedOutgoing(sender, transfer_id, marks)
        if blocks is not None:
            outgoing.publish(blocks, num_tokens, num_cached_tokens)
        return outgoing

    def receive(
        self,
        transfer_id: str,
        peer: str,
        blocks: BlockLists | None = None,
        tokens: range | None = None,
        *,
        by_layer: bool = True,
    ) -> Incoming:
        """Receive the KV of one prompt from the node at `peer` into blocks of this one.

        peer: the `address` of the sending node. tokens: the missing tokens; blocks[0] holds the first of them. None
        for both if blocks are not reserved yet: call `Incoming.offer` then. The two nodes may have different block
        sizes and orders of axes. by_layer: let `wait_layer` see single layers, for one small message each; False
        saves the messages if only the whole is needed.
        Returns at once, and connects in the background. Raises InvalidRequest (a used id, or blocks and tokens that
        do not fit together), PeerNotAllowed (an address that this node may not dial), TransferFailed (the transfer
        was stopped already, or the peer is in back-off), TransportUnavailable (no peer can write to this memory over
        the transports of this node; the message names suitable ones).
        """
        if self._closed:
            raise self._closed_error()
        if self._dialable.get(peer, _UNCHECKED) is not self.endpoint.local.credentials:
            self._check_dial(peer)
        if self._no_invitations:
            raise TransportUnavailable(self._no_invitations)
        receiver, marks, verify = self.endpoint.receiver, self._marks, self._verify
        incoming = (
            Incoming(receiver, transfer_id, peer, verify=verify, by_layer=by_layer)
            if marks is None
            else LaunchedIncoming(receiver, transfer_id, peer, marks, verify=verify, by_layer=by_layer)
        )
        if blocks is not None and tokens is not None:
            try:
                incoming.offer(blocks, tokens)
            except BaseException:
                incoming.cancel(Reason(Code.ABORTED, "its offer is invalid"))
                raise
        return incoming

    def when_written(self, act: Callable[[], None], failed: Callable[[Reason], None]) -> None:
        """Act in this node's thread when all that this thread has launched on its current stream has run.

        For device memory. failed(reason): instead, if the GPU has failed; also if `act` raises.
        """
        assert self._marks is not None
        self._marks.when_reached((self._marks.mark(),), act, failed)

    def other_side_failed(self, transfer_id: str, words: str) -> None:
        """Somebody else, such as a proxy, says that the other side of this transfer has failed.

        Ends it here; an id that is not known yet is refused when its request comes.
        """
        reason = Reason(Code.REQUEST_FAILED, words)
        self.endpoint.receiver.cancel(transfer_id, reason)
        self.endpoint.sender.cancel(transfer_id, reason)

    def complete(self, attempt: str, num_transfers: int) -> None:
        """All `num_transfers` transfers of this attempt have been sent; their ids are `attempt`-DIGEST.

        A receiver that asks for another one has another prompt, and is refused at once.
        """
        self.endpoint.sender.complete(attempt, num_transfers)

    def why_stopped(self, transfer_id: str) -> Reason | None:
        """Why this transfer from here has failed already; None if it has not."""
        return self.endpoint.sender.stopped(transfer_id)

    def prefilling(self, on: bool) -> None:
        """This process begins (on) or has ended to compute prefills: transports leave its cores alone meanwhile."""
        for transport in list(self.endpoint.transports.values()):
            transport.computing(on)

    # -- memory ------------------------------------------------------------------------------------------------------

    def pages(self, layer: int, part: int = 0) -> Pages:
        """One part (0: K, 1: V) of one layer of host memory, as uint8 [block, token, head, byte]: a view, no copy."""
        layout = self.groups.layouts[self.groups.group_of[layer]]
        place = layout.layers[self.groups.index_of[layer]]
        at = place.parts[part]
        memory = cast("HostBuffer", self.buffers[at.region]).array[at.offset :]
        shape = (layout.num_blocks, layout.block_tokens, layout.num_heads, layout.head_nbytes)
        strides = (place.block_stride, place.token_stride, place.head_stride, 1)
        return np.lib.stride_tricks.as_strided(memory, shape, strides)

    # -- life --------------------------------------------------------------------------------------------------------

    def report(self) -> NodeReport:
        """What this node is doing now."""
        return report.of(self.endpoint)

    def transfers(self, most: int = 32) -> list[LiveTransfer]:
        """Live transfers, up to so many of each direction, the oldest first."""
        return self.endpoint.sender.transfers(most) + self.endpoint.receiver.transfers(most)

    def longest_absence_s(self) -> float:
        """Longest time of the last one to two minutes for which this node's loop could not go round."""
        return self.endpoint.longest_absence_s()

    @property
    def transports(self) -> list[str]:
        """Names of those it offers, the preferred one first."""
        return list(self.endpoint.transports)

    def allow(self, allowed: AllowList) -> None:
        """Replace the allow-list of the credentials; sessions whose key is not on it end."""
        self.endpoint.allow(allowed)

    def change_content(self, content: str) -> None:
        """The model has other weights from now on (`content`, see `__init__`): transfers of the weights before fail,
        and both sides of each link compare again."""
        self.endpoint.change_content(content)

    def close(self) -> None:
        """End every transfer and session, wait up to two seconds for the fences, and free what this node has made.

        A transfer that is not `released` by then may still be written to by a peer that stands still. Safe to call
        twice, from any thread but the node's own.
        """
        self._closed = True
        self.endpoint.close()
        self._fail_all(Reason(Code.SHUTDOWN, "this node was closed"))
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(self.transports) or "closed"
        return f"Node({self.name!r} at {self.address}, {len(self._live())} transfers, over {names})"

    # -- inside ------------------------------------------------------------------------------------------------------

    def _closed_error(self) -> TransferFailed:
        words = f"node {self.name} is closed"
        return TransferFailed(words, Reason(Code.SHUTDOWN, words))

    def _check_dial(self, peer: str) -> None:
        """Remember that this node may dial a peer: looking at an address takes longer than the rest of `receive`."""
        credentials = self.endpoint.local.credentials
        check_dial(ControlAddress.parse(peer), credentials, insecure=self._insecure)
        if len(self._dialable) >= _MAX_DIALABLE:
            self._dialable.clear()
        self._dialable[peer] = credentials

    def _died(self, on_death: Callable[[], None]) -> None:
        words = f"this node's loop has died: {self.endpoint.failure}"
        self._fail_all(Reason(Code.HANDLING_FAILED, words))
        on_death()

    def _live(self) -> list[Transfer]:
        """Transfers that are not released yet."""
        return [*self.endpoint.sender.live, *self.endpoint.receiver.live]

    def _fail_all(self, reason: Reason) -> None:
        for transfer in self._live():
            transfer.on_failed(reason)


def end_process() -> None:
    """For `on_death`: end this process, so that its supervisor starts it again.

    Without its loop it would keep blocks, and requests that wait for KV, until their deadlines.
    """
    os.kill(os.getpid(), signal.SIGTERM)
