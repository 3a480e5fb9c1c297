"""`pdlink` whose workers have links with the faults in `tamper.FAULTS`, as a program that takes its words."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from pdlink import cli
from pdlink.node.node import Node
from pdlink.serve.worker import Worker
from pdlink_bench.chaos.tamper import FAULTS, LinkFaults, channels, slow_down

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """`pdlink` with these words."""
    faults = LinkFaults(**json.loads(os.environ[FAULTS]))

    def make_node(*arguments: Any, **options: Any) -> Node:
        node = Node(*arguments, channel=channels(faults), **options)
        slow_down(node.endpoint.transports, faults)
        return node

    Worker.make_node = staticmethod(make_node)
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
