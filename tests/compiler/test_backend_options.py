import pickle
from dataclasses import fields
from pathlib import Path

import pytest

from midstream.compiler.backend_options import (
    BackendOptions,
    decode,
    list_mode_options,
    list_options,
)
from midstream.errors import ConfigError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def test_an_unknown_option_is_refused_with_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        decode(None, {"max_recording": 3})
    message = str(caught.value)
    assert all(name in message for name in list_options())
    assert "did you mean 'max_recordings'?" in message


def test_an_unknown_name_is_refused_as_an_unknown_key_is():
    with pytest.raises(ConfigError) as by_name:
        BackendOptions(innr="eager")
    with pytest.raises(ConfigError) as by_key:
        decode(None, {"innr": "eager"})
    assert str(by_name.value) == str(by_key.value)
    assert str(by_name.value).endswith("did you mean 'inner'?")


def test_a_wrong_type_is_refused_with_the_expected_one():
    with pytest.raises(ConfigError, match="max_recordings is '3' of type str, expected int"):
        decode(None, {"max_recordings": "3"})
    with pytest.raises(ConfigError, match="max_recordings is True of type bool, expected int"):
        decode(None, {"max_recordings": True})
    with pytest.raises(ConfigError, match="options are of type list, expected a dict"):
        decode(None, ["inner"])


@pytest.mark.parametrize("mode", ["fast", "lite"])
def test_an_unknown_mode_is_a_value_error_that_names_the_four(mode):
    with pytest.raises(ValueError, match=", ".join(MODES)):
        decode(mode, None)


def test_a_value_that_is_no_choice_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'inductor'"):
        decode(None, {"inner": "inducktor"})


@pytest.mark.parametrize(
    "values", [{"max_recordings": 0}, {"emulate": True}], ids=["no-recordings", "emulated-inductor"]
)
def test_settings_that_cannot_work_are_refused(values):
    with pytest.raises(ConfigError, match="backend midstream: "):
        BackendOptions(**values)


def test_a_mode_may_be_an_option_but_not_two_modes():
    assert decode(None, {"mode": "max-autotune"}).autotune
    assert decode("max-autotune", {"inner": "eager"}) == BackendOptions("max-autotune", "eager")
    for options in ({"mode": "default"}, BackendOptions()):
        with pytest.raises(ConfigError, match="expected one of them"):
            decode("max-autotune", options)


def test_options_are_values_that_compare_hash_and_pickle():
    one = decode(None, {"inner": "eager", "max_recordings": 3})
    assert one == pickle.loads(pickle.dumps(one)) == BackendOptions(inner="eager", max_recordings=3)
    assert len({one, pickle.loads(pickle.dumps(one)), BackendOptions()}) == 2
    assert decode(None, one) is one


def test_modes_say_what_they_set():
    assert tuple(list_mode_options()) == MODES
    for mode in MODES:
        settings = decode(mode, None)
        assert list_mode_options(mode) == {"record": settings.record, "autotune": settings.autotune}
    assert not decode("max-autotune-no-cudagraphs", None).record
    with pytest.raises(ConfigError, match="expected one of"):
        list_mode_options("fast")


def test_lists_are_copies():
    list_mode_options()["default"]["record"] = False
    list_mode_options("default")["record"] = False
    assert BackendOptions().record


def test_the_page_lists_every_option_and_mode():
    page = (Path(__file__).resolve().parents[2] / "docs" / "backend.md").read_text(encoding="utf-8")
    for field in fields(BackendOptions):
        assert f"| `{field.name}` | {field.default!r} | " in page
    assert all(f"`{mode}`" in page for mode in MODES)
