"""Errors of reading a directory become one answer."""

import pytest

from moe_ft.commands.directory import reading
from moe_ft.errors import ConfigError, CorruptStateError


@pytest.mark.parametrize(
    ("directory", "error"),
    [("DIR", OSError("away")), ("DIR", ValueError("away")), ("s3://x", RuntimeError("away"))],
)
def test_error_of_reading_names_directory_and_remedy(directory: str, error: Exception) -> None:
    rule = f"DIR={directory} cannot be read: {type(error).__name__}: away. Name a directory"
    with pytest.raises(ConfigError, match=rule), reading(directory):
        raise error


def test_password_of_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught, reading("ftp://me:secret@host/x"):
        raise OSError("away")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("error", [CorruptStateError("bad"), RuntimeError("a mistake of ours")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), reading("DIR"):
        raise error


def test_empty_directory_is_taken_for_an_unset_variable() -> None:
    with pytest.raises(ConfigError, match="DIR=' ' is empty: an unset variable"), reading(" "):
        pass
