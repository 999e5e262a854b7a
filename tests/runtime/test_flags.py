import argparse
from dataclasses import dataclass, fields

import pytest

from midstream.runtime.config import EngineConfig
from midstream.runtime.flags import add_flags, given
from midstream.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Options:
    mode: str = "plain"
    share: str = "80%"
    max_rows: int = 4
    max_len: int | None = None
    keep: str | int | None = "auto"
    scale: float = 1.0
    strict: bool = False
    ids: tuple[int, ...] = ()


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    return given(parser.parse_args(words), Options)


def test_flags_that_are_not_given_leave_no_trace():
    assert parse() == {}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--mode", "7"], "mode", "7"),
        (["--max-rows", "7"], "max_rows", 7),
        (["--max-len", "none"], "max_len", None),
        (["--keep", "128"], "keep", 128),
        (["--keep", "auto"], "keep", "auto"),
        (["--keep", "none"], "keep", None),
        (["--scale", "0.5"], "scale", 0.5),
        (["--strict"], "strict", True),
        (["--no-strict"], "strict", False),
        (["--ids", "1", "2", "--ids", "3"], "ids", (1, 2, 3)),
    ],
)
def test_a_flag_is_read_by_the_type_of_its_field(words, field, value):
    assert parse(*words) == {field: value}


def test_a_value_of_the_wrong_type_is_refused_with_both_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--max-rows", "many")
    assert "'many' found, int expected" in capsys.readouterr().err


def test_help_shows_defaults_with_a_percent_sign(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    assert "default 80%" in capsys.readouterr().out


def test_engine_and_sampling_fields_do_not_share_a_name():
    names = [field.name for config in (EngineConfig, SamplingParams) for field in fields(config)]
    assert len(names) == len(set(names))
