"""static_attention_decode: obeys its declaration, reads no hidden tile, and refuses what it cannot read."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.static_attention_decode import static_attention_decode
from midstream.ops.testing import Check, build_args, op_suite

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", op_suite(static_attention_decode, CPU), ids=str)
def test_obeys_its_declaration(check: Check) -> None:
    check.run()


def arguments(**others):
    return build_args(static_attention_decode.cases[0], torch.float32, CPU) | others


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"q": torch.zeros(3, 1, 4, 16)}, "one token per row"),
        ({"q": torch.zeros(2, 4, 16)}, "one token per row"),
        ({"q": torch.zeros(3, 4, 8)}, "one token per row"),
        ({"out": torch.zeros(3, 4, 8)}, "out has shape"),
        ({"v": torch.zeros(3, 2, 39, 16)}, "v has shape"),
        ({"visible": torch.zeros(3, 1, 40, dtype=torch.bool)}, "visible has shape"),
        ({"visible": torch.zeros(3, 40)}, "torch.float32, expected torch.bool"),
        ({"v": torch.zeros(3, 2, 40, 32)[..., ::2]}, "without gaps"),
        ({"q": torch.zeros(3, 4, 16, dtype=torch.float16)}, "torch.float16"),
        ({"q": torch.zeros(3, 5, 16), "out": torch.zeros(3, 5, 16)}, "5 query heads"),
    ],
)
def test_refuses_tensors_that_do_not_fit(others, says: str) -> None:
    with pytest.raises(ContractError, match=says):
        static_attention_decode.launch(**arguments(**others))


@pytest.mark.parametrize(("width", "length"), [(300, 40), (16, 0), (0, 40)])
def test_refuses_sizes_without_a_kernel(width: int, length: int) -> None:
    q, k = torch.zeros(3, 4, width), torch.zeros(3, 2, length, width)
    with pytest.raises(ContractError, match="at least one"):
        static_attention_decode.launch(q.clone(), q, k, k, None, 1.0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_visible_and_no_number_shows_in_the_result(name: str, number: float) -> None:
    """A tile of it must not count as one that sees nothing."""
    args = build_args(static_attention_decode.cases[4], torch.float32, CPU)  # of several tiles
    args[name][0, 0].flatten()[3 * args["q"].shape[-1] // 4] = number
    other = dict(args, out=args["out"].clone())
    static_attention_decode.launch(**args)
    static_attention_decode.reference(**other)
    assert number == torch.inf or not args["out"][0].isfinite().all()  # -inf weighs nothing
    torch.testing.assert_close(args["out"], other["out"], equal_nan=True, rtol=1e-4, atol=1e-4)
