"""Tables of results on standard output."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows of cells; a column whose cells are all numbers or quantities is aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numeric = all(row[index][:1] in "0123456789-+.<" for row in cells)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console = Console()
    # A pipe has no width, and the 80 columns that rich assumes would break the table.
    (console if console.is_terminal else Console(width=160)).print(table)
