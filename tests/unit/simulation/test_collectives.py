"""Process groups of simulated ranks: they exchange, and they fail as those of gloo do."""

from collections.abc import Callable
from typing import Any

import pytest

from moe_ft.engine.agreement import Agreement
from moe_ft.engine.exchange import INT
from tests.simulation.kernel import Process
from tests.unit.simulation.simulated import Simulated

TIMEOUT_S = 600.0


def ranks(
    simulated: Simulated, act: Callable[[int], Any], world_size: int = 3, start: int = 0
) -> list[Process]:
    def main(rank: int) -> None:
        try:
            act(rank)
        except RuntimeError as error:
            simulated.say((rank, str(error)))

    return [
        simulated.rank(lambda rank=rank: main(rank), rank, world_size, start)
        for rank in range(world_size)
    ]


def dying(simulated: Simulated, dead: list[Process]) -> Callable[[int], None]:
    """Return an act in which rank 1 dies, while the others wait for it in an all-reduce."""

    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 1:
            simulated.kernel.sleep(10.0)
            simulated.kernel.end(simulated.world.process)
        agreement.begin([rank])
        with pytest.raises(RuntimeError) as caught:
            agreement.result()
        simulated.say(str(caught.value))
        with pytest.raises(RuntimeError) as caught:
            agreement.gather(rank, INT)
        simulated.say(str(caught.value))

    return act


def test_end_of_a_rank_fails_all_that_need_it(simulated: Simulated) -> None:
    ranks(simulated, dying(simulated, []))
    simulated.run()
    assert len(simulated.said) == 4
    assert all("Connection closed by peer [node-1]" in each for each in simulated.said)
    assert all(10.0 < now < 10.5 for now, _ in simulated.trace)


def test_end_of_a_rank_may_be_seen_by_nobody(simulated: Simulated) -> None:
    simulated.collectives.hang_probability = 1.0
    ranks(simulated, dying(simulated, []))
    simulated.run()
    assert "Timed out waiting 120000ms" in simulated.said[0]
    assert 120.0 < simulated.trace[0][0] < 121.0


def test_lost_node_is_noticed_by_the_timeout_only(simulated: Simulated) -> None:
    def act(rank: int) -> None:
        agreement = Agreement(TIMEOUT_S)
        agreement.start()
        if rank == 1:
            simulated.network.lose("node-1")
            simulated.kernel.end(simulated.world.process)
        agreement.begin([rank])
        agreement.result()

    ranks(simulated, act)
    simulated.run()
    assert "Timed out waiting 120000ms" in simulated.said[0][1]
    assert simulated.trace[0][0] > 120.0


def test_some_ranks_may_have_a_result_that_others_lack() -> None:
    counts = set()
    for seed in range(60):
        with Simulated(seed) as simulated:

            def act(rank: int, simulated: Simulated = simulated) -> None:
                agreement = Agreement(TIMEOUT_S)
                agreement.start()
                agreement.begin([rank])
                if rank == 1:
                    simulated.kernel.end(simulated.world.process)
                agreement.result()
                simulated.say("done")

            ranks(simulated, act)
            simulated.run()
            counts.add(simulated.said.count("done"))
    assert counts == {0, 1, 2}
