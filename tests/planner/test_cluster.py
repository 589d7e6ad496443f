"""A cluster's numbers: files, rates, and which link a group uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimegatron.errors import ConfigError
from minimegatron.footprint.events import Operation
from minimegatron.planner.cluster import CALIBRATED, CLUSTERS, Cluster, read_cluster, write_cluster

ROUND = Cluster(
    gpus_per_node=4, matmul=100.0, matmul_share=0.5, copy=10.0, copy_share=0.5, inside=8.0, between=2.0,
    link_share=0.5, latency_inside=1.0, latency_between=3.0,
)  # fmt: skip


def test_a_file_says_the_same(tmp_path: Path) -> None:
    write_cluster(ROUND, tmp_path / "c.json")
    assert read_cluster(str(tmp_path / "c.json")) == ROUND


def test_every_gpu_says_what_its_shares_come_from() -> None:
    assert set(CALIBRATED) == {cluster.gpu for cluster in CLUSTERS.values()}
    assert all(read_cluster(name) is cluster for name, cluster in CLUSTERS.items())
    assert CLUSTERS["h100"].matmul == 989.5e12


def test_memory_is_what_a_card_has_and_not_what_it_is_sold_as() -> None:
    """MiB as nvidia-smi reports them; torch, which does not see the driver's part, has a little less."""
    reported = {name: cluster.memory / 2**20 for name, cluster in CLUSTERS.items()}
    assert reported == {"a100": 81_920, "h100": 81_559, "h200": 143_771, "b200": 183_359}
    assert CLUSTERS["h100"].usable == 81_559 * 2**20 - 4 * 2**30 and CLUSTERS["h100"].usable < 79.1 * 2**30


@pytest.mark.parametrize(
    "name, text, what",
    [
        ("h10", None, "did you mean `h100`"),
        ("none.json", None, "No such file"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", '{"memmory": 1}', "did you mean `memory`"),
        ("a.json", '{"matmul": 0}', "must be above 0"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path: Path, name: str, text: str | None, what: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=what):
        read_cluster(str(tmp_path / name) if name.endswith(".json") else name)


def test_a_product_takes_its_arithmetic_and_its_bytes() -> None:
    assert ROUND.operation(Operation("aten.mm", 100.0, 10)) == 2.0 + 2.0 and ROUND.moved(10.0) == 2.0


def test_a_ring_inside_a_node() -> None:
    assert ROUND.collective("all_gather", 16.0, (4, 5, 6, 7)) == 16 * 3 / 4 / 4.0 + 3 * 1.0
    assert ROUND.collective("all_reduce", 16.0, (4, 5, 6, 7)) == 2 * 16 * 3 / 4 / 4.0 + 2 * 2 * 1.0
    assert ROUND.collective("all_reduce", 0.0, tuple(range(4096))) == 2 * 12 * 3.0
    assert ROUND.collective("all_reduce", 16.0, (4,)) == 0.0


def test_a_ring_between_nodes_has_the_cards_of_its_ranks() -> None:
    assert ROUND.rate((0, 4)) == 1.0 and ROUND.rate((0, 1, 4, 5)) == 2.0
    assert ROUND.rate(tuple(range(8))) == 4.0, "no faster than the link inside"
    assert ROUND.collective("all_gather", 8.0, (0, 4)) == 8 / 2 / 1.0 + 3.0


def test_a_ring_has_the_cards_of_the_node_with_the_fewest_of_its_ranks() -> None:
    """Six ranks two apart, on nodes of eight: four on one node, two on the other."""
    eight = Cluster.from_dict(ROUND.to_dict() | {"gpus_per_node": 8})
    assert eight.rate((0, 2, 4, 6, 8, 10)) == eight.rate((4, 6, 8, 10, 12, 14)) == 2.0
    assert ROUND.collective("all_gather", 10.0, (0, 1, 2, 3, 4)) == 10 * 4 / 5 / 1.0 + 4 * 3.0
    assert ROUND.collective("all_to_all", 100.0, (0, 1, 2, 3, 4)) == pytest.approx(80 / 1.0 + 4 * 3.0)


def test_rows_for_another_node_leave_through_a_rank_s_own_card() -> None:
    """Half of what a rank sends is for the other four: 60 bytes at 1 a second; inside a node all of it at 4."""
    assert ROUND.collective("all_to_all", 120.0, range(8)) == pytest.approx(60 + 7 * 3)
    assert ROUND.collective("all_to_all", 120.0, range(4)) == pytest.approx(90 / 4 + 3 * 1)


def test_a_message_has_one_card_and_one_latency() -> None:
    assert ROUND.message(4.0, (0, 4)) == 4 / 1.0 + 3.0 and ROUND.message(4.0, (0, 1)) == 4 / 4.0 + 1.0
    assert ROUND.collective("ring_shift", 4.0, (0, 1)) == 4 / 4.0 + 1.0


def test_a_cluster_is_plain_data() -> None:
    assert Cluster.from_dict(json.loads(json.dumps(ROUND.to_dict()))) == ROUND
