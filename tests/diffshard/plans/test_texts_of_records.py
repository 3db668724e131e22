"""The whole texts of records made by hand, whose numbers are worked out from what they hold."""

import dataclasses

import pytest

from search_spaces.embedding_tables.base import DEVICE, EVERY_DEVICE, HOST, Piece
from tests.diffshard.plans.small_files import RECORDS, table_plan

TEXTS = {
    # Rows have an optimiser's 4 bytes each on a device, those on a host, too: 10 * 36 + 50 * 20 bytes on device 0.
    "tables": """\
Plan of 2 embedding tables on 2 devices (model 2), H100-80GB

  step     5.00 ms predicted for 64 examples: lookups 2.00 ms, exchanges and backward 3.00 ms
  bound    none: the cost is learned from 2 measured devices
  memory   1.68 KiB kept on each device, 2.81 KiB in memory of its host: arrays are as
           long as on the fullest one
  order    rows by lookups: users (3 rows first)
  search   500 ms, finished

  device  pieces  lookups     rest    memory     limit      host    limit
       0       2  1.00 ms  3.00 ms  1.33 KiB   977 KiB       0 B  977 KiB
       1       3  2.00 ms  1.00 ms  1.68 KiB  1.91 MiB  2.81 KiB  977 KiB

  table  type             ids      size  where
  users  float32[100,8]     2  3.12 KiB  rows 0-9 copied: to each; rows 10-99 on hosts: device 1
  items  bfloat16[50,16]    1  1.56 KiB  columns 0-7 on 0, 8-15 on 1""",
    "groups": """\
Plan of 4 experts on 3 workers in 2 groups

  step     3.50 s predicted, all-reduce 500 ms of it; merging pairs 4.00 s
  bound    3.00 s, gap 14%: no other division into groups is predicted to be faster by more
  search   100 ms, finished

  group  computing  exchanging  experts a worker  workers
      0     2.00 s      1.00 s                 2  0 2
      1     3.00 s         0 s                 4  1""",
    "placement": """\
Placement of 6 layers on 3 devices

  step     12.0 s: transfers 2.00 s, computing 10.0 s
  bound    12.0 s, gap 0%: no other placement is predicted to be faster by more

  device  computes  layers
       0    9.00 s  0 1 2
       1    10.0 s  3 4 5
       2       0 s""",
    "budget": """\
Budget of train_step over 2 phases: 81.0 ms, 1.00 ms of moves

  phase  devices                 hardware  steps     step    alone  move into it      sent    memory
      0  8 devices (data 2 x     toy           3  10.0 ms  10.0 ms           0 s       0 B  1.00 KiB
           model 4)
      1  8 devices (data 2 x     toy           5  10.0 ms  10.0 ms       1.00 ms  2.00 KiB  1.00 KiB
           model 4)

  alone    81.0 ms, 1.00 ms of moves, with the best plan of each phase
  bound    72.0 ms, gap 11%: no plans and moves are predicted to be better by more
  search   500 ms, finished""",
}
"""By the kind of record; without the line of a search that takes another time on each machine."""


@pytest.mark.parametrize("kind", TEXTS)
def test_each_number_of_a_record_is_in_its_place(kind):
    lines = str(RECORDS[kind]()).splitlines()
    if kind == "placement":
        lines = [line for line in lines if not line.startswith("  search ")]
    assert lines == TEXTS[kind].splitlines()


def test_a_table_says_how_each_part_of_it_is_divided():
    pieces = (
        Piece(0, EVERY_DEVICE, 0, 10, 0, 8, DEVICE),
        Piece(0, 0, 10, 40, 0, 8, DEVICE), Piece(0, 1, 40, 60, 0, 8, DEVICE),
        Piece(0, 0, 60, 100, 0, 4, HOST), Piece(0, 1, 60, 100, 4, 8, HOST),
        Piece(1, EVERY_DEVICE, 0, 50, 0, 16, DEVICE),
    )  # fmt: skip
    lines = str(dataclasses.replace(table_plan(), pieces=pieces, learned=None)).splitlines()
    users = " ".join(" ".join(lines[next(i for i, line in enumerate(lines) if line.startswith("  users")) :]).split())
    assert "rows 0-9 copied: to each; rows 10-59 on devices: rows 10-39 on 0, 40-59 on 1; rows 60-99 on hosts" in users
    assert "hosts: columns 0-3 on 0, 4-7 on 1" in users
    assert lines[-1].endswith("a copy on each device")
