"""A conversion from its command to its end: open, list, check, write shard by shard, verify, publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from moe_ft.bars import progress_bar
from moe_ft.config.stock_defects import NOT_GATHERED, SHARED_RANDOM_STATE
from moe_ft.convert.destination import Destination, LocalDestination, RemoteDestination
from moe_ft.convert.foreign_files import path_of
from moe_ft.convert.huggingface.mapping import flags_of
from moe_ft.convert.huggingface.release import is_release, open_release
from moe_ft.convert.huggingface.writing import HuggingFace
from moe_ft.convert.megatron_checkpoint import is_megatron_checkpoint, open_megatron_checkpoint
from moe_ft.convert.model import Format, Item, Shards, SourceModel, into_shards, list_items
from moe_ft.convert.run_model import model_of_run
from moe_ft.convert.safetensors_set import SafetensorsSet
from moe_ft.convert.source import open_source
from moe_ft.convert.torch_dist import TorchDist
from moe_ft.convert.verifying import WrittenFile, write_and_verify
from moe_ft.errors import ConfigError, MoeFtError
from moe_ft.format.encoding import checksum
from moe_ft.tables import table


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRequest:
    """A conversion, as the command line gives it.

    Attributes:
        iteration: of the checkpoint in a directory of several; None for the newest.
        what: "weights" or "all"; None for all that both source and destination can hold.
        family: of Hugging Face; None to choose it by the settings.
        dtype: of weights, None for their own.
        for_ep: --expert-model-parallel-size of the job that will load it; None for that of the run.
        shard_bytes: most bytes of a file, unless one tensor has more.
    """

    source: str
    destination: str
    to: str
    iteration: int | None = None
    what: str | None = None
    family: str | None = None
    dtype: str | None = None
    for_ep: int | None = None
    shard_bytes: int = 2 << 30


# Optimizers by format: Megatron's saves have groups of parameters of each of the optimizers that it chains
# then, and SOAP's factors belong to no tensor of the model.
_NOT_WRITTEN = {
    "torch_dist": ("lion", "muon", "adaptive_muon", "soap"),
    "safetensors": ("soap",),
}


def convert(conversion: ConversionRequest, *, is_dry_run: bool = False) -> str:
    """Convert a checkpoint, or only list what would be written; return lines for people.

    Raises:
        MoeFtError: if that is not possible. Nothing that is half written is left.
    """
    if conversion.shard_bytes <= 0:
        raise ConfigError(
            f"--shard-size={conversion.shard_bytes} must be a positive number of bytes"
        )
    model = open_model(conversion.source, conversion.iteration)
    with_optimizer = _with_optimizer(conversion, model)
    written = _format(conversion, model, with_optimizer=with_optimizer)
    tensors = written.select(model.tensors())
    items = list_items(tensors, with_optimizer=with_optimizer, dtype=conversion.dtype)
    shards = into_shards(items, conversion.shard_bytes, written.file_of)
    what = "all" if with_optimizer else "weights"
    destination = _destination(conversion, model, items, what)
    num_bytes = sum(item.num_bytes for item in items)
    destination.check(num_bytes)
    if is_dry_run:
        return _list(written, shards)
    try:
        _write(written, destination, shards, items, f"{conversion.to} {model.iteration}")
    except MoeFtError:
        raise
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"DST={destination.place} could not be written from {model.place}: {error}. {destination.left}"
        ) from error
    num_tensors = len({name for item in items for name in written.names_of(item)})
    lines = [
        f"{destination.place}: iteration {model.iteration} as {conversion.to}, {num_tensors} tensors, "
        f"{num_bytes} bytes in {len(shards)} shards, verified"
    ]
    own_ep = int(model.settings.get("--expert-model-parallel-size") or 1)
    if conversion.to == "torch_dist" and with_optimizer and (conversion.for_ep or own_ep) > 1:
        lines.append(SHARED_RANDOM_STATE)
    is_layer_wise = model.settings.get("--optimizer") in _NOT_WRITTEN["torch_dist"]
    if conversion.to == "torch_dist" and is_layer_wise:
        lines.append(NOT_GATHERED)
    lines += model.notes
    if model.kind == "hf":
        lines += ["flags of the model:", " ".join(flags_of(model.settings))]
    return "\n".join(lines)


def open_model(directory: str, iteration: int | None = None) -> SourceModel:
    """Return the model in a directory or fsspec URL."""
    folder = path_of(directory)
    if isinstance(folder, Path) and not folder.is_dir():
        found = "is a file. Name the folder that it is in" if folder.exists() else "is not there"
        raise ConfigError(
            f"SRC={folder} must be a folder, but {found}. It may hold a run of moe_ft, checkpoints of "
            "Megatron, or a model of Hugging Face."
        )
    if is_release(folder):
        if iteration is not None:
            raise ConfigError(
                f"--iteration={iteration}: {folder} is a model of Hugging Face, which has no iterations. "
                "Leave it out."
            )
        return open_release(folder)
    if is_megatron_checkpoint(folder):
        return open_megatron_checkpoint(folder, iteration)
    return model_of_run(open_source(directory.removeprefix("file://"), iteration))


def _with_optimizer(conversion: ConversionRequest, model: SourceModel) -> bool:
    """Return whether masters and moments are converted too."""
    is_possible = model.kind == "moe_ft" and conversion.to != "hf"
    optimizer = model.settings.get("--optimizer")
    is_left_out = is_possible and optimizer in _NOT_WRITTEN.get(conversion.to, ())
    if is_left_out and conversion.what != "weights":
        raise ConfigError(
            f"--what={conversion.what or 'all'}: the state of --optimizer {optimizer} cannot be written as "
            f"{conversion.to}. Give --what weights."
        )
    if conversion.what == "all" and not is_possible:
        place = model.place if model.kind != "moe_ft" else "a model of Hugging Face"
        raise ConfigError(
            f"--what=all: only weights are read from or written to {place}. Give --what weights."
        )
    return is_possible and conversion.what != "weights"


def _format(conversion: ConversionRequest, model: SourceModel, *, with_optimizer: bool) -> Format:
    if conversion.family is not None and conversion.to != "hf":
        raise ConfigError(f"--family={conversion.family} is only for --to hf. Leave it out.")
    if conversion.to == "torch_dist":
        return TorchDist(model, with_optimizer=with_optimizer, for_ep=conversion.for_ep)
    if conversion.to == "hf":
        return HuggingFace(model, conversion.family)
    return SafetensorsSet(model)


def _destination(
    conversion: ConversionRequest, model: SourceModel, items: Sequence[Item], what: str
) -> Destination:
    options = (conversion.to, what, conversion.dtype, conversion.for_ep, conversion.shard_bytes)
    listed = [(item.tensor.name, item.kind, item.dtype) for item in items]
    plan = checksum(repr((options, conversion.family, model.signature, listed)).encode())
    description = f"iteration {model.iteration} of {model.place} to {conversion.to}, --what {what}"
    url = conversion.destination.removeprefix("file://")
    if "://" in url:
        return RemoteDestination(url, plan, description, conversion.shard_bytes)
    return LocalDestination(url, plan, description)


def _write(
    written: Format, destination: Destination, shards: Shards, items: Sequence[Item], name: str
) -> None:
    sizes = [sum(item.num_bytes for item in shard) for shard in shards]
    total = sum(sizes)
    with destination.writing(), progress_bar(name, total, in_bytes=True) as bar:

        def write(number: int) -> WrittenFile:
            return written.write_shard(destination.work, number, len(shards), shards[number])

        def note(number: int, found: Mapping[str, Any]) -> None:
            destination.note(str(number), found)
            bar.advance(sizes[number])

        missing = [n for n in range(len(shards)) if destination.written(str(n)) is None]
        bar.advance(total - sum(sizes[number] for number in missing))
        write_and_verify(missing, write, note)
        facts = [destination.written(str(number)) for number in range(len(shards))]
        written.finish(destination.work, facts, items)


def _list(written: Format, shards: Shards) -> str:
    rows = [
        (
            item.tensor.unit,
            item.tensor.iterations[item.kind],
            " ".join(written.names_of(item)),
            "x".join(map(str, item.tensor.shape)),
            item.dtype,
            number + 1,
        )
        for number, shard in enumerate(shards)
        for item in shard
    ]
    headers = ("unit", "iteration", "written as", "shape", "type", "shard")
    return table(rows, headers)
