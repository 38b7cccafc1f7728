"""Bridge's `pretrain` with the seams of moe_ft around it.

Bridge calls `_pretrain` through its module, so that one name is wrapped, whenever a script has imported
`pretrain`. Before it the configuration is not final.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.bridge.training import initialize
from megatron.bridge.training import pretrain as _module
from megatron.core.datasets import utils as dataset_utils

from megatron.fault_tolerance.bridge.dialect import Dialect
from megatron.fault_tolerance.bridge.fields import untested_lines
from megatron.fault_tolerance.bridge.loop import BridgeLoop
from megatron.fault_tolerance.bridge.refusals import (
    check_bridge,
    check_overrides,
    in_words_of_bridge,
)
from megatron.fault_tolerance.bridge.versions import BRIDGE_SEAMS, CLEANUP, check_bridge_seams
from megatron.fault_tolerance.bridge.view import BridgeArgs
from megatron.fault_tolerance.launch import pretraining
from megatron.fault_tolerance.launch.environment import (
    prepare_environment,
    prepare_restarts,
    take_slurms_variables,
)
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.settings import (
    check_model,
    checked_config,
    lines_on_megatron,
    void_settings,
    warn,
)
from moe_ft import saying
from moe_ft.config.untested import MEGATRON
from moe_ft.loop.refusing import refusing

_trained: list[bool] = []


def has_trained() -> bool:
    """Return whether this process has called Bridge's `pretrain`."""
    return bool(_trained)


@contextmanager
def protected(words: Sequence[str]) -> Iterator[None]:
    """Have Bridge's `pretrain` train under moe_ft in this context.

    The process ends with EXIT_REFUSED if the flags or the configuration cannot work, and otherwise as
    `megatron.fault_tolerance.pretrain` ends it.

    Args:
        words: --moe-ft-* flags, as on a command line.
    """
    take_slurms_variables()
    prepare_environment(words)
    with Patches() as patches:
        wrap(words, patches)
        yield


def wrap(words: Sequence[str], patches: Patches | None = None) -> None:
    """Have Bridge's `pretrain` train under moe_ft, until the patches end, or in the whole process.

    Call it after `prepare_environment`.
    """
    # Bridge has taken the function by its name, perhaps before.
    initialize.compile_helpers = dataset_utils.compile_helpers
    (patches or Patches()).wrap(_module, "_pretrain", partial(_train, tuple(words)))


def _train(words: Sequence[str], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _trained.append(True)
    state = kwargs["state"] if "state" in kwargs else args[0]
    view = BridgeArgs(state.cfg, state, words)
    loop = BridgeLoop(state)
    held: list[Callable[[], Any]] = []

    def call(store: Any = None) -> Any:
        more = {} if store is None else {"store": store}
        return original(*args, **{**kwargs, **more})

    with saying.in_words_of(partial(in_words_of_bridge, config=state.cfg)):
        with refusing():
            check_overrides(sys.argv)
            check_bridge(state.cfg, view)
            is_allowed = MEGATRON.is_allowed(view.moe_ft_allow_untested)
            lines = check_bridge_seams(allow_misfit=is_allowed)
        # From here on the functions of Megatron-LM's own loop need not fit.
        with Dialect(state, view, loop).installed():
            with refusing():
                warn(view, [*lines, *lines_on_megatron(view)])
                prepare_restarts()
                config = checked_config(view)
                check_model(view, config)
                warn(view, [*void_settings(view, config, words), *untested_lines(view, state.cfg)])
            with _without_ending_groups(held):
                result = pretraining.train(config, view, call, loop)
    for end in held:
        end()
    return result


@contextmanager
def _without_ending_groups(held: list[Callable[[], Any]]) -> Iterator[None]:
    """Hold back what ends the process groups: listeners need them until they have ended.

    After a failure nothing ends them but the end of the process, as in Megatron-LM.
    """
    name = "_maybe_destroy_process_group"
    with Patches() as patches:
        original = getattr(*BRIDGE_SEAMS[name].place)
        patches.set(_module, name, lambda *args: held.append(partial(original, *args)))
        if hasattr(_module, CLEANUP):
            patches.set(_module, CLEANUP, lambda *args, **kwargs: None)
        yield
