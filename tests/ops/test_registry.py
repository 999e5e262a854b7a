"""registry and testing: what a declaration may not be, and that a wrong op is caught."""

import os
import subprocess
import sys

import pytest
import torch

from midstream.errors import ContractError
from midstream.ops.registry import EXACT, OPS, OpCase, Tolerance, define_op, describe_op
from midstream.ops.testing import (
    build_args,
    check_guards,
    check_kernel,
    check_reference,
    check_registration,
    check_results,
    check_slices,
    op_cases,
    op_suite,
    written_args,
)

CPU = torch.device("cpu")
ROUNDED = Tolerance({torch.float32: 1e-6, torch.bfloat16: 1e-2}, "one rounding per entry")


def _build(gen, dtype, device):
    x = torch.randn(4, 3, generator=gen).to(device, dtype)
    return {"out": torch.full_like(x, float("nan")), "x": x}


CASES = (OpCase("R4-D3", _build),)


def _double(out, x):
    out.copy_(2 * x)


def _define(name, *, cuda=_double, cpu=_double, tolerance=ROUNDED, schema=None):
    schema = schema or f"{name}(Tensor(a!) out, Tensor x) -> ()"
    return define_op(
        schema, cuda=cuda, cpu=cpu, cases=CASES, tolerance=tolerance, traffic=lambda args: (0, 0)
    )


@pytest.fixture(autouse=True)
def _registry_as_before():
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def test_a_declared_op_runs_and_is_listed():
    spec = _define("test_declared")
    args = build_args(CASES[0], torch.float32, CPU)
    spec(**args)
    assert torch.equal(args["out"], 2 * args["x"])
    assert OPS["test_declared"] is spec
    assert written_args(spec, args) == ("out",)
    assert [*op_cases(spec)] == [(spec, CASES[0])]
    check_registration(spec, CASES[0])


def _optional(name, *there):
    """An op with an optional result, to which its kernel adds what the reference writes."""

    def kernel(out, other, x):
        out.copy_(2 * x)
        if other is not None:
            other.add_(3 * x)

    def reference(out, other, x):
        out.copy_(2 * x)
        if other is not None:
            other.copy_(3 * x)

    def case(there):
        def build(generator, dtype, device):
            x = torch.randn(4, generator=generator).to(dtype)
            return {"out": x.clone(), "other": x.clone() if there else None, "x": x}

        return OpCase(str(there), build)

    return define_op(
        f"{name}(Tensor(a!) out, Tensor(b!)? other, Tensor x) -> ()", cuda=kernel, cpu=reference,
        cases=tuple(map(case, there)), tolerance=ROUNDED, traffic=lambda args: (0, 0),
        results=("out", "other"),
    )  # fmt: skip


def test_a_result_that_is_left_out_is_not_compared():
    spec = _optional("test_optional", True, False)
    written = [written_args(spec, build_args(case, torch.float32, CPU)) for case in spec.cases]
    assert written == [("out", "other"), ("out",)]
    for case in spec.cases:
        check_reference(spec, case, torch.float32)
        check_registration(spec, case)


def test_a_result_that_the_first_case_leaves_out_is_proven_by_another_case():
    suite = op_suite(_optional("test_later", False, True), CPU)
    (check,) = [c for c in suite if c.name == "results" and c.case.id == "True"]
    with pytest.raises(AssertionError, match="elements of other hold what they held"):
        check_results(check.spec, check.case, check.dtype, CPU)


def test_an_op_with_a_result_that_no_case_gives_is_refused():
    with pytest.raises(ContractError, match=r"no case of test_never gives \['other'\]"):
        op_suite(_optional("test_never", False, False), CPU)


def test_a_second_definition_raises():
    _define("test_twice")
    with pytest.raises(RuntimeError, match="test_twice"):
        _define("test_twice")


@pytest.mark.parametrize(
    "schema",
    [
        "test_returns(Tensor(a!) out, Tensor x) -> Tensor",
        "test_returns_written(Tensor(a!) out, Tensor x) -> Tensor(a!)",
        "test_writes_nothing(Tensor out, Tensor x) -> ()",
    ],
)
def test_a_returned_value_or_an_unmarked_result_is_refused(schema):
    with pytest.raises(ContractError, match="pass results as arguments"):
        _define("", schema=schema)
    assert schema.partition("(")[0] not in OPS


@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact"])
def test_a_right_kernel_passes(exact):
    spec = _define(f"test_right_{exact}".lower(), tolerance=EXACT if exact else ROUNDED)
    for dtype in (torch.float32, torch.bfloat16):
        check_kernel(spec, CASES[0], dtype, CPU)
        check_reference(spec, CASES[0], dtype)


def _wrong_value(out, x):
    out.copy_(2.0001 * x)


def _wrong_row(out, x):
    out.copy_(2 * x)
    out[3] = out[2]


def _unwritten_row(out, x):
    out[:3] = 2 * x[:3]


def _last_bit(out, x):
    out.copy_(torch.nextafter(2 * x, torch.full_like(x, torch.inf)))


@pytest.mark.parametrize("wrong", [_wrong_value, _wrong_row, _unwritten_row])
def test_a_wrong_kernel_is_caught(wrong):
    spec = _define(f"test{wrong.__name__}", cuda=wrong)
    with pytest.raises(AssertionError, match=f"test{wrong.__name__}: out"):
        check_kernel(spec, CASES[0], torch.float32, CPU)


def test_a_wrong_cpu_implementation_is_caught():
    def halves(out, x):  # right in float64 only
        out.copy_(2 * x if x.dtype == torch.float64 else 2 * x.half())

    spec = _define("test_wrong_cpu", cpu=halves)
    with pytest.raises(AssertionError, match="test_wrong_cpu: out"):
        check_reference(spec, CASES[0], torch.float32)


def test_an_exact_op_may_not_differ_in_the_last_bit():
    rounded = _define("test_last_bit_rounded", cuda=_last_bit)
    check_kernel(rounded, CASES[0], torch.float32, CPU)
    exact = _define("test_last_bit_exact", cuda=_last_bit, tolerance=EXACT)
    with pytest.raises(AssertionError, match="test_last_bit_exact: out differs"):
        check_kernel(exact, CASES[0], torch.float32, CPU)


def test_a_hidden_mutation_is_caught():
    def also_writes_x(out, x):
        out.copy_(2 * x)
        x.zero_()

    spec = _define("test_hidden_mutation", cpu=also_writes_x)
    with pytest.raises(Exception, match="test_schema"):
        check_registration(spec, CASES[0])


def test_a_kernel_that_writes_an_unmarked_argument_is_caught():
    def also_writes_x(out, x):
        out.copy_(2 * x)
        x.zero_()

    spec = _define("test_unmarked", cuda=also_writes_x)
    check_kernel(spec, CASES[0], torch.float32, CPU)
    with pytest.raises(AssertionError, match="x was written, which the schema does not mark"):
        check_guards(spec, CASES[0], torch.float32, CPU)


def test_a_kernel_that_reads_workspace_before_it_writes_it_is_caught():
    def adds_workspace(out, x):
        out.copy_(2 * x + 0 * torch.empty(3))

    spec = _define("test_workspace", cuda=adds_workspace)
    with pytest.raises(AssertionError, match="12 elements of out hold what they held"):
        check_results(spec, CASES[0], torch.float32, CPU)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("left", [torch.nan, 77.0, 0.0])
def test_workspace_is_seen_to_be_read_whatever_an_earlier_run_has_left_in_it(left):
    """An allocator gives the same memory again, and with it the NaN that was to show the fault."""

    def adds_workspace(out, x):
        taken = [torch.full((3,), left) for _ in range(50)]
        del taken
        out.copy_(2 * x + 0 * torch.empty(3))

    spec = _define(f"test_workspace_{left:.0f}", cuda=adds_workspace)
    with pytest.raises(AssertionError, match="12 elements of out hold what they held"):
        check_results(spec, CASES[0], torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool], ids=str)
def test_workspace_of_other_dtypes_is_seen_to_be_read(dtype):
    def adds_workspace(out, x):
        out.copy_(2 * x + torch.empty(3, dtype=dtype))

    spec = _define(f"test_workspace_{dtype}".replace("torch.", ""), cuda=adds_workspace)
    with pytest.raises(AssertionError, match="12 elements of out hold what they held"):
        check_results(spec, CASES[0], torch.float32, CPU)


def _define_for_slices(name, cuda):
    spec = _define(name, cuda=cuda)
    return lambda: check_slices(spec, CASES[0], torch.float32, CPU)


def test_a_kernel_that_takes_rows_for_adjacent_is_caught():
    def flat(out, x):
        out.copy_(2 * x.as_strided(x.shape, (3, 1)))

    with pytest.raises(AssertionError, match="out differs from that of arguments which are no sl"):
        _define_for_slices("test_adjacent", flat)()


def test_a_slice_may_be_refused_but_by_the_name_of_the_argument():
    def refusing(message):
        def double(out, x):
            if x.stride(0) != x.shape[1]:
                raise ContractError(message)
            out.copy_(2 * x)

        return double

    _define_for_slices("test_refused", refusing("double: x has gaps"))()
    with pytest.raises(AssertionError, match=r"names none of \['out', 'x'\]: double: odd strides"):
        _define_for_slices("test_unnamed", refusing("double: odd strides"))()


def test_elements_that_the_reference_leaves_alone_may_be_left_alone():
    def first_row(out, x):
        out[0] = 2 * x[0]

    spec = _define("test_first_row", cuda=first_row, cpu=first_row)
    check_results(spec, CASES[0], torch.float32, CPU)


def test_the_suite_runs_all_checks_in_dtypes_with_a_tolerance_but_no_bf16_in_the_interpreter():
    suite = {str(check) for check in op_suite(_define("test_suite"), CPU)}
    ids = ["reference", "kernel", "repeat", "guards", "results", "replay", "slices", "registration"]
    assert suite == {
        *(f"{name}-test_suite-R4-D3-float32" for name in ids),
        "reference-test_suite-R4-D3-bfloat16",
    }


def test_a_described_op_must_write_arguments_too():
    add = torch.ops.aten.add.Tensor
    with pytest.raises(ContractError, match="pass results as arguments"):
        describe_op(
            add, launch=add, reference=add, cases=CASES, tolerance=EXACT, traffic=lambda _: (0, 0)
        )


def test_a_name_that_the_schema_lacks_and_an_op_without_cases_are_refused():
    spec = _define("midstream_test::named")
    same = {"launch": _double, "reference": _double, "tolerance": ROUNDED, "traffic": spec.traffic}
    with pytest.raises(ContractError, match=r"results name \['outt'\]"):
        describe_op(spec.overload, cases=CASES, results=("outt",), **same)
    with pytest.raises(ContractError, match="0 cases"):
        describe_op(spec.overload, cases=(), **same)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"results": ("outt",)}, r"results name \['outt'\]"),
        ({"cases": ()}, "0 cases"),
        ({"arenas": ("pool",)}, r"results name \['pool'\]"),
        ({"tolerence": EXACT}, r"declares \['tolerence'\] that is unknown and lacks nothing"),
        ({"cuda": None}, "has cuda=None, expected a function"),
        ({"fake": 3}, "has fake=3, expected a function"),
        ({"traffic": ...}, r"lacks \['traffic'\]"),
    ],
)
@pytest.mark.parametrize("namespace", ["", "midstream_refused::"])
def test_an_op_that_is_refused_is_not_registered_and_may_be_defined_right(
    namespace, wrong, message
):
    name = f"test_refused_{''.join(filter(str.isalpha, message))}"
    schema = f"{namespace}{name}(Tensor(a!) out, Tensor x) -> ()"
    right = {"cuda": _double, "cpu": _double, "cases": CASES, "tolerance": ROUNDED}
    right["traffic"] = lambda args: (0, 0)
    given = {key: value for key, value in (right | wrong).items() if value is not ...}
    with pytest.raises(ContractError, match=message):
        define_op(schema, **given)
    home = getattr(torch.ops, namespace.rstrip(":") or "midstream")
    assert not hasattr(home, name)
    assert name not in OPS
    spec = define_op(schema, **right)
    check_registration(spec, CASES[0])


def test_a_schema_that_torch_cannot_read_registers_nothing():
    with pytest.raises(RuntimeError):
        _define("", schema="test_garbled(Tensor(a!) out Tensor x) -> ()")
    assert not hasattr(torch.ops.midstream, "test_garbled")


def test_without_a_gpu_and_an_interpreter_the_suite_says_what_to_do():
    def launch(out, x):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    spec = _define("test_no_driver", cuda=launch)
    checks = {check.name: check for check in op_suite(spec, CPU) if check.dtype == torch.float32}
    checks["reference"].run()
    checks["registration"].run()
    with pytest.raises(ContractError, match="set TRITON_INTERPRET=1 before any kernel is defined"):
        checks["kernel"].run()


def test_triton_says_that_it_has_no_driver_in_the_words_that_the_suite_knows(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    (tmp_path / "kernel.py").write_text(
        "import os\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        "import torch, triton\n"
        "from midstream.errors import ContractError\n"
        "from midstream.ops.scatter_slots import scatter_slots\n"
        "from midstream.ops.testing import op_suite\n"
        "check = next(c for c in op_suite(scatter_slots) if c.name == 'kernel')\n"
        "try:\n"
        "    check.run()\n"
        "except ContractError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "kernel.py"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.startswith("op_suite: the kernels of scatter_slots cannot run"), done.stderr


def test_a_kernel_that_disturbs_the_pages_of_others_within_the_tolerance_is_caught():
    def build(gen, dtype, device):
        arena = torch.randn(3, 4, generator=gen).to(device, dtype)
        return {"arena": arena, "x": torch.randn(4, generator=gen).to(device, dtype)}

    def write_page(arena, x):
        arena[1] = x

    def disturb(arena, x):
        write_page(arena, x)
        arena[2] *= 1 + 2e-7

    def declared(name, launch):
        return define_op(
            f"midstream_test::{name}(Tensor(a!) arena, Tensor x) -> ()", cuda=launch, cpu=write_page,
            cases=(OpCase("N3-E4", build),), tolerance=ROUNDED, traffic=lambda args: (0, 0),
        )  # fmt: skip

    right, wrong = declared("keeps", write_page), declared("disturbs", disturb)
    check_kernel(right, right.cases[0], torch.float32, CPU)
    with pytest.raises(AssertionError, match="pages of arena that are others' differ"):
        check_kernel(wrong, wrong.cases[0], torch.float32, CPU)
