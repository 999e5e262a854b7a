"""sample: the kernel draws the reference's token; the reference draws from the right distribution."""

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.sample import sample
from midstream.ops.testing import build_args, check_kernel, check_registration, op_cases

CPU = torch.device("cpu")
CASES = {case.id: case for case in sample.cases}
BASE = sample.cases[0]
PATHS = [sample.reference, sample.launch]
path_ids = ["cpu", "kernel"]


def float_bits(value: float, slots: int) -> torch.Tensor:
    return torch.full((slots,), value).view(torch.int32)


def many_draws(
    logit: torch.Tensor,
    draws: int,
    seeds: bool,
    run=sample.reference,
    device="cpu",
    **filters: float,
) -> torch.Tensor:
    """Tokens that `run` draws from one row of logits, at as many seeds or positions."""
    index = torch.arange(draws, dtype=torch.int32)
    zeros = torch.zeros(draws, dtype=torch.int32)
    args = {
        "token": zeros.clone(),
        "logprob": torch.zeros(draws),
        "last_token": zeros.clone(),
        "computed": zeros.clone() if seeds else index.clone(),
        "accepted": zeros.clone(),
        "logits": logit.repeat(draws, 1),
        "row_slot": index,
        "row_start": torch.arange(draws + 1, dtype=torch.int32),
        "row_sample": zeros + 1,
        "temperature": float_bits(filters.get("temperature", 1.0), draws),
        "top_k": zeros + int(filters.get("top_k", 0)),
        "top_p": float_bits(filters.get("top_p", 1.0), draws),
        "min_p": float_bits(filters.get("min_p", 0.0), draws),
        "seed": torch.stack([index if seeds else zeros, zeros], 1),
        "stop_id": torch.full((draws, 8), -1, dtype=torch.int32),
        "min_position": zeros,
    }
    args = {name: value.to(device) for name, value in args.items()}
    run(**args, rows=draws)
    return args["token"].cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("spec", "case"), [*op_cases(sample)], ids=[*CASES])
def test_kernel_draws_the_token_of_the_reference(spec, case, dtype, device):
    check_kernel(spec, case, dtype, device)


def test_top_p_measures_the_mass_that_top_k_left(device):
    """0.3 of 0.7 is more than 0.42 of it, and less than 0.42 of all."""
    logit = torch.tensor([0.3, 0.2, 0.2, 0.1, 0.1, 0.1]).log()
    drawn = many_draws(logit, 8, True, sample.launch, device, top_k=3, top_p=0.42)
    assert not drawn.any()


def test_is_a_well_formed_torch_operator():
    check_registration(sample, BASE)


@pytest.mark.parametrize("seeds", [True, False], ids=["seeds", "positions"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.5}],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_draws_follow_the_filtered_softmax(seeds, filters):
    """Chi-square over at most 12 tokens: 44 is exceeded once in 100,000 streams of noise."""
    draws = 2000
    logit = torch.randn(12, generator=torch.Generator().manual_seed(1))
    scaled = (logit / filters.get("temperature", 1.0)).double()
    order = scaled.argsort(descending=True)
    prob = scaled[order].softmax(0)
    kept = torch.ones(12, dtype=torch.bool)
    kept[int(filters.get("top_k", 12)) :] = False
    kept &= prob.cumsum(0) - prob < filters.get("top_p", 1.0)
    kept &= prob >= filters.get("min_p", 0.0) * prob[0]
    want = torch.zeros(12, dtype=torch.float64)
    want[order] = prob * kept / prob[kept].sum() * draws
    got = many_draws(logit, draws, seeds, **filters).bincount(minlength=12)
    assert (got[want == 0] == 0).all()
    live = want > 0
    assert ((got[live] - want[live]) ** 2 / want[live]).sum() < 44


@pytest.mark.parametrize("draw", PATHS, ids=path_ids)
def test_a_row_draws_the_same_token_alone_and_among_others(draw, device):
    """Only the slot's parameters and the position matter, neither the row nor its neighbours."""
    case = CASES["R4-L300-all-filters"]
    together = build_args(case, torch.float32, device)
    draw(**together)
    for row in (2, 3):
        alone = build_args(case, torch.float32, device)
        for name in ("logits", "row_slot", "row_sample"):
            alone[name] = alone[name][row : row + 1].contiguous()
        alone["row_start"] = alone["row_start"][row : row + 2].contiguous()
        draw(**{**alone, "rows": 1})
        assert alone["token"][0] == together["token"][row] >= 0
        assert alone["logprob"][0] == together["logprob"][row]


@pytest.mark.parametrize("draw", PATHS, ids=path_ids)
def test_counts_advance_for_all_live_rows_and_for_no_other_slot(draw, device):
    args = build_args(BASE, torch.float32, device)
    before = {name: args[name].clone() for name in ("computed", "accepted", "last_token")}
    draw(**args)
    touched = set()
    for row in range(1, args["rows"]):
        slot = int(args["row_slot"][row])
        touched.add(slot)
        length = int(args["row_start"][row + 1] - args["row_start"][row])
        assert args["computed"][slot] == before["computed"][slot] + length
        assert args["accepted"][slot] == 1
        drawn = row != 1  # row 1 is a prompt chunk in the middle
        want = args["token"][row] if drawn else before["last_token"][slot]
        assert args["last_token"][slot] == want
    for slot in set(range(len(args["computed"]))) - touched:
        assert all(args[name][slot] == before[name][slot] for name in before)
    assert args["token"][:2].tolist() == [-1, -1]
    assert args["logprob"][:2].tolist() == [0.0, 0.0]
    assert args["token"][args["rows"]] == -7  # beyond the rows of the step


@pytest.mark.parametrize("draw", PATHS, ids=path_ids)
def test_greedy_takes_the_lowest_of_equal_logits(draw, device):
    args = build_args(CASES["R4-L300-greedy"], torch.float32, device)
    args["logits"][:, [7, 40, 299]] = 99.0
    draw(**args)
    assert args["token"][2:4].tolist() == [7, 7]


@pytest.mark.parametrize("draw", PATHS, ids=path_ids)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "warm"])
def test_stop_ids_are_refused_only_below_the_minimal_position(draw, temperature, device):
    args = build_args(BASE, torch.float32, device)
    slots = len(args["computed"])
    args["temperature"] = float_bits(temperature, slots).to(device)
    args["logits"][:, 5] = 99.0
    args["stop_id"][:, 7] = 5
    row = 4
    slot = int(args["row_slot"][row])
    length = int(args["row_start"][row + 1] - args["row_start"][row])
    position = int(args["computed"][slot]) + length
    for minimum, refused in ((position + 1, True), (position, False)):
        again = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
        again["min_position"][slot] = minimum
        draw(**again)
        assert (again["token"][row] != 5) == refused
        assert again["token"][row] >= 0


@pytest.mark.parametrize("draw", PATHS, ids=path_ids)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
def test_a_row_of_one_odd_value_gives_a_token_in_range(draw, value, device):
    args = build_args(CASES["R4-L300-all-filters"], torch.float32, device)
    args["logits"].fill_(value)
    draw(**args)
    token = args["token"][2:4]
    assert ((token >= 0) & (token < 300)).all()
    assert args["logprob"][2:4].isnan().all()


def test_refuses_fewer_rows_of_logits_than_rows():
    args = build_args(BASE, torch.float32, CPU)
    with pytest.raises(ContractError, match=r"expected \[at least 9 rows, vocabulary\]"):
        sample.launch(**{**args, "rows": 9})
