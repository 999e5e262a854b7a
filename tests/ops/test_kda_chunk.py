"""kda_chunk: its declaration, both paths, exports, packing, strong decay, who may write what."""

from dataclasses import replace

import pytest
import torch
from linear_rig import PER_TOKEN, run_alone, run_steps
from paged_scan import run_programs_backwards

from midstream.errors import ContractError
from midstream.ops.device_limits import SMALL_SHARED_BYTES
from midstream.ops.gated_delta_chunk import gated_delta_chunk
from midstream.ops.guarded_memory import same_bits
from midstream.ops.kda_chunk import kda_chunk, kda_chunk_case, launch_chunks
from midstream.ops.kda_step import kda_step
from midstream.ops.paged_state import linear_states
from midstream.ops.testing import build_args, check_guards, check_kernel, check_results, op_suite

CASES = {case.id: case for case in kda_chunk.cases}
BASE, *_ = CASES.values()
# fp32 activations are launched token by token; the chunk kernels are checked in fp32 as well
CHUNKS = replace(kda_chunk, launch=launch_chunks)
SMALL = {"heads": 1, "value_width": 16}
both_paths = pytest.mark.parametrize("spec", [CHUNKS, kda_chunk], ids=["chunks", "tokens"])


@pytest.mark.parametrize("check", op_suite(kda_chunk), ids=str)
def test_obeys_its_declaration(check):
    check.run()


@pytest.mark.parametrize("at", [0, 5, 10], ids=lambda at: [*CASES][at])
def test_chunk_kernels_in_fp32_equal_float64_reference(at, device):
    check_kernel(CHUNKS, [*CASES.values()][at], torch.float32, device)


@pytest.mark.parametrize("check", [check_guards, check_results])
def test_chunk_kernels_leave_everything_else_alone(check, device):
    check(CHUNKS, kda_chunk_case((3, 20), ((), (9,)), gap=3, **SMALL), torch.float16, device)


def test_nothing_depends_on_what_the_workspace_held(device, monkeypatch):
    """Nor on what lies behind it: tokens that end a tensor have dead places after them."""
    case = kda_chunk_case((3, 20), **SMALL)
    clean, args = (build_args(case, torch.float16, device) for _ in range(2))
    kda_chunk.launch(**clean)

    def poisoned(shape, **kind):
        size = torch.Size(shape).numel()
        return torch.full((size + 4096,), float("nan"), **kind)[:size].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    # no token behind the last chunk
    kda_chunk.launch(
        **{name: args[name][:23] if name in PER_TOKEN else value for name, value in args.items()}
    )
    assert torch.equal(args["out"][:23], clean["out"][:23])
    assert same_bits(args["arena"], clean["arena"])


@pytest.mark.parametrize(
    "lengths",
    [(1, 2, 3, 4, 5, 6, 7, 8, 9), (63, 64, 65)],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_any_length_equals_float64_reference(lengths, device):
    check_kernel(CHUNKS, kda_chunk_case(lengths, **SMALL), torch.float32, device)


@pytest.mark.parametrize("decay", [1e-12, 0.0])
@both_paths
def test_strong_decay_inside_a_chunk_stays_finite(spec, decay, device):
    args = build_args(kda_chunk_case((64,), decay=decay, **SMALL), torch.float32, device)
    spec.launch(**args)
    start = int(args["offset"])
    assert args["out"][:64].isfinite().all()
    assert args["arena"][args["chunk_page"][0], start : start + 16 * 16].isfinite().all()


def test_the_reference_equals_the_recurrence_of_transformers():
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    args = build_args(
        kda_chunk_case((12,), heads=2, key_heads=2), torch.float32, torch.device("cpu")
    )
    args["read_page"].zero_()
    kda_chunk.reference(**args)
    named = {"query": "q", "key": "k", "value": "v", "g": "g", "beta": "beta"}
    out, state = modeling.recurrent_kimi_delta_attention(
        **{theirs: args[ours][None, :12] for theirs, ours in named.items()},
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(args["out"][:12], out[0], rtol=0, atol=1e-6)
    have = linear_states(args["arena"], args["offset"], *state.shape[1:])
    torch.testing.assert_close(have[args["chunk_page"][0]], state[0], rtol=0, atol=1e-6)


def test_equal_decay_of_all_channels_is_the_gated_delta_rule(device):
    case = kda_chunk_case((70,), **SMALL)
    args, plain = (build_args(case, torch.float16, device) for _ in range(2))
    plain["g"] = plain["g"][..., 0].contiguous()
    args["g"] = plain["g"][..., None].expand_as(args["g"]).contiguous()
    kda_chunk.launch(**args)
    gated_delta_chunk.reference(**{name: value.cpu() for name, value in plain.items()})
    if device.type == "cpu":
        torch.testing.assert_close(args["out"][:70], plain["out"][:70], rtol=0, atol=2e-3)
        torch.testing.assert_close(args["arena"], plain["arena"], rtol=0, atol=4e-3, equal_nan=True)


@both_paths
def test_packed_rows_equal_rows_alone_bit_for_bit(spec, device):
    lengths = (1, 3, 65, 7) if spec is CHUNKS else (1, 3, 7, 2)
    case = kda_chunk_case(lengths, **SMALL)
    packed, alone = (build_args(case, torch.float32, device) for _ in range(2))
    spec.launch(**packed)
    start = 0
    for row, length in enumerate(lengths):
        page = int(alone["chunk_page"][alone["row_chunk"][row + 1] - 1])
        run_alone(spec.launch, alone, row, start, start + length, page)
        tokens = slice(start, start + length)
        assert torch.equal(packed["out"][tokens], alone["out"][tokens])
        assert same_bits(packed["arena"][page], alone["arena"][page])
        start += length


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@both_paths
def test_an_export_equals_a_run_that_ends_there(spec, state_dtype, device):
    """And a run resumed from the export equals the run that made it."""
    case = kda_chunk_case((20,), ((9,),), state_dtype=state_dtype, **SMALL)
    whole, parts = (build_args(case, torch.float32, device) for _ in range(2))
    exported, last = whole["chunk_page"].tolist()[:2]
    spec.launch(**whole)
    run_alone(spec.launch, parts, 0, 0, 9, exported)
    assert same_bits(parts["arena"][exported], whole["arena"][exported])
    parts["read_page"][0] = exported
    run_alone(spec.launch, parts, 0, 9, 20, last)
    assert same_bits(parts["arena"][last], whole["arena"][last])
    assert torch.equal(parts["out"][:20], whole["out"][:20])


@both_paths
def test_a_run_of_steps_gives_the_same_state_and_outputs(spec, device):
    """Keys are wider than values: a state stored the other way round would show."""
    case = kda_chunk_case((66,), heads=1, key_width=24, value_width=16)
    chunk = build_args(case, torch.float32, device)
    step = build_args(case, torch.float32, torch.device("cpu"))
    spec.launch(**chunk)
    run_steps(kda_step.reference, step, 66)
    page = int(step["read_page"][0])
    torch.testing.assert_close(chunk["out"][:66].cpu(), step["out"][:66], rtol=0, atol=4e-6)
    have, want = chunk["arena"][page].cpu(), step["arena"][page]
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5, equal_nan=True)


@both_paths
def test_a_read_page_that_is_not_written_keeps_its_bytes(spec, device):
    args = build_args(kda_chunk_case((2, 3), **SMALL), torch.float32, device)
    page = args["read_page"][1].item()
    assert page not in args["chunk_page"].tolist()
    before = args["arena"][page].clone()
    spec.launch(**args)
    assert same_bits(args["arena"][page], before)


@both_paths
def test_in_place_the_order_of_programs_does_not_matter(spec, device, monkeypatch):
    """No program reads what another one overwrites."""
    case = kda_chunk_case((5,), ((2,),), heads=1, value_width=48)
    one, other = (build_args(case, torch.float32, device) for _ in range(2))
    spec.launch(**one)
    run_programs_backwards(monkeypatch)
    spec.launch(**other)
    assert one["read_page"][0] in one["chunk_page"]
    assert same_bits(one["arena"], other["arena"])
    assert torch.equal(one["out"][:5], other["out"][:5])


@both_paths
def test_padding_is_inert(spec, device):
    """A step of nothing but padding touches neither pages nor outputs."""
    args = build_args(BASE, torch.float32, device)
    args["row_chunk"][:] = 0
    args["chunk_start"][:] = 0
    args["chunk_row"][:] = -1
    args["chunk_page"][:] = 0
    before = {name: args[name].clone() for name in ("arena", "out")}
    spec.launch(**args)
    assert all(same_bits(args[name], before[name]) for name in before)


def test_the_reference_goes_on_from_what_it_saved():
    case = kda_chunk_case((20,), ((9,),), state_dtype=None)
    args, once = (build_args(case, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    once["chunk_page"][0] = 0
    kda_chunk.reference(**args)
    kda_chunk.reference(**once)
    assert not torch.equal(args["out"][9:20], once["out"][9:20])


def test_other_state_types_are_refused(device):
    args = build_args(BASE, torch.float32, device)
    with pytest.raises(ContractError, match="float32, bfloat16 or float16"):
        kda_chunk.launch(**{**args, "arena": args["arena"].double()})


def test_where_shared_memory_is_small_wide_keys_go_token_by_token(device, monkeypatch):
    case = kda_chunk_case((3,), heads=1, key_width=128, value_width=32)
    args = build_args(case, torch.float16, device)
    monkeypatch.setattr("midstream.ops.kda_chunk.shared_limit", lambda device: SMALL_SHARED_BYTES)
    monkeypatch.setattr("midstream.ops.kda_chunk.launch_chunks", None)
    kda_chunk.launch(**args)
    assert args["out"][:3].isfinite().all()


@pytest.mark.gpu
def test_many_rows_and_heads_equal_float64_reference(device):
    """As many programs as a processor holds, several times over."""
    case = kda_chunk_case((150, 70, 64), heads=24, key_heads=24, key_width=128, value_width=128)
    check_kernel(kda_chunk, case, torch.bfloat16, device)
