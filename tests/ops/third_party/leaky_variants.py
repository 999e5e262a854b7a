"""`acme::leaky_step` and what goes wrong in such ops, each as an op of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from leaky_step import DECLARATION, SCHEMA, launch, leaky_step_ref

from midstream.ops.registry import OpSpec, define_op


def _define(name: str, cuda: Callable[..., None] = launch, cpu: Any = leaky_step_ref) -> OpSpec:
    return define_op(
        f"acme::{name}{SCHEMA}", cuda=cuda, cpu=cpu, reference=leaky_step_ref, **DECLARATION
    )


def _round_decay(arena, out, x, decay, *pages):
    """A CPU implementation that takes its parameters in half precision."""
    leaky_step_ref(arena, out, x, decay.half(), *pages)


def _use_x_as_workspace(arena, out, x, *others):
    """Right results, at the cost of an argument that the schema does not mark."""
    leaky_step_ref(arena, out, x, *others)
    x.zero_()


_divide = cycle([False, True])


def _tune_again(*args, **kwargs):
    """Another form of the kernel at every launch, as from a tuner that never settles."""
    launch(*args, **kwargs, divide=next(_divide))


def _keep_a_host_copy(decay, **others):
    """Decays go through the host; a captured launch keeps those of its capture."""
    copy = torch.from_numpy(decay.numpy(force=True).copy())
    launch(decay=copy.to(decay.device), **others)


leaky_step = _define("leaky_step")

WRONG = {  # the check that catches it: an op
    "kernel": _define("writes_the_null_page", partial(launch, write_null=True)),
    "reference": _define("rounds_decay", cpu=_round_decay),
    "repeat": _define("tunes_again", _tune_again),
    "guards": _define("reads_the_next_page", partial(launch, read_on=True)),
    "results": _define("leaves_padding_undefined", partial(launch, leave_out=True)),
    "replay": _define("keeps_a_host_copy", _keep_a_host_copy),
    "slices": _define("takes_rows_for_adjacent", partial(launch, rows_adjacent=True)),
    "registration": _define("writes_x", cpu=_use_x_as_workspace),
}
