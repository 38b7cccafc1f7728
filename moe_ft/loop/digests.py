"""Digests of the training state in the event log, for --moe-ft-state-digest and its interval."""

from moe_ft.config.config import ObservabilityConfig
from moe_ft.events import EventLog
from moe_ft.loop.listeners import (
    Built,
    EndedIteration,
    LoopListener,
    LoopState,
)
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.state.digest import digest_state


class Digests(LoopListener):
    """Writes digests of this rank's state. Owned by the training thread."""

    def __init__(
        self,
        config: ObservabilityConfig,
        training: TrainingLoop,
        loop: LoopState,
        event_log: EventLog,
    ) -> None:
        self._config, self._training = config, training
        self._loop, self._log = loop, event_log
        self._built: Built | None = None

    def after_setup(self, built: Built) -> None:
        """Remember the objects that hold the state."""
        self._built = built

    def after_iteration(self, ended: EndedIteration) -> None:
        """Digest the new state, before it is evaluated, if its iteration is due."""
        interval = self._config.state_digest_interval
        if interval and ended.iteration % interval == 0:
            self._write(ended.num_samples)

    def after_training(self) -> None:
        """Digest the last state."""
        if self._config.state_digest:
            self._write(0)

    def _write(self, num_uncounted_samples: int) -> None:
        assert self._built is not None
        iteration = self._loop.iteration
        samples = self._training.sample_counters(num_uncounted_samples)
        counters = {"iteration": iteration, **samples}
        digest = digest_state(*self._built, counters)
        self._log.write(
            "state_digest", iteration, sha256=digest.sha256, sha256_all=digest.sha256_all
        )
