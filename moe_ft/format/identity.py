"""The run that wrote a file: its starts, and the settings that its state depends on."""

import hashlib
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec

from moe_ft.command_lines import as_flag

# A file of somebody else may name any number, of which much is built.
MOST_RANKS = 1 << 17
# A setting besides the flags that decides which slices a rank has, such as the sizes of buckets.
CUTS = "cuts of the state (--overlap-grad-reduce, --ddp-bucket-size, --ddp-num-buckets, ...)"
# By flag that names files, each word as `name: what it holds`, or as the name alone where that is not known.
CONTENTS = "contents of files"
# In the contents; they decide no state.
EVALUATION = (
    *("--valid-data-path", "--test-data-path"),
    *("dataset.blend_per_split[valid]", "dataset.blend_per_split[test]"),  # Megatron-Bridge's
)
_FILES = msgspec.msgpack.Decoder(dict[str, list[str]])
# Only jobs that have slots have the setting.
_SLOTS = "--moe-ft-expert-slots"
# Settings that decide how state is divided among ranks and in which order numbers are summed up, not what the
# state is: of the fingerprint, then of the replay settings.
_LAYOUT = frozenset(
    as_flag(name)
    for name in [
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size",
        "tensor_model_parallel_size",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "mtp_standalone",
        "use_tp_pp_dp_mapping",
        "ddp_bucket_size",
        "ddp_num_buckets",
        "use_distributed_optimizer",
        "ddp_pad_buckets_for_high_nccl_busbw",
        "overlap_param_gather_with_optimizer_step",
        "virtual_pipeline_model_parallel_size",
        "world_size",
        "moe_grouped_gemm",
        "sequence_parallel",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
        "microbatch_group_size_per_vp_stage",
        "overlap_grad_reduce",
        "distributed_backend",
    ]
) | {CUTS, _SLOTS}


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
# Iteration, minus the number of snapshots, and the start that wrote it: the greater, the better.
Family = tuple[int, int, Start]


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
        script_settings: digests of the settings, by flag, that only the training script reads, or clear
            values of earlier versions; unset if none.
        superseded: names of the starts that the last start found something of and does not continue.
        began_with: the flags that begin the run from the weights of another run; empty without them.
    """

    job_id: str
    lineage: str
    history: History
    fingerprint: dict[str, Any]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
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

    def family(self, iteration: int, window: int) -> Family:
        """Return the family of a state: states of several ranks can be used together if theirs are equal.

        Two starts may have gone different ways from one state, and may group the units of a window
        differently.
        """
        return iteration, -window, self.start


def without_layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide more than how state is divided among ranks."""
    return {name: value for name, value in settings.items() if name not in _LAYOUT}


def has_other_layout(identity: Identity, ours: Mapping[str, Any], world_size: int) -> bool:
    """Return whether state is divided among other ranks, or in another way, than by a start.

    Args:
        ours, world_size: the fingerprint and the number of ranks of that start.
    """
    theirs = identity.fingerprint
    names = _LAYOUT & _compared(ours, theirs)
    return identity.world_size != world_size or any(
        ours.get(name, 0) != theirs.get(name, 0) for name in names
    )


def layout_of(identity: Identity) -> str:
    """Return a name for the layout that wrote something: equal for equal layouts, never empty."""
    names = sorted(_LAYOUT & identity.fingerprint.keys())
    values = [identity.world_size, *((name, identity.fingerprint[name]) for name in names)]
    # One object for all versions is sent only once.
    return sys.intern(msgspec.json.encode(values).decode())


def differing_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe, flag first, the settings that both have with different values, or files of other content."""
    there, now = _contents(theirs), _contents(ours)
    by_content = there.keys() & now.keys()
    differences = [
        f"{name}: {theirs.get(name, 0)} there, {ours.get(name, 0)} now"
        for name in sorted(_compared(ours, theirs) - by_content - {CONTENTS})
        if ours.get(name, 0) != theirs.get(name, 0)
    ]
    for flag in sorted(by_content):
        if len(there[flag]) != len(now[flag]):
            differences.append(f"{flag}: {len(there[flag])} words there, {len(now[flag])} now")
        differences += [
            f"{flag} {old} there, {new} now"
            for old, new in zip(there[flag], now[flag], strict=False)
            if _differ(old, new)
        ]
    return differences


def _differ(old: str, new: str) -> bool:
    """Compare the contents of two words, or their names if not both contents are known."""
    (old_name, _, old_content), (name, _, content) = old.partition(": "), new.partition(": ")
    return old_content != content if old_content and content else old_name != name


def _contents(settings: Mapping[str, Any]) -> dict[str, list[str]]:
    try:
        return _FILES.decode(msgspec.msgpack.encode(settings.get(CONTENTS, {})))
    except msgspec.ValidationError:  # of somebody else's file
        return {}


def incomparable_settings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that only one fingerprint has, as after a change of version."""
    return sorted((ours.keys() | theirs.keys()) - _compared(ours, theirs))


def _compared(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    return ours.keys() & theirs.keys() | {_SLOTS} & (ours.keys() | theirs.keys())


def digest_setting(name: str, value: str) -> str:
    """Return a digest of a value that is only compared: it may be a secret, and files are handed on."""
    text = f"{name}={value}".encode(errors="surrogatepass")
    return f"sha256:{hashlib.sha256(text).hexdigest()[:16]}"


def changed_settings(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the names of the settings that are given with different values, or only on one side.

    Args:
        ours: digests of values.
        theirs: digests, or the values themselves, as earlier versions kept them.
    """
    equal = {
        name
        for name in ours.keys() & theirs.keys()
        if ours[name] in (theirs[name], digest_setting(name, theirs[name]))
    }
    return sorted((ours.keys() | theirs.keys()) - equal)
