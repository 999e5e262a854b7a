"""Every fault of captured steps that is put into the engine is noticed on the CPU."""

import pytest
from graph_faults import FAULTS, Edit, Fault
from graph_oracles import Run, run_oracles
from seeded_graph_faults import noticed_by, seeded


def test_the_oracles_say_nothing_of_the_healthy_engine() -> None:
    run_oracles()


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_healthy_engine_bears_any_moment_at_which_work_is_done(seed: str) -> None:
    run_oracles([Run(seed), Run(seed, few_deltas=True)])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.group}-{fault.name}")
def test_the_fault_is_noticed(fault: Fault) -> None:
    assert noticed_by(fault)


def test_a_fault_is_gone_after_its_block() -> None:
    from midstream.runtime.stage import Stage

    before = Stage._next_area
    fault = next(f for f in FAULTS if f.edits[0].target.endswith("Stage._next_area"))
    with seeded(fault):
        assert Stage._next_area is not before
    assert Stage._next_area is before


def test_a_fault_whose_text_is_gone_says_so() -> None:
    gone = Fault("A0", "gone", (Edit("runtime.stage:Stage._next_area", "no such text", "pass"),))
    with pytest.raises(LookupError, match="occurs 0 times"), seeded(gone):
        pass
