"""Memory of a job that has died for good becomes a checkpoint, from which another start continues exactly."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from moe_ft.cli import main
from tests.jobs import TWO_NODES, CheckpointJob
from tests.references import Digests
from tests.shares import share_of

INCOMPLETE, REFUSED = 1, 2
STRATEGIES = {
    "dense": (),
    "sparse": ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2"),
    "partial": ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4"),  # of four: all
}


PLACES = ("one machine", "two machines")
CASES = [*product(STRATEGIES, PLACES)]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("case", share_of(CASES, ("dense", PLACES[1])), ids=str)
def test_run_continues_exactly_from_what_was_rescued(
    case: tuple[str, str],
    job: CheckpointJob,
    expected: Digests,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags, is_on_two = STRATEGIES[case[0]], case[1] == PLACES[1]
    job.run(*flags, "--moe-ft-inject-fault", "kill:1@4:backward", nodes=TWO_NODES)
    memory = job.memory_dir / "test"
    own = next(memory.glob("*/rank_00001")).parent
    words = ["rescue", "test", "--to", str(job.storage), "--memory-dir"]
    if is_on_two:  # each with the memory of its own node, at the same time
        other = job.folder / "other"
        shutil.copytree(memory, other / "test")
        shutil.rmtree(other / "test" / own.name)
        for node in memory.iterdir():
            if node.is_dir() and node != own:
                shutil.rmtree(node)
        with ThreadPoolExecutor() as pool:
            ends = pool.map(
                lambda each: main([*words, str(each), "--wait", "5"]), (job.memory_dir, other)
            )
            assert list(ends) == [0, 0]
    else:
        shutil.rmtree(own)  # rank 1 has a replica on the other node
        assert main([*words, str(job.memory_dir)]) == 0
    said = capsys.readouterr().out
    (iteration,) = job.stored()
    assert iteration in (3, 4), "the newest, or the one before where a rank had not got further"
    assert f"is a checkpoint of iteration {iteration}, read and verified" in said
    assert ("of rank 1" in said and "from replica" in said) != is_on_two
    shutil.rmtree(memory)
    job.resume(*flags, storage=True)
    ((_, target),) = job.recovered()
    assert target == iteration
    assert job.digests() == expected
