"""Claims about sampling parameters: what stands is valid, what is refused says how to be accepted."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from midstream.errors import ConfigError
from midstream.runtime.sampling import MAX_STOP_IDS, SamplingParams, as_int

VALID = [
    {},
    {"max_tokens": 1},
    {"max_tokens": 4, "min_tokens": 4},
    {"temperature": 0},
    {"temperature": 1e-5},
    {"temperature": 1e5},
    {"top_k": 2**31 - 1},
    {"top_p": 1e-6},
    {"top_p": 1},
    {"min_p": 1.0},
    {"seed": 0},
    {"seed": 2**64 - 1},
    {"stop_token_ids": (0, 2**31 - 1)},
    {"stop_token_ids": range(8)},
    {"stop_token_ids": [3] * 20},
    {"stop": ("a", "b")},
    {"ignore_eos": True},
    {"logprobs": 0},
    {"logprobs": 20},
]
REFUSED = [
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 17),  # more than max_tokens
    ("min_tokens", "1"),
    ("temperature", -0.1),
    ("temperature", 1e-6),  # logits / temperature leave float32
    ("temperature", 1e6),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "1.0"),
    ("temperature", False),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 0.5),
    ("top_k", 2**31),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", [0.5]),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", None),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop_token_ids", range(MAX_STOP_IDS + 1)),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 2),
    ("stop_token_ids", None),
    ("stop", [""]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", b"x"),
    ("stop", 1),
    ("stop", None),
    ("ignore_eos", 1),
    ("ignore_eos", None),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.0),
]


@pytest.mark.parametrize("fields", VALID, ids=str)
def test_accepts_the_ends_of_every_range(fields: dict) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refuses_with_who_found_expected_and_what_to_do(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    who, expected, *fix = str(caught.value).split("; ")
    found = (value,) if name == "stop" and value == "" else value
    of_type = f" of type {type(value).__name__}"
    assert who in (told := f"SamplingParams: {name} is {found!r}", told + of_type)
    assert expected.startswith("expected ")
    assert fix and all(fix)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", "5", "is '5' of type str; expected an integer from 1 to .*; write max_tokens=5, "),
        ("max_tokens", 5.0, "is 5.0 of type float; expected an integer from 1 .*; write max_tokens=5"),
        ("max_tokens", None, "is None of type NoneType; expected an integer .*; leave it out"),
        ("max_tokens", True, "is True of type bool; expected an integer"),
        ("max_tokens", 0, "is 0; expected an integer from 1 to 2147483647; ask for at least one token"),
        ("max_tokens", 10**12, "is 10{12}; expected an .*; pass 2147483647 for an answer as long as"),
        ("max_tokens", math.inf, "is inf of type float; expected an .*; pass 2147483647 for an answer as"),
        ("min_tokens", -1, "is -1; expected an integer from 0 to 16; pass 0 for none"),
        ("min_tokens", 17, "is 17; expected an integer from 0 to 16; lower it or raise max_tokens"),
        ("logprobs", -1, "is -1; expected an integer from 0 to 20; pass None for no report"),
        ("logprobs", 21, "is 21; expected an integer from 0 to 20; ask for fewer, or pass None"),
        ("stop_token_ids", range(9), "; pass fewer than these 9, or use stop strings for others"),
        ("temperature", " 0.5", "is ' 0.5' of type str; expected 0 .*; write temperature=0.5, with"),
        ("temperature", np.ones(1), "of type ndarray; expected 0 .greedy. or a number"),
        ("temperature", 10**400, "; expected 0 .greedy. or a number"),
        ("stop_token_ids", "5", r"is '5' of type str; expected at .*; write stop_token_ids=\[5\], without"),
        ("ignore_eos", 1, "is 1 of type int; expected True or False; pass a bool"),
        ("stop", 5, "is 5 of type int; expected a string, or several"),
    ],
)  # fmt: skip
def test_the_advice_fits_what_is_wrong_be_it_the_type_or_the_end_of_the_range(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"SamplingParams: {name} .*{message}"):
        SamplingParams(**{name: value})


def test_every_field_is_tested_with_a_value_that_is_refused() -> None:
    assert {name for name, _ in REFUSED} == {f.name for f in dataclasses.fields(SamplingParams)}


def test_values_are_kept_as_plain_python() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([1, 2]),
        top_p=1,
    )
    kept = (params.max_tokens, params.temperature, params.stop_token_ids, params.top_p)
    assert [type(value) for value in kept] == [int, float, tuple, float]
    assert params.stop_token_ids == (1, 2) and type(params.stop_token_ids[0]) is int


def test_sequences_become_tuples_and_one_stop_string_may_be_bare() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[2])
    assert params == SamplingParams(stop=["END"], stop_token_ids=(2,))
    assert hash(params) == hash(SamplingParams(stop=("END",), stop_token_ids=(2,)))


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(SamplingParams(), top_k=-1)


def test_end_ids_join_those_of_model_and_request() -> None:
    params = SamplingParams(stop_token_ids=[9, 2])
    assert params.end_token_ids([2, 5]) == (2, 5, 9)
    assert params.end_token_ids([]) == (2, 9)
    assert dataclasses.replace(params, ignore_eos=True).end_token_ids([5]) == (2, 9)


def test_end_ids_fit_the_table_of_the_op() -> None:
    params = SamplingParams(stop_token_ids=range(7))
    assert len(params.end_token_ids([6, 7])) == MAX_STOP_IDS
    with pytest.raises(ConfigError, match="9 token ids end the answer, 2 of them end-of-sequence"):
        params.end_token_ids([7, 8])


def test_an_array_is_no_integer_so_that_prompts_may_be_arrays() -> None:
    assert [as_int(value) for value in (5, np.int32(5), np.array(5), torch.tensor(5))] == [5] * 4
    assert [as_int(np.array(ids)) for ids in ([5], [5, 6], [])] == [None] * 3
    assert [as_int(value) for value in (torch.tensor([5]), True, 5.0, "5")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_token", "did you mean 'max_tokens'?"), ("zzz", "see help(SamplingParams)")],
)
def test_an_unknown_name_is_refused_with_its_neighbour_and_all_that_there_are(
    name: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: 3})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(
        f"SamplingParams: unknown option {name!r}; expected one of max_tokens, "
    )
    assert message.endswith(f", logprobs; {hint}")


def test_parameters_can_be_copied_replaced_and_pickled() -> None:
    params = SamplingParams(7, stop="END", seed=3)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, max_tokens=9) == SamplingParams(9, stop="END", seed=3)
