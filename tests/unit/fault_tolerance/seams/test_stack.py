"""Layers around functions: called in the order of the page, whoever comes first, and taken off again."""

import re
from argparse import Namespace
from collections.abc import Callable

import pytest
from megatron.training import training

from megatron.fault_tolerance.seams import stack
from megatron.fault_tolerance.seams.stack import FINALIZE, SEAMS, Layer, Layers
from tests.unit.source import ROOT


def marking(mark: str) -> Callable[..., str]:
    def around(original: Callable[..., str], word: str) -> str:
        return f"{mark}({original(word)})"

    return around


@pytest.fixture(autouse=True)
def megatrons(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def train_step(word: str) -> str:
        return word

    monkeypatch.setattr(training, "train_step", train_step)
    return train_step


def test_layers_are_called_in_the_order_of_the_page_and_wrap_the_function_once(
    megatrons: Callable[..., str],
) -> None:
    order = SEAMS["train_step"].layers
    expected = "step"
    for layer in reversed(order):
        expected = f"{layer}({expected})"
    for known in (order, tuple(reversed(order))):
        with Layers() as layers:
            for layer in known:
                layers.put(layer, {"train_step": marking(layer)})
            wrapped = training.train_step
            assert wrapped("step") == expected
            assert wrapped.__wrapped__ is megatrons and wrapped.__name__ == "train_step"
        assert training.train_step is megatrons


def test_parts_leave_in_any_order_and_the_last_one_puts_the_original_back(
    megatrons: Callable[..., str],
) -> None:
    first = Layers().put(Layer.LISTENERS, {"train_step": marking("in")})
    second = Layers().put(Layer.REPAIR, {"train_step": marking("out")})
    assert training.train_step("step") == "out(in(step))"
    first.__exit__()
    assert training.train_step("step") == "out(step)"
    second.__exit__()
    assert training.train_step is megatrons
    assert not stack._wrapped


@pytest.mark.parametrize("name", ["train", "no_such_function"])
def test_layer_that_the_page_does_not_list_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no layer sharing: list it in _PAGE"):
        Layers().put(Layer.SHARING, {name: marking("sharing")})


def test_second_layer_of_the_same_part_is_refused() -> None:
    with (
        Layers().put(Layer.SHARING, {"train_step": marking("sharing")}) as layers,
        pytest.raises(ValueError, match="train_step has a layer sharing already"),
    ):
        layers.put(Layer.SHARING, {"train_step": marking("again")})


def test_function_of_one_object_is_wrapped_and_those_of_others_are_not() -> None:
    own, other = (Namespace(finalize_model_grads_func=str.upper) for _ in range(2))
    with Layers().put(Layer.IDLE, {FINALIZE: marking("idle")}, of=own):
        assert own.finalize_model_grads_func("a") == "idle(A)"
        assert other.finalize_model_grads_func is str.upper
    assert own.finalize_model_grads_func is str.upper


def test_document_has_the_layers_of_the_functions_that_several_parts_wrap() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| `(\w+)` \|$", text, re.MULTILINE)
    several = [
        (", ".join(seam.layers), name)
        for name, seam in SEAMS.items()
        if seam.module.startswith("megatron.training") and len(seam.layers) > 1
    ]
    assert rows == several
