"""The tables that experiments print, as cells, so that tests can read the numbers in them."""


def printed_rows(printed: str) -> list[list[str]]:
    """Returns the cells of all rows of all tables in a text; lines that go on from the one before are rows as well."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
