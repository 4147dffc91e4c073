# SPDX-License-Identifier: Apache-2.0
"""A variable that the servers' memory doesn't hold is refused with the numbers; counters of the tasks are made up."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.coordination.usage import Room, Usage
from tfdist.engines.scope_checks import MemoryCheck
from tfdist.tables.sharded_tables import ShardedTables

pytestmark = pytest.mark.devices

GB = 10**9
# 20 GB.
TABLE = (78_125_000, 64)


def check_of(machines: list[str], free: int, num_ps: int = 4, is_sharded: bool = True) -> MemoryCheck:
    """Servers on machines with so many bytes left each."""
    rooms = {machine: Room(machine, free, 16 * GB, "the machine") for machine in machines}
    usage = {f"ps:{index}": Usage(0, 0, 0.0, 1, 0.0, rooms=(rooms[each],)) for index, each in enumerate(machines)}
    partitioner = ShardedTables()
    partitioner.begin(num_ps)
    return MemoryCheck(partitioner if is_sharded else None, num_ps, lambda: usage)


def check(of: MemoryCheck, shape: tuple[int | None, ...] = TABLE, is_slot: bool = False) -> None:
    of.check("model/table/embeddings", shape, tf.float32, 0, is_slot)


def test_shards_on_one_machine_need_its_memory_together() -> None:
    with pytest.raises(MemoryError) as error:
        check(check_of(["a"] * 4, 12 * GB))
    for part in (
        "variable model/table/embeddings of shape (78125000, 64) takes 20.0 GB, 5.0 GB on each of 4 parameter servers",
        "Of 16.0 GB of the machine, ps:0, ps:1, ps:2, ps:3 may take 12.0 GB together, and need 20.0 GB",
        "twice as much for Adam",
    ):
        assert part in str(error.value)


def test_machines_are_compared_each_with_its_own_shards() -> None:
    check(check_of(["a", "b", "c", "d"], 6 * GB))
    check(check_of(["a", "a", "b", "b"], 11 * GB))
    with pytest.raises(MemoryError, match=r"slot .* ps:0, ps:1 may take 9.0 GB together, and need 10.0 GB"):
        check(check_of(["a", "a", "b", "b"], 9 * GB), is_slot=True)


def test_a_whole_table_is_on_one_server() -> None:
    with pytest.raises(MemoryError, match=r"all on ps:0.* ps:0 may take 12.0 GB"):
        check(check_of(["a", "b"], 12 * GB, 2, is_sharded=False))


def test_what_is_unknown_or_small_is_not_refused() -> None:
    check(check_of([], 0))
    check(check_of(["a"] * 4, 0), (1000, 64))
    check(check_of(["a"] * 4, 0), (None, 64))


def test_servers_are_looked_at_again_before_a_table_is_refused() -> None:
    """Memory that the program has let go is freed late."""
    usages = [
        {"ps:0": Usage(0, 0, 0.0, 1, 0.0, rooms=(Room("a", free, 64 * GB, "the machine"),))}
        for free in (1 * GB, 30 * GB)
    ]
    check(MemoryCheck(None, 1, lambda: usages.pop(0)))
    assert not usages
