"""Words of others (workers, stores, proxies, clients) in a terminal: no markup, emoji codes or control characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


def plain(words: object, style: str = "") -> Text:
    """As it is, but for control characters, which could move the cursor: they become U+FFFD. Newlines stay."""
    kept = (each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in str(words))
    return Text("".join(kept), style)


def add_row(table: Table, *cells: object, style: str = "") -> None:
    """`Table.add_row` that takes every cell as `plain`, but for cells that are a Text already."""
    table.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in cells), style=style)
