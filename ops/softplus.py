"""log(1 + exp(z)) in kernels, with small results exact to the last digits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(z):
    """In fp32.  log(u) / (u - 1) varies slowly, so the rounding of u = 1 + e hardly matters to it."""
    z = z.to(tl.float32)
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(z, 0.0) + log1p
