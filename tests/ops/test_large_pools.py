"""Every op on a pool of more than 2 ** 31 elements: its highest pages do what low pages do."""

import importlib
import pkgutil

import pytest
import torch
from torch import Tensor

import midstream.ops
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.chunk_table import cut_chunks
from midstream.ops.page_convert import page_convert
from midstream.ops.registry import NULL_PAGE, OPS, Args, OpCase, OpSpec
from midstream.ops.testing import build_args, written_args

for _module in pkgutil.iter_modules(midstream.ops.__path__):
    if _module.name not in ("gates", "testing"):
        importlib.import_module(f"midstream.ops.{_module.name}")

PAGE_IDS = {"read_page", "write_page", "chunk_page", "move_from", "move_to", "kv_table"}
POOL_BYTES = 12 * 2**30  # at most, of all arenas that are large at once
_CHUNK = 2**28  # elements looked at in one go

# arenas that share page numbers, and the arguments that hold those; all others: the default
POOLS = {
    ("page_convert", "source"): (("temporal", "conv"), {"page_from"}),
    ("page_convert", "target"): (("to_temporal", "to_conv"), {"page_to"}),
}


def large_pools() -> list[tuple[OpSpec, tuple[str, ...], set[str]]]:
    """(op, arenas, page arguments) of all ops that take an arena."""
    found = [(OPS[op], *pools) for (op, _), pools in POOLS.items()]
    for spec in OPS.values():
        names = {a.name for a in spec.overload._schema.arguments}
        arenas = tuple(name for name in spec.arenas if name in names)
        if arenas and spec is not page_convert:
            found.append((spec, arenas, PAGE_IDS))
    return found


POOL_CASES = large_pools()
POOL_NAMES = [f"{spec.name}-{arenas[0]}" for spec, arenas, _ in POOL_CASES]


def case_of(spec: OpSpec) -> OpCase:
    """The base case; two pools of one dtype where there are two."""
    same_dtype = [case for case in spec.cases if case.id.endswith("to_bfloat16")]
    return (same_dtype or spec.cases)[0]


def elements_below(args: Args, arenas: tuple[str, ...]) -> int:
    """So many elements lie before the used pages: a product in 32 bits is off by all of them if it fits."""
    element_bytes = sum(args[name].element_size() for name in arenas)
    return 2**32 if 2**32 * element_bytes <= POOL_BYTES else 2**31


def moved_up(args: Args, arenas: tuple[str, ...], page_ids: set[str], below: int) -> Args:
    """The same arguments with all pages but the null page at the top of pools of NaN."""
    pages = max(-(-below // args[name].stride(0)) for name in arenas)
    high = dict(args)
    for name in arenas:
        low = args[name]
        high[name] = low.new_full((pages + low.shape[0], low.shape[1]), float("nan"))
        high[name][NULL_PAGE] = low[NULL_PAGE]
        high[name][pages + 1 :] = low[1:]
    named = page_ids & args.keys()
    for name in named:
        high[name] = torch.where(args[name] > NULL_PAGE, args[name] + pages, args[name])
    if "kv_slot" in args:
        block, slot = args["kv_block"], args["kv_slot"]
        high["kv_slot"] = torch.where(slot >= block, slot + pages * block, slot)
    assert named or "kv_slot" in args, "which arguments hold pages?"
    return high


def check_high_pages(
    spec: OpSpec,
    arenas: tuple[str, ...],
    page_ids: set[str],
    dtype: torch.dtype,
    device: torch.device,
    below: int | None = None,
) -> None:
    low = build_args(case_of(spec), dtype, device)
    below = below or elements_below(low, arenas)
    high = moved_up(low, arenas, page_ids, below)
    spec.launch(**low)
    spec.launch(**high)
    for name in {*written_args(spec, low), *arenas}:
        have, want = high[name], low[name]
        if name in arenas:
            assert (have.shape[0] - want.shape[0]) * have.stride(0) >= below
            between = have[1 : 1 - want.shape[0]].flatten()
            assert all(part.isnan().all() for part in between.split(_CHUNK)), f"{name}: a stray"
            have = torch.cat([have[:1], have[1 - want.shape[0] :]])
        assert same_bits(have, want), f"{name} differs where pages are high"


def same_bits(have: Tensor, want: Tensor) -> bool:
    return torch.equal(
        have.contiguous().view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "arenas", "page_ids"), POOL_CASES, ids=POOL_NAMES)
def test_c1_the_highest_pages_equal_low_pages_and_nothing_else_changes(spec, arenas, page_ids):
    check_high_pages(spec, arenas, page_ids, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("name", ["page_move", "causal_conv_step", "kv_write"])
def test_pages_of_a_small_pool_may_lie_anywhere(name, device):
    chosen = next(each for each in POOL_CASES if each[0].name == name)
    check_high_pages(*chosen, torch.float32, device, below=2**15)


def test_an_address_in_32_bits_would_be_found(device):
    """The check itself, on an op that wraps around at 2 ** 15 elements."""
    spec, arenas, page_ids = next(each for each in POOL_CASES if each[0].name == "page_move")

    def wraps(temporal, conv, move_from, move_to, **rest):
        pages = 2**15 // temporal.stride(0)
        spec.launch(temporal, conv, move_from, move_to % pages, **rest)

    class Wrong:
        overload, cases, launch = spec.overload, spec.cases, staticmethod(wraps)

    with pytest.raises(AssertionError, match=r"a stray|differs where pages are high"):
        check_high_pages(Wrong, arenas, page_ids, torch.float32, device, below=2**15)


def test_every_op_with_an_arena_has_its_pages_named():
    assert len(POOL_CASES) >= 12
    for spec, arenas, page_ids in POOL_CASES:
        args = build_args(case_of(spec), torch.float32, torch.device("cpu"))
        assert page_ids & args.keys() or "kv_slot" in args, spec.name
        assert all(name in args for name in arenas), spec.name


@pytest.mark.gpu
def test_c2_tokens_times_pitch_beyond_32_bits_equal_two_halves(device):
    """A view into a fused projection: 58,256 tokens, 36,864 elements apart, with the window carried over."""
    tokens, pitch, channels, taps = 58_256, 36_864, 48, 4
    assert tokens * pitch > 2**31
    fused = torch.empty(tokens, pitch, dtype=torch.bfloat16, device=device)
    x = fused[:, -channels:].normal_()
    weight = torch.randn(channels, taps, device=device).bfloat16()

    def run(out, arena, begin, end, read, write):
        table = cut_chunks([end - begin], [write])
        causal_conv_chunk.launch(
            arena, out[begin:end], x[begin:end], weight, None,
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.tensor([read], dtype=torch.int32, device=device),
            *(t.to(device) for t in (table.chunk_start, table.chunk_row, table.chunk_page)),
            table.row_chunk.to(device), True,
        )  # fmt: skip

    arena = torch.zeros(3, 192, dtype=torch.bfloat16, device=device)
    whole, halves = (torch.zeros(tokens, channels, dtype=x.dtype, device=device) for _ in "ab")
    run(whole, arena, 0, tokens, 0, 1)
    run(halves, arena, 0, tokens // 2, 0, 2)
    run(halves, arena, tokens // 2, tokens, 2, 2)
    assert torch.equal(whole, halves)
    assert torch.equal(arena[1], arena[2])
