"""Thousands of decode steps in place, for tests of how far a state of few bits drifts from float64."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from midstream.ops.case_data import element_offset, index
from midstream.ops.chunk_table import cut_chunks
from midstream.ops.registry import Args, OpSpec

STEPS = 4000
EARLY = 400
ELEMENTS = 64  # of a page


@dataclass(frozen=True, slots=True)
class DriftRig:
    """`draw(n)` gives what one row takes for n tokens; `per_token` names those with one line for each."""

    step: OpSpec
    chunk: OpSpec
    draw: Callable[[int], Args]
    per_token: Collection[str]

    def errors(self, state_dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
        """Largest error of the state after EARLY steps and after STEPS, relative to its largest entry."""
        exact = self._exact()
        args = {n: v.to(device) for n, v in self.draw(STEPS).items() if n != "out"}
        arena = torch.zeros((2, ELEMENTS), dtype=state_dtype, device=device)
        page, offset = index(1).to(device), element_offset(0).to(device)
        call = self.step.launch if device.type == "cuda" else self.step.reference
        found = []
        for step in range(STEPS):
            here = {n: v[step : step + 1] if n in self.per_token else v for n, v in args.items()}
            out = torch.empty_like(here["x"])
            call(arena=arena, out=out, **here, offset=offset, read_page=page, write_page=page)
            if step + 1 in (EARLY, STEPS):
                want = exact[len(found)]
                found.append(
                    ((arena[1].cpu().double() - want).abs().max() / want.abs().max()).item()
                )
        return found[0], found[1]

    def _exact(self) -> Tensor:
        """The two states [2, ELEMENTS] in float64, from one run of the chunk op's definition."""
        args = {n: v.double() if v.is_floating_point() else v for n, v in self.draw(STEPS).items()}
        arena = torch.zeros((3, ELEMENTS), dtype=torch.float64)
        table = asdict(cut_chunks([STEPS], [2], {(0, EARLY): 1}))
        args |= table | {"arena": arena, "offset": element_offset(0), "read_page": index(0)}
        self.chunk.reference(**args)
        return arena[1:]
