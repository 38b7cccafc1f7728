"""Two nodes that fail together: their state is in memory where replicas are in other failure domains."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

import pretrain_gpt_moe
from moe_ft.engine.links import streams
from moe_ft.engine.links.streams import Streams
from moe_ft.engine.links.transport import Connection
from tests.jobs import CheckpointJob

NODES = ("n0", "n1", "n2", "n3")
LOST = ("n0", "n1")
FLAGS = ("--moe-ft-replication-factor", "1")
NUM_STREAMS = 3


def train_in_small_pieces(folder: str, flags: list[str]) -> None:
    """Train where several streams carry almost everything; note by their number what they carry together."""
    original = Streams._together

    def together(self: Streams, act: Callable[[Connection], None]) -> None:
        with (Path(folder) / f"carried_by_{len(self._all)}").open("a") as file:
            file.write(".")
        original(self, act)

    with patch.object(streams, "PIECE_BYTES", 1024), patch.object(Streams, "_together", together):
        pretrain_gpt_moe.main(flags)


def lose_rack(job: CheckpointJob, *flags: str) -> None:
    """Run a job of four nodes, lose two of them with their memory in iteration 4, and start it again."""
    job.set_model(4, {"ep": 2})

    def lose_the_other(start: int) -> None:
        shutil.rmtree(job.memory_dir / "test" / LOST[1])
        for path in job.folder.glob("carried_by_*"):
            path.rename(path.with_stem(f"before_{path.name}"))

    job.run_with_faults(
        f"lose-node:{NODES.index(LOST[0])}@4:backward",
        flags=(*FLAGS, *flags),
        nodes=lambda start: NODES,
        between=lose_the_other,
        max_restarts=1,
    )
    job.train = None
    assert job.digests() == job.reference()


@pytest.mark.usefixtures("settled")
def test_loss_of_a_failure_domain_is_recovered_from_memory_over_several_streams(
    job: CheckpointJob,
) -> None:
    racks = job.folder / "racks"
    racks.write_text("".join(f"{node} {'a' if node in LOST else 'b'}\n" for node in NODES))
    job.train = partial(train_in_small_pieces, str(job.folder))
    lose_rack(job, "--moe-ft-failure-domain", str(racks), "--moe-ft-streams", str(NUM_STREAMS))
    carried = sorted(path.name for path in job.folder.glob("*carried_by_*"))
    assert carried == [f"before_carried_by_{NUM_STREAMS}", f"carried_by_{NUM_STREAMS}"]
    assert job.recovered() in ([(3, 3)], [(4, 4)])
    for rank, node in enumerate(NODES):
        (line,) = job.events("recovery", rank)
        assert [*line["sources"]] == ["peer" if node in LOST else "memory"]


@pytest.mark.rest
def test_same_loss_without_domains_leaves_nothing(job: CheckpointJob) -> None:
    with pytest.raises(
        AssertionError, match=r"none of it can be used: .* no state of rank 0 in any"
    ):
        lose_rack(job)
