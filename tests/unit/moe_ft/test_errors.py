"""Exceptions form the tree that their module draws, and can be caught as the builtins it names."""

import inspect

import pytest

from moe_ft import errors

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
BUILTINS = {
    errors.ConfigError: ValueError,
    errors.PlanError: ValueError,
    errors.CorruptStateError: OSError,
    errors.FormatVersionError: OSError,
    errors.UnsafePathError: OSError,
    errors.ForeignPathError: OSError,
    errors.UnmadeDirectoryError: OSError,
    errors.LockLostError: OSError,
    errors.JobStoreError: RuntimeError,
    errors.ExchangeError: RuntimeError,
    errors.CorruptionError: RuntimeError,
    errors.LinksEndedError: RuntimeError,
    errors.CallOrderError: RuntimeError,
}


@pytest.mark.parametrize("error", CLASSES)
def test_every_exception_is_in_the_tree_and_under_the_base(error: type[Exception]) -> None:
    assert errors.__doc__ is not None
    assert issubclass(error, errors.MoeFtError)
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize("error", CLASSES)
def test_exception_is_a_builtin_only_where_callers_expect_one(error: type[Exception]) -> None:
    caught = {each for each in (ValueError, OSError, RuntimeError) if issubclass(error, each)}
    assert caught == ({BUILTINS[error]} if error in BUILTINS else set())
