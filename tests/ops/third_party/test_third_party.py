"""An op of a third party, in its own namespace: it passes the suite, and each wrong form fails one check."""

import pytest
import torch
from leaky_step import DECLARATION, launch, leaky_step_ref
from leaky_variants import WRONG, leaky_step

from midstream.ops.registry import OPS, describe_op
from midstream.ops.testing import CHECKS, op_suite

HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("check", op_suite(leaky_step), ids=str)
def test_the_right_form_obeys_its_declaration(check):
    check.run()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_form_is_caught_by_one_check(name):
    if HAS_GPU and name in ("reference", "registration"):
        pytest.skip("wrong in its CPU implementation, which is checked where there is no GPU")
    failed = failing_checks(WRONG[name])
    assert failed[:1] == [name]
    if name != "repeat":  # what differs from run to run differs in all comparisons of two runs
        assert failed == [name]


def test_every_check_has_a_wrong_form():
    assert set(WRONG) == set(CHECKS)


def test_a_third_party_stays_in_its_namespace():
    assert leaky_step.overload is torch.ops.acme.leaky_step.default
    assert "leaky_step" not in OPS


@torch.library.custom_op("acme::leaky_step_by_torch", mutates_args=("arena", "out"))
def leaky_step_by_torch(
    arena: torch.Tensor,
    out: torch.Tensor,
    x: torch.Tensor,
    decay: torch.Tensor,
    read_page: torch.Tensor,
    write_page: torch.Tensor,
) -> None:
    run = launch if arena.is_cuda else leaky_step_ref
    run(arena, out, x, decay, read_page, write_page)


DESCRIBED = describe_op(
    torch.ops.acme.leaky_step_by_torch.default,
    launch=launch,
    reference=leaky_step_ref,
    **DECLARATION,
)


@pytest.mark.parametrize("check", op_suite(DESCRIBED), ids=str)
def test_an_op_that_torch_registered_is_proved_alike(check):
    check.run()


def failing_checks(spec):
    """Names of the checks that fail, in the order of the suite."""
    failed = []
    for check in op_suite(spec):
        try:
            check.run()
        except Exception as error:
            print(check, error)
            failed.append(check.name)
    return list(dict.fromkeys(failed))
