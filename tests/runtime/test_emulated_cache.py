"""What a cache may never change, again with every step captured and replayed as late as a device may."""

from collections.abc import Iterator

import pytest
from emulated_rig import emulation
from test_engine_cache import (  # noqa: F401
    test_a_marked_position_is_resumed_from_on_no_grid,
    test_all_modes_and_retentions_bring_the_same_tokens,
    test_an_answer_that_ends_at_a_stop_token_is_resumed_behind_it,
    test_mode_all_keeps_every_boundary_while_its_request_lives,
    test_more_marks_than_a_step_can_cut_are_kept_as_far_as_they_go,
    test_three_turns_that_each_change_their_last_tokens_compute_only_what_is_new,
)
from test_engine_faults import (  # noqa: F401
    test_an_aborted_answer_keeps_the_text_of_all_its_tokens,
    test_an_error_while_a_hit_is_admitted_lets_go_of_its_state,
    test_an_interrupt_anywhere_in_a_step_ends_what_it_hit_and_loses_no_page,
    test_close_gives_the_model_back_although_a_step_in_flight_is_lost,
    test_interleaved_generators_bring_each_its_own_outputs,
    test_leaving_one_generator_aborts_its_requests_only,
    test_output_tokens_counts_what_requests_got,
    test_weights_may_change_as_soon_as_no_request_is_left,
)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation():
        yield
