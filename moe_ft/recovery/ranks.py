"""Process groups through which the ranks of a job exchange values at a start: all ranks, and each stage's."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.errors import ConfigError, StorageAwayError
from moe_ft.recovery.facts import JobFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The groups of this rank. All methods are called by all ranks of the group.

    Attributes:
        everyone: all ranks of the job.
        stage: the ranks of this rank's stage.
    """

    everyone: Agreement
    stage: StageSum

    def check_together[Answer](self, check: Callable[[], Answer]) -> Answer:
        """Run a check on all ranks; if it fails on one, raise its ConfigError or StorageAwayError on all."""
        problem: tuple[type[Exception], str] | None = None
        try:
            answer = check()
        except (ConfigError, StorageAwayError) as error:
            problem = type(error), str(error)
        for each in self.everyone.gather(problem):
            if each is not None:
                kind, text = each
                raise kind(text)
        return answer


def join_ranks(facts: JobFacts, opened: ExitStack) -> Ranks:
    """Create the groups. Called by all ranks."""
    ranks = Ranks(everyone=Agreement(facts.timeout_s), stage=StageSum(facts.timeout_s))
    opened.callback(ranks.everyone.close)
    ranks.everyone.start()
    opened.callback(ranks.stage.close)
    ranks.stage.start(ranks.everyone.gather(facts.stage), facts.rank)
    return ranks
