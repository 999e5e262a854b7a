"""guarded_memory: every stray write is named, and arguments keep their contents and pitches."""

import pytest
import torch

from midstream.ops.guarded_memory import FILLINGS, GuardedArgs

VIEWS = {
    "arena": torch.randn(4, 32),
    "pitched": torch.randn(3, 10)[:, :7],
    "offset": torch.tensor([64]),
    "flag": torch.tensor([True]),
    "nothing": torch.empty(0, 3),
    "count": 5,
}


@pytest.fixture(params=FILLINGS, ids=lambda filling: filling.name)
def guarded(request):
    return GuardedArgs(VIEWS, ("arena",), request.param)


def test_arguments_keep_their_contents_and_their_pitches(guarded):
    for name, value in VIEWS.items():
        if name == "count":
            assert guarded.args[name] == value
            continue
        assert torch.equal(guarded.args[name], value)
        assert guarded.args[name].data_ptr() % 64 == 0  # what torch gives on the CPU
    assert guarded.args["pitched"].stride() == (10, 1)


def test_pages_lie_further_apart_and_stay_aligned(guarded):
    assert guarded.args["arena"].stride() == (64, 1)
    assert guarded.strays(written=()) == []


@pytest.mark.parametrize("name", ["arena", "pitched", "offset", "flag"])
@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_stray_write_is_named(guarded, name, where):
    view = guarded.args[name]
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    at = view.storage_offset() + (-1 if where == "before" else last + 1)
    view.as_strided((1,), (1,), at).zero_()
    assert guarded.strays(written=(name,)) == [f"memory around {name} was written"]


@pytest.mark.parametrize("name, width", [("arena", 32), ("pitched", 7)])
def test_a_write_between_rows_is_named(guarded, name, width):
    view = guarded.args[name]
    view.as_strided((1,), (1,), view.storage_offset() + view.stride(0) + width).zero_()
    assert guarded.strays(written=(name,)) == [f"memory around {name} was written"]


def test_a_write_to_an_argument_is_fine_where_it_is_marked(guarded):
    guarded.args["arena"].zero_()
    assert guarded.strays(written=("arena",)) == []
    assert guarded.strays(written=()) == ["arena was written, which the schema does not mark"]


def test_ids_around_an_index_are_below_any_and_one_past_the_largest():
    index = torch.tensor([3, 0, 5], dtype=torch.int32)
    seen = []
    for filling in FILLINGS:
        view = GuardedArgs({"index": index}, (), filling).args["index"]
        seen.append(view.as_strided((1,), (1,), view.storage_offset() + 3).item())
    assert seen == [-2, 6]
