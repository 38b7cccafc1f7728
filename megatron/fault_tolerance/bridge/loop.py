"""Bridge's training loop as the listeners see it: Megatron's, with other calls of schedules and writers."""

from collections.abc import Mapping
from typing import Any, override

from megatron.training import get_args

from megatron.fault_tolerance.bridge.fields import data_words, own_settings, script_settings
from megatron.fault_tolerance.bridge.versions import called, installed_version
from megatron.fault_tolerance.seams.flag_classes import Settings, settings_as_used
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.config.flag_table import Kind
from moe_ft.format.records import Counted
from moe_ft.loop.training_loop import LoopParts


class BridgeLoop(MegatronLoop):
    """The loop of `megatron.bridge.training.train`. Owned by the training thread.

    Attributes:
        groups, links: process groups and point-to-point links, as Bridge passes them to its schedules.
    """

    def __init__(self, state: Any) -> None:
        """Take Bridge's GlobalState."""
        self._state = state
        self.groups: Any = None
        self.links: Any = None

    @override
    def settings(self) -> Settings:
        config = self._state.cfg

        def settings(kind: Kind) -> dict[str, Any]:
            return {**settings_as_used(get_args(), kind), **own_settings(config, kind)}

        return Settings(
            of_state=settings(Kind.FINGERPRINT),
            of_replays=settings(Kind.REPLAY),
            of_records=settings(Kind.RECORD),
            of_script=script_settings(config),
            data=data_words(config),
        )

    @override
    def start_fields(self) -> dict[str, Any]:
        return {**super().start_fields(), "megatron_bridge": installed_version()}

    @override
    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        with Patches() as patches:
            checks = self._state.cfg.rerun_state_machine
            patches.set(checks, "check_for_spiky_loss", False)
            super().run_forward_backward(parts, before, after)

    @override
    def schedule(self, parts: LoopParts) -> dict[str, Any]:
        own = {"p2p_communicator": self.links, "pg_collection": self.groups}
        if len(parts.model) > 1:  # Bridge has one iterator, and a view of it for each virtual stage
            iterators = called("make_data_iterator_list")
            own["data_iterator"] = iterators(parts.model, parts.data_iterator)
        return {**super().schedule(parts), **own}

    @override
    def write_scalars(self, scalars: Mapping[str, float], iteration: int) -> None:
        state = self._state
        for name, value in scalars.items() if state.tensorboard_logger else ():
            state.tensorboard_logger.add_scalar(name, value, iteration)
        if state.wandb_logger:
            state.wandb_logger.log(dict(scalars), iteration)
        for name in ("mlflow_logger", "comet_logger"):
            if writer := getattr(state, name, None):
                writer.log_metrics(dict(scalars), step=iteration)
