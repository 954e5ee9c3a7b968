"""Where the members of a group meet: by the rank table in shared memory, through the shards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from flashrun import messages
from flashrun.rendezvous.server import look_up_no_names
from flashrun.rendezvous.table import RankTable, Seat, assign_ranks
from flashrun.worker.bootstrap import Bootstrap
from flashrun.worker.communicator import Gloo, meet

look_up_no_names()  # as many connect at a time, which not every resolver answers

LONG = timedelta(seconds=30)


def server() -> Any:
    return c10d.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)


def table_of(slots: Sequence[int], ports: Sequence[int]) -> RankTable:
    seats = [
        Seat(f"n{i}", count, "r", "127.0.0.1", shard=port)
        for i, (count, port) in enumerate(zip(slots, ports, strict=True))
    ]
    return RankTable(
        1, 0, 0, "j", sum(slots), "127.0.0.1", 1, True, assign_ranks(seats), token="secret"
    )


def wanted() -> None:
    """Always."""


class Cluster:
    """A store, a shard for each node, and what each worker finds in its environment."""

    def __init__(self, folder: Path, slots: Sequence[int], shards: Sequence[bool]) -> None:
        self.store = server()
        self.shards = [server() if there else None for there in shards]
        self.table = table_of(slots, [0 if s is None else s.port for s in self.shards])
        self.folder = folder
        for node in self.table.nodes:
            self.table.lay(self.path(node.node), node.node, node.addr)

    def path(self, node: str) -> str:
        return str(self.folder / f"table.{node}")

    def bootstrap(self, rank: int) -> Bootstrap:
        node = next(n for n in self.table.nodes if rank in n.ranks)
        environ = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port),
            "GROUP_RANK": str(node.group_rank), messages.CHANNEL: "/x/channel.1",
            messages.TABLE: self.path(node.node),
        }  # fmt: skip
        return Bootstrap(environ)

    def sums(self, ranks: Sequence[int], generation: int = 0) -> list[float]:
        """What each of ``ranks`` gets from an all-reduce in a group of them."""

        def worker(index: int) -> float:
            bootstrap = self.bootstrap(ranks[index])
            store = bootstrap.store(generation, "g.0", ranks, LONG, wanted)
            group = Gloo.make(store, index, len(ranks), LONG, wanted)
            value = torch.full((3,), float(ranks[index]))
            group.issue("allreduce", ([value], c10d.AllreduceOptions())).wait()
            # Nobody leaves before all have it.
            group.issue("barrier", (c10d.BarrierOptions(),)).wait()
            return float(value[0])

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(worker, range(len(ranks))))


def test_the_nodes_of_a_group() -> None:
    table = table_of([2, 3, 1], [1, 2, 3])
    assert table.places([0, 1, 2, 3, 4, 5]) == {0: [0, 1], 1: [2, 3, 4], 2: [5]}
    assert table.places([5, 1, 4]) == {0: [1], 1: [2], 2: [0]}
    assert table.places([3, 2]) == {1: [0, 1]}


def test_a_table_that_is_laid_has_no_secret(tmp_path: Path) -> None:
    table = table_of([2, 2], [7, 8])
    table.lay(str(tmp_path / "table.1"), "n1", "10.0.0.9")
    text = (tmp_path / "table.1").read_text()
    assert "secret" not in text
    nodes = RankTable.from_json(text).nodes
    assert nodes == (table.nodes[0], replace(table.nodes[1], addr="10.0.0.9"))


@pytest.mark.parametrize("ranks", [range(5), [4, 0, 2], [1, 2], [2, 3]])
def test_a_group_is_built_through_the_shards(tmp_path: Path, ranks: Sequence[int]) -> None:
    cluster = Cluster(tmp_path, [2, 2, 1], [True] * 3)
    assert cluster.sums(ranks) == [float(sum(ranks))] * len(ranks)
    assert cluster.store.num_keys() <= 1, "nothing of it is in the one store"  # torch's own key
    assert cluster.sums(ranks, generation=1) == [float(sum(ranks))] * len(ranks)


def test_without_a_shard_on_every_node_there_is_the_one_store(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, [2, 1], [True, False])
    assert cluster.sums(range(3)) == [3.0] * 3
    assert cluster.store.num_keys() > 1


@pytest.mark.parametrize("shard", [True, False])
def test_a_generation_with_another_node_in_a_lost_ones_place(tmp_path: Path, shard: bool) -> None:
    """Those that stay find it by the table of that generation; where it has no shard, all go to the
    one store."""
    cluster = Cluster(tmp_path, [1, 1], [True, True])
    stays = cluster.bootstrap(0)
    stays.store(0, "g.0", [0, 1], LONG, wanted)
    cluster.shards[1] = spare = server()
    seat = Seat("spare", 1, "r", "127.0.0.1", shard=spare.port if shard else 0)
    cluster.table = cluster.table.with_instead("n1", seat)
    for node in cluster.table.nodes:
        cluster.table.lay(cluster.path(node.node), node.node, node.addr)
    replacement = cluster.bootstrap(1)
    with ThreadPoolExecutor(2) as pool:
        found = list(
            pool.map(
                lambda rank: meet(
                    (stays, replacement)[rank].store(1, "g.0", [0, 1], LONG, wanted),
                    rank, 2, f"word {rank}", 30.0, wanted,
                ),
                range(2),
            )
        )  # fmt: skip
    assert found == [["word 0", "word 1"]] * 2
    assert (spare.num_keys() > 1) is shard
    assert (cluster.store.num_keys() > 1) is not shard


def test_the_homes_of_the_default_store_are_those_of_the_newest_table(tmp_path: Path) -> None:
    """What was at MASTER_ADDR is lost with the first node, and no other one."""
    cluster = Cluster(tmp_path, [1, 1, 1], [True] * 3)
    assert cluster.bootstrap(1).spread is None, "nodes that serve no store"
    nodes = tuple(replace(node, store=9) for node in cluster.table.nodes)
    cluster.table = replace(cluster.table, nodes=nodes)
    spare = server()
    first = cluster.table.nodes[0].node
    for lost, address in (("n2", cluster.store.port), (first, spare.port)):
        seat = Seat(f"for-{lost}", 1, "r", "127.0.0.1", shard=spare.port, store=spare.port)
        cluster.table = cluster.table.with_instead(lost, seat)
        cluster.table.lay(cluster.path("n1"), "n1", "127.0.0.1")
        bootstrap = cluster.bootstrap(1)
        assert bootstrap.spread == replace(cluster.table, token="")
        assert bootstrap._address == ("127.0.0.1", address)
