"""What Inductor makes of graphs that write their arguments, with code generated for the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_rig import Recurrent, Watched, check_steps, drawn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from midstream.compiler.backend import midstream_backend

ROOT = Path(__file__).resolve().parents[2]
INDUCTOR = {"inner": "inductor"}

_library = torch.library.Library("test_backend_inductor", "DEF")
_library.define("shift_(Tensor(a!) x, Tensor source) -> ()")
_library.define("add_to_(Tensor(a!) x, Tensor y) -> ()")
_ops = torch.ops.test_backend_inductor


@torch.library.impl(_library, "shift_", "CompositeExplicitAutograd")
def _shift(x, source):
    for row in range(x.shape[0]):  # reads its own results if the two are one
        x[row].copy_(source[row - 1])


@torch.library.impl(_library, "add_to_", "CompositeExplicitAutograd")
def _add_to(x, y):
    x.add_(y)


for _name in ("shift_", "add_to_"):
    torch.library.register_fake(f"test_backend_inductor::{_name}", lambda x, y: None, lib=_library)


@pytest.fixture(autouse=True)
def _as_new():
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def test_compiled_calls_write_the_callers_own_state():
    plain = Recurrent()
    watched = Watched(plain, INDUCTOR)
    state = torch.zeros(2, 4)
    expected, address = state.clone(), state.data_ptr()
    for seed in range(3):
        found = watched(drawn(2, 4, seed=seed), state)
        with torch.inference_mode():
            wanted = plain(drawn(2, 4, seed=seed), expected)
        # generated code may round differently from eager kernels
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(state, expected)
    assert state.data_ptr() == address


def test_h2_a_copy_that_an_operator_reads_while_it_writes_the_original_is_kept():
    def shifts(a, b, c, d):
        _ops.shift_(a, a.clone())
        _ops.shift_(b[1], b[1].clone())
        t = c * 2
        _ops.shift_(t, +t.clone())
        _ops.shift_(d, torch.cat([torch.empty_like(d).copy_(d)]))
        return t

    arguments = [drawn(3, 4), drawn(2, 3, 4), drawn(3, 4), drawn(3, 4)]
    check_steps(Watched(shifts, INDUCTOR), shifts, arguments, [()] * 2)


def test_h3_inductor_allocates_no_copy_of_a_pool_of_which_a_view_is_written():
    def write_layer(pool, x):
        _ops.add_to_(pool[1], x)
        pool[2].mul_(0.5)
        return pool[1].sum()

    pool, x = drawn(3, 128, 64), drawn(128, 64)
    expected = pool.clone()
    compiled = torch.compile(write_layer, backend=midstream_backend)
    with torch.inference_mode():
        _, (code,) = run_and_get_code(compiled, pool, x)
        write_layer(expected, x)
    assert torch.equal(pool, expected)
    assert "add_to_.default(reinterpret_tensor(" in code
    assert "(3, 128, 64), (8192, 64, 1), torch.float32" not in code  # what an allocation would say


def test_h5_views_that_overlap_later_see_each_others_writes():
    def shift(target, source):
        target.copy_(source * 2)
        return source + 1

    watched = Watched(shift, INDUCTOR)
    pages = (slice(0, 4), slice(4, 8)), (slice(0, 4), slice(2, 6)), (slice(0, 4), slice(4, 8))
    for target, source in pages:
        pool, expected = drawn(8), drawn(8)
        assert torch.equal(
            watched(pool[target], pool[source]), shift(expected[target], expected[source])
        )
        assert torch.equal(pool, expected)
    assert counters["midstream"]["calls_with_other_overlaps"] == 1


def test_h5_views_that_overlap_by_more_or_less_than_when_compiled_see_each_others_writes():
    def double(one, other):
        one.add_(1)
        other.mul_(2)
        return one + other

    watched = Watched(double, INDUCTOR)
    pool, expected = torch.ones(12), torch.ones(12)
    for start in (2, 1, 3, 2):
        found = watched(pool[2:6], pool[start : start + 4])
        assert torch.equal(found, double(expected[2:6], expected[start : start + 4]))
        assert torch.equal(pool, expected)


def test_a_failure_of_inductor_says_who_and_how_to_do_without():
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler for C++ here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor.compile_fx, "fx_codegen_and_compile", fails)
        with pytest.raises(BackendCompilerFailed) as caught:
            Watched(Recurrent(), INDUCTOR)(drawn(2, 4), drawn(2, 4))
    head = str(caught.value).splitlines()[1]
    assert "backend midstream: Inductor cannot compile this graph" in head
    assert "no compiler for C++ here" in str(caught.value)
    assert "options={'inner': 'eager'}" in str(caught.value)


_WRITES_OR_NOT = """
import sys
import torch
writes = sys.argv[1] == "writes"
library = torch.library.Library("test_stale", "DEF")
library.define(f"op(Tensor{'(a!)' if writes else ''} x, Tensor y) -> Tensor")
def op(x, y):
    if writes:
        x.add_(y)
    return y * 2
library.impl("op", op, "CompositeExplicitAutograd")
torch.library.register_fake("test_stale::op", lambda x, y: torch.empty_like(y), lib=library)
def function(x, y):
    return torch.ops.test_stale.op(x, y), x.sum()
from midstream.compiler.backend import midstream_backend
with torch.inference_mode():
    x, y = torch.ones(3), torch.full((3,), 5.0)
    found = torch.compile(function, backend=midstream_backend)(x.clone(), y)
    assert all(map(torch.equal, found, function(x.clone(), y)))
"""


@pytest.mark.slow
def test_h5_code_of_an_operator_that_wrote_other_arguments_is_not_used_again(tmp_path):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src")))
        ),
    }
    for writes in ("reads", "writes"):
        done = subprocess.run(
            [sys.executable, "-c", _WRITES_OR_NOT, writes],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
