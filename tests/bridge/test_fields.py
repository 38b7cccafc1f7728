"""Every field of Bridge's configuration has a class, and every name that moe_ft reads has one place."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import (
    FaultToleranceConfig,
    GPTDatasetConfig,
    GPTFIMDatasetConfig,
    GPTModelConfig,
    HybridModelConfig,
    InProcessRestartConfig,
    NVRxStragglerDetectionConfig,
    StragglerDetectionConfig,
    TensorInspectConfig,
)
from megatron.bridge.training.mixed_precision import bf16_mixed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import megatron.fault_tolerance
import moe_ft
from megatron.fault_tolerance.bridge import fields, refusals
from megatron.fault_tolerance.bridge.fields import RENAMED, Field, data_words, own_settings
from megatron.fault_tolerance.bridge.view import _FROM_CONFIG, BridgeArgs
from megatron.fault_tolerance.repair import rules
from megatron.fault_tolerance.seams.contents import add_files
from megatron.fault_tolerance.seams.flag_classes import UNKNOWN, settings_as_used
from megatron.fault_tolerance.seams.refusals import SCRIPT_REFUSALS
from moe_ft.config.flag_table import FLAGS, NEWER, OF_SCRIPTS, Kind, flag_classes, names_in
from moe_ft.format.identity import differing_settings
from tests.bridge.tiny_job import tiny_config

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
MODELS = (
    lambda: GPTModelProvider(**SIZES),
    lambda: MLAModelProvider(**SIZES),
    lambda: HybridModelProvider(**SIZES),
    lambda: MambaModelProvider(**SIZES),
    lambda: GPTModelConfig(transformer=TransformerConfig(**SIZES)),
    lambda: GPTModelConfig(transformer=MLATransformerConfig(**SIZES)),
    lambda: HybridModelConfig(transformer=TransformerConfig(**SIZES)),
)
DATA = (
    lambda: tiny_config().dataset,
    lambda: GPTDatasetConfig(seq_length=32, random_seed=1, blend=(["a", "b"], [0.3, 0.7])),
    lambda: GPTFIMDatasetConfig(seq_length=32, random_seed=1, fim_rate=0.5),
)
STATE = dict.fromkeys(
    (
        *("step", "floating_point_operations_so_far", "consumed_train_samples", "do_train"),
        *("consumed_valid_samples", "skipped_train_samples", "do_valid", "do_test"),
    ),
    0,
)
# Modules that Bridge's jobs do not come into: features that they are refused.
NOT_READ = ("degraded", "program", "custom", "elastic.py")


def whole_config(model: Any = None, data: Any = None) -> Any:
    """Return a configuration that has every section, as a job gets it."""
    config = tiny_config()
    config.set_data_parallel_size()
    config.validate()
    config.model, config.dataset = model or config.model, data or config.dataset
    config.mixed_precision = bf16_mixed()
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    config.ft = FaultToleranceConfig()
    config.straggler = StragglerDetectionConfig()
    config.nvrx_straggler = NVRxStragglerDetectionConfig()
    config.tensor_inspect = TensorInspectConfig()
    config.inprocess_restart = InProcessRestartConfig()
    return config


def view_of(config: Any) -> BridgeArgs:
    return BridgeArgs(config, SimpleNamespace(train_state=SimpleNamespace(**STATE)))


def fields_by_name(config: Any) -> dict[str, list[Field]]:
    found = defaultdict(list)
    for each in fields.fields_of(config):
        found[each.name].append(each)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("data", DATA)
def test_every_field_is_classified(model: Any, data: Any) -> None:
    config = whole_config(model(), data())
    unknown = [each.key for each in fields.fields_of(config) if each.of_class.subject == UNKNOWN]
    assert not unknown


def test_fields_of_flags_that_scripts_alone_read_have_a_class_of_their_own() -> None:
    config = whole_config()
    of_scripts = (each for each in fields.fields_of(config) if each.of_class.subject in OF_SCRIPTS)
    assert {each.key for each in of_scripts} <= {"dataset.full_validation"}  # a record has it


def test_refused_field_has_a_rule() -> None:
    own = {name for name, *_ in refusals._RULES} | {"inprocess_restart.enabled"}
    found = fields.fields_of(whole_config())
    assert {
        each.key for each in found if each.of_class.kind is Kind.REFUSED and not each.flag
    } <= own


@pytest.mark.parametrize("model", MODELS)
def test_name_in_several_sections_is_read_from_one(model: Any) -> None:
    undecided = {
        name: [each.key for each in found]
        for name, found in fields_by_name(whole_config(model())).items()
        if len([each for each in found if each.flag]) > 1 and name not in _FROM_CONFIG
    }
    assert not undecided


@pytest.mark.parametrize(
    ("name", "section"),
    [
        *(("eval_iters", "validation"), ("eval_interval", "validation"), ("seq_length", "model")),
        *(("overlap_param_gather", "ddp"), ("reuse_grad_buf_for_mxfp8_param_ag", "optimizer")),
        *(("vocab_size", "model"), ("context_parallel_size", "model"), ("bf16", "model")),
        *(("log_num_zeros_in_grad", "optimizer"), ("full_validation", "dataset")),
        *(("delay_wgrad_compute", "model"), ("tensor_model_parallel_size", "model")),
        *(("te_rng_tracker", "rng"), ("inference_rng_tracker", "rng"), ("fp8_recipe", "model")),
    ],
)
def test_name_is_read_from_the_section_that_bridge_reads(name: str, section: str) -> None:
    config, value = whole_config(), object()
    setattr(getattr(config, section), name, value)
    assert getattr(view_of(config), name) is value


@pytest.mark.parametrize("flag", sorted(RENAMED))
def test_renamed_flag_is_known_and_its_field_is_there(flag: str) -> None:
    assert flag in flag_classes()
    place = RENAMED[flag].removeprefix("not ")
    assert place in {each.key for each in fields.fields_of(whole_config())}


def sources() -> Iterator[Path]:
    folder = Path(megatron.fault_tolerance.__file__).parent
    yield from (each for each in folder.rglob("*.py") if not {*NOT_READ} & {*each.parts})
    own = Path(moe_ft.__file__).parent
    yield from (own / name for name in ("config/stock_defects.py", "planning/couplings.py"))


def names_that_are_read() -> set[str]:
    """Return the attributes of Megatron's arguments that the product cannot do without."""
    found = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in ("args", "get_args()", "self._args", "view"):
                    found.add(node.attr)
    return found | {name for name, _ in rules._RULES}


def test_view_has_every_name_that_the_product_reads() -> None:
    view = view_of(whole_config())
    missing = [name for name in sorted(names_that_are_read()) if not hasattr(view, name)]
    assert not missing
    refused = {rule.dest for rule in SCRIPT_REFUSALS if not hasattr(view, rule.dest)}
    assert refused <= {name for text in FLAGS[NEWER].values() for name in names_in(text)}


def test_name_that_bridge_lacks_has_no_default_of_megatron() -> None:
    view = view_of(whole_config())
    for name in ("data_path", "mock_data", "bias_swiglu_fusion", "data_args_path", "spec"):
        assert not hasattr(view, name)
    assert "--data-path" not in settings_as_used(view, Kind.FINGERPRINT)
    assert "--bias-swiglu-fusion" not in settings_as_used(view, Kind.REPLAY)


def test_view_writes_where_it_reads() -> None:
    config = whole_config()
    view = view_of(config)
    view.iteration, view.check_for_nan_in_loss_and_grad, view.no_load_optim = 7, False, True
    assert view.iteration == 7
    assert config.rerun_state_machine.check_for_nan_in_loss is False
    assert config.checkpoint.load_optim is False
    assert vars(view)["no_load_optim"] is True


def test_layout_of_lists_is_read_as_megatron_writes_it() -> None:
    config = whole_config()
    rows = [["embedding", "decoder"], ["decoder", "mtp", "loss"]]
    config.model.pipeline_model_parallel_layout = rows
    assert view_of(config).pipeline_model_parallel_layout == "Et|tmL"


def squared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor**2


CHANGES = [
    *(("model.activation_func", squared), ("model.gated_linear_unit", False)),
    *(("dataset.random_seed", 5), ("model.softmax_scale", 2.0), ("optimizer.bf16", True)),
    ("model.transformer_layer_spec", functools.partial(dict, use_transformer_engine=True)),
    *(("tokenizer.vocab_size", 99), ("model.quant_recipe", SimpleNamespace(bits=4))),
]


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_other_setting_is_another_fingerprint_in_words_of_bridge(key: str, value: Any) -> None:
    ours, other = whole_config(), whole_config()
    section, _, name = key.partition(".")
    setattr(getattr(other, section), name, value)
    before, after = (own_settings(each, Kind.FINGERPRINT) for each in (ours, other))
    assert [each.split(":")[0] for each in differing_settings(after, before)] == [key]
    assert own_settings(whole_config(), Kind.FINGERPRINT) == before
    assert " at 0x" not in str(after)


def test_field_of_a_newer_bridge_is_compared_and_named() -> None:
    config = whole_config()
    config.train.of_tomorrow = 3
    assert own_settings(config, Kind.FINGERPRINT)["train.of_tomorrow"] == 3
    assert f"{UNKNOWN}: train.of_tomorrow" in fields.untested_lines(view_of(config), config)[0]


def write_data_set(folder: Path, text: bytes) -> str:
    folder.mkdir(parents=True)
    (folder / "text.json").write_bytes(text)
    return str(folder / "text.json")


def state_of(*blends: Any, key: str = "blend") -> dict[str, Any]:
    config = whole_config(data=DATA[1]())
    config.dataset.blend = None
    setattr(config.dataset, key, blends if key == "blend_per_split" else blends[0])
    own, view = own_settings(config, Kind.FINGERPRINT), view_of(config)
    return add_files(view, own, {}, data_words(config))["fingerprint"]


def test_other_data_are_found_and_moved_ones_are_the_same(tmp_path: Path) -> None:
    first = write_data_set(tmp_path / "a", b"one")
    moved = write_data_set(tmp_path / "b", b"one")
    other = write_data_set(tmp_path / "c", b"two")
    ours = state_of(([first], [1.0]))
    assert not differing_settings(state_of(([moved], [1.0])), ours)
    for changed in (([other], [1.0]), ([first], [0.5]), ([first, moved], [0.5, 0.5])):
        (difference, *_) = differing_settings(state_of(changed), ours)
        assert difference.startswith("dataset.blend")


def test_data_of_evaluations_have_a_name_of_their_own(tmp_path: Path) -> None:
    paths = [([write_data_set(tmp_path / name, name.encode())], None) for name in "abcd"]
    ours = state_of(*paths[:3], key="blend_per_split")
    (difference,) = differing_settings(state_of(*paths[:2], paths[3], key="blend_per_split"), ours)
    assert difference.startswith("dataset.blend_per_split[test] ")
    (difference,) = differing_settings(state_of(*paths[1:], key="blend_per_split"), ours)[:1]
    assert difference.startswith("dataset.blend_per_split[t")
