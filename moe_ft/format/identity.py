"""The run that wrote a file: its starts, and the settings that its state depends on."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec


class Start(NamedTuple):
    """One start of the processes of a run, as the histories of this run and of its continuations list it.

    Attributes:
        number: greater than the number of every start that this one found something of. Starts that could
            not see each other may have the same number.
        resumed_at: the iteration that it continued from.
        name: random; tells starts with the same number apart.
        is_chosen: whether --moe-ft-recover-from iter_N named that iteration.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    resumed_at: Annotated[int, msgspec.Meta(ge=0)]
    name: str = ""
    is_chosen: bool = False


History = tuple[Start, ...]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that wrote something.

    Attributes:
        lineage: the fresh start that the run goes back to.
        history: the starts of the run up to the writer's own, which is the last.
        fingerprint: the settings that state depends on, by flag.
        division: how a strategy that saves experts in parts divides them; empty if it saves them whole.
            Versions of runs that divide differently do not fit together.
        replay_settings: the further settings, by flag, that the result of an iteration depends on: those of
            a repeated iteration must be the same. Conversions say them to others.
        script_settings: the settings, by flag, that only the training script reads; unset if none.
        superseded: names of the starts that the last start found something of and does not continue.
        began_with: the flags that begin the run from the weights of another run; empty without them.
    """

    job_id: str
    lineage: str
    history: History
    fingerprint: dict[str, Any]
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    strategy: str
    division: str = ""
    replay_settings: dict[str, Any] = {}
    script_settings: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    superseded: tuple[str, ...] = ()
    began_with: str = ""

    @property
    def start(self) -> Start:
        """The start that wrote it."""
        return self.history[-1]


def differing_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the settings that both fingerprints have, with different values."""
    return [
        f"{name}: {theirs[name]} there, {ours[name]} now"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]


def incomparable_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that only one fingerprint has, as after a change of version."""
    return sorted(ours.keys() ^ theirs.keys())


def changed_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the settings that are given here and there with different values, or only once."""
    return [
        f"{name}: {_given(theirs, name)} there, {_given(ours, name)} now"
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def _given(settings: Mapping[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "not given"
