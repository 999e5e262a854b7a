"""Interrupted, interleaved, overloaded: what breaks ends with a reason, and the rest goes on as if alone."""

import contextlib
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
from hash_engine import HashLanguageModel, hash_engine, settle
from hash_model import answer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import midstream
from midstream.runtime.text import ByteTokenizer

GREEDY = midstream.SamplingParams(max_tokens=9, temperature=0.0)
PROMPTS = [
    [3 + (i * i + shift) % 29 for i in range(n)] for shift, n in enumerate((1, 8, 17, 16, 30))
]


def greedy(max_tokens: int, **options: Any) -> midstream.SamplingParams:
    return midstream.SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


# -- several users of one engine --------------------------------------------------------------------


def test_interleaved_generators_bring_each_its_own_outputs() -> None:
    with hash_engine() as engine:
        short, long = engine.generate(PROMPTS[:2], greedy(3)), engine.generate(PROMPTS, greedy(20))
        got = [next(long), *short, *long]
    want = [(0, 20), (0, 3), (1, 3), *((i, 20) for i in range(1, 5))]
    assert [list(out.token_ids) for out in got] == [answer(PROMPTS[i], n) for i, n in want]


def test_steps_taken_inside_of_a_generator_loop_take_nothing_from_it() -> None:
    with hash_engine() as engine:
        streamed = engine.stream(PROMPTS, greedy(12))
        got: dict[midstream.Handle, list[int]] = {}
        for update in streamed:
            got.setdefault(update.handle, []).extend(update.token_ids)
            assert engine.step() == []
        assert list(got.values()) == [answer(prompt, 12) for prompt in PROMPTS]


def test_requests_added_while_a_generator_runs_are_reported_by_step() -> None:
    with hash_engine() as engine:
        outputs, handles = [], []
        for out in engine.generate(PROMPTS[:3], greedy(5)):
            assert list(out.token_ids) == answer(out.prompt_token_ids, 5)
            handles.append(engine.add(PROMPTS[len(handles)], greedy(2)))
        outputs = settle(engine)
    assert [out.request_id for out in outputs] == [handle.request_id for handle in handles]
    assert [list(out.token_ids) for out in outputs] == [answer(p, 2) for p in PROMPTS[:3]]


def test_leaving_one_generator_aborts_its_requests_only() -> None:
    with hash_engine() as engine:
        left, kept = engine.stream(PROMPTS[:2], greedy(30)), engine.generate(PROMPTS[2:], greedy(9))
        next(left)
        first = next(kept)
        left.close()
        outputs = [first, *kept]
        assert engine.step() == []
    assert [list(out.token_ids) for out in outputs] == [answer(p, 9) for p in PROMPTS[2:]]


@pytest.mark.parametrize("ask", ["generate", "stream"])
def test_wrong_arguments_fail_at_the_call_and_nothing_is_queued(ask: str) -> None:
    with hash_engine() as engine:
        call: Any = getattr(engine, ask)
        for prompts, params, message in (
            ([[5], []], None, "prompt 1: Engine: the prompt is empty"),
            ("text", None, "pass .text. or"),
            ([[5]], [GREEDY, GREEDY], "1 prompts but 2 SamplingParams"),
            ([[5]], {"max_tokens": 3}, "params is dict"),
        ):
            with pytest.raises(midstream.ConfigError, match=message):
                call(prompts, params)
        assert engine.num_unfinished == 0
    with pytest.raises(midstream.ContractError, match="closed"):
        call([[5]])


def test_requests_are_queued_in_the_order_in_which_they_are_first_asked_for() -> None:
    with hash_engine(max_rows=1) as engine:
        never, later = engine.generate(PROMPTS, GREEDY), engine.stream([PROMPTS[1]], GREEDY)
        handle = engine.add(PROMPTS[2], GREEDY)
        assert engine.num_unfinished == 1
        del never
        assert [update.handle for update in later][-1].request_id == handle.request_id + 1
        assert [out.request_id for out in settle(engine)] == [handle.request_id]
        assert engine.step() == [] and engine.stats()["output_tokens"] == 2 * GREEDY.max_tokens


def test_a_request_waits_no_longer_than_since_it_was_queued() -> None:
    with hash_engine() as engine:
        outputs = engine.generate([PROMPTS[1]], GREEDY)
        time.sleep(0.3)
        began = time.perf_counter()
        (out,) = outputs
        assert out.timing.finished <= time.perf_counter() - began


def test_a_generator_first_asked_after_close_says_that_the_engine_is_closed() -> None:
    with hash_engine() as engine:
        outputs, updates = engine.generate(PROMPTS, GREEDY), engine.stream(PROMPTS, GREEDY)
    for left in (outputs, updates):
        with pytest.raises(midstream.ContractError, match="engine is closed"):
            next(left)


# -- exceptions at every place of a step ------------------------------------------------------------

PLACES = [
    ("scheduler", "next_step"),
    ("scheduler.checkpoints", "take_pages"),  # the plan is nearly made
    ("scheduler.checkpoints", "begin"),
    ("scheduler.checkpoints", "publish"),
    ("scheduler.live", "take"),  # the pages of a hit are held
    ("ownership.kv_pool", "take"),
    ("ownership.state_pool", "take"),
    ("ownership", "grow"),
    ("runner", "launch"),
    ("runner", "wait"),
    ("committer", "commit"),
    (
        "scheduler.checkpoints.chains",
        "of_live",
    ),  # while a step is planned, later while one is committed
    ("committer", "_arrive"),
]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 6])
def test_an_interrupt_anywhere_in_a_step_ends_what_it_hit_and_loses_no_page(
    place: tuple[str, str], turn: int
) -> None:
    with hash_engine(num_state_pages=12, max_step_tokens=24) as engine:
        handles = [engine.add(prompt, greedy(9)) for prompt in PROMPTS]
        outputs = [u.output for _ in range(turn) for u in engine.step() if u.output]
        with pytest.MonkeyPatch.context() as patch:
            part = attrgetter(place[0])(engine._parts)
            patch.setattr(part, place[1], raising(KeyboardInterrupt()), raising=True)
            try:
                outputs += [u.output for _ in range(4) for u in engine.step() if u.output]
            except KeyboardInterrupt:
                engine.check_books()
        outputs += settle(engine)
        assert sorted(out.request_id for out in outputs) == [h.request_id for h in handles]
        for out in outputs:
            assert out.finish_reason in ("length", "error")
            want = answer(out.prompt_token_ids, 9)
            assert list(out.token_ids) == want[: len(out.token_ids)]
            assert out.finish_reason == "error" or list(out.token_ids) == want
            assert (out.finish_reason == "error") == (out.error == "KeyboardInterrupt: ")
        again = list(engine.generate(PROMPTS, GREEDY))
        assert [list(out.token_ids) for out in again] == [answer(p, 9) for p in PROMPTS]


def test_an_error_while_a_hit_is_admitted_lets_go_of_its_state() -> None:
    with hash_engine() as engine:
        list(engine.generate([PROMPTS[2]], GREEDY))
        engine.add(PROMPTS[2], GREEDY)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._parts.ownership, "grow", raising(RuntimeError("no")))
            with pytest.raises(RuntimeError, match="no"):
                engine.step()
        assert [out.finish_reason for out in settle(engine)] == ["error"]  # and nothing is owned


def test_an_error_while_pages_are_poisoned_ends_the_step_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hash_engine() as engine:
        engine.add(PROMPTS[2], GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr("midstream.runtime.turns.poison_free_pages", raising(RuntimeError("no")))
            with pytest.raises(RuntimeError, match="no"):
                engine.step()
        assert [out.finish_reason for out in settle(engine)] == ["error"]


class _OddTokenizer(ByteTokenizer):
    """Has no text for some tokens."""

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def decode(self, token_ids: Any, **options: Any) -> str:
        if self.unknown in token_ids:
            raise KeyError(self.unknown)
        return super().decode(token_ids)


class _Wrapped:
    """Hides the class of a tokenizer, so that it is decoded by the general decoder."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.decode = tokenizer.decode


@pytest.mark.parametrize("streamed", [False, True])
def test_a_token_without_text_ends_its_request_and_no_other(streamed: bool) -> None:
    answers = [answer(prompt, 9) for prompt in PROMPTS]
    unknown = answers[1][8]
    others = [i for i, tokens in enumerate(answers) if unknown not in tokens]
    assert len(others) in range(1, 4), "choose other prompts"
    tokenizer = _Wrapped(_OddTokenizer(unknown))
    with hash_engine(tokenizer=tokenizer, max_rows=5) as engine:
        handles = [engine.add(prompt, GREEDY, stream=streamed) for prompt in PROMPTS]
        outputs: list[midstream.Output] = []
        for _ in PROMPTS:
            try:
                outputs += settle(engine)
            except KeyError:
                engine.check_books()
        reasons = {out.request_id: out.finish_reason for out in outputs}
        assert len(reasons) == len(handles)
        assert [
            i for i, handle in enumerate(handles) if reasons[handle.request_id] == "length"
        ] == others
        assert not engine._parts.emitter._states


# -- ends -------------------------------------------------------------------------------------------


def test_a_stop_string_ends_a_request_while_its_next_token_is_in_flight() -> None:
    with hash_engine(tokenizer=ByteTokenizer()) as engine:
        want = answer(PROMPTS[2], 12)
        stop = bytes(want[4:6]).decode()
        cut = bytes(want).decode().index(stop)
        outputs = list(
            engine.generate([PROMPTS[2], PROMPTS[3]], [greedy(12, stop=stop), greedy(12)])
        )
        assert outputs[0].finish_reason == "stop"
        assert list(outputs[0].token_ids) == want[: cut + 2]
        assert outputs[0].text == bytes(want[:cut]).decode()
        assert list(outputs[1].token_ids) == answer(PROMPTS[3], 12)


def test_an_aborted_answer_keeps_the_text_of_all_its_tokens() -> None:
    with hash_engine(tokenizer=ByteTokenizer()) as engine:
        want = answer(PROMPTS[2], 12)
        never = bytes(want[:6]).decode() + "!"  # its beginning is held back
        handle = engine.add(PROMPTS[2], greedy(12, stop=never))
        while not any(r.slot >= 0 and engine._parts.scheduler.live.num_outputs[r.slot] == 4
                      for r in engine._ledger.open.values()):  # fmt: skip
            engine.step()
        engine.abort(handle)
        (out,) = settle(engine)
    assert list(out.token_ids) == want[:4] and out.text == bytes(want[:4]).decode()


def test_weights_may_change_as_soon_as_no_request_is_left() -> None:
    want = answer(PROMPTS[2], 9)
    with hash_engine() as engine:
        (out,) = engine.generate([PROMPTS[2]], greedy(9, stop_token_ids=(want[3],)))
        assert out.finish_reason == "stop"  # its next token is still in flight
        engine.weights_changed()
        (out,) = engine.generate([PROMPTS[2]], GREEDY)
        assert out.num_cached_tokens == 0 and list(out.token_ids) == want
        engine.add(PROMPTS[1])
        with pytest.raises(midstream.ContractError, match="1 unfinished"):
            engine.weights_changed()


def test_output_tokens_counts_what_requests_got() -> None:
    want = answer(PROMPTS[2], 9)
    with hash_engine(num_state_pages=6) as engine:
        params = [
            greedy(9, stop_token_ids=(want[3],)) if p is PROMPTS[2] else GREEDY for p in PROMPTS
        ]
        outputs = list(engine.generate(PROMPTS, params))
        settle(engine)
        assert engine.stats()["output_tokens"] == sum(len(out.token_ids) for out in outputs)


def test_min_tokens_beyond_the_longest_length_harms_nobody() -> None:
    most = 2**31 - 1
    with hash_engine() as engine:
        outputs = list(engine.generate(PROMPTS[:2], greedy(most, min_tokens=most)))
    assert [out.finish_reason for out in outputs] == ["length", "length"]
    assert [len(out.token_ids) for out in outputs] == [64 - len(p) for p in PROMPTS[:2]]


def test_a_capture_that_fails_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HashLanguageModel()
    monkeypatch.setattr(midstream.Engine, "_warm_up", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), hash_engine(model):
        pass
    assert not model.lowered


def test_close_gives_the_model_back_although_a_step_in_flight_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = HashLanguageModel()
    with pytest.raises(RuntimeError, match="lost"), hash_engine(model) as engine:
        engine.add(PROMPTS[0], GREEDY)
        engine.step()
        monkeypatch.setattr(engine._parts.runner, "wait", raising(RuntimeError("device lost")))
        engine.close()
    assert not model.lowered


# -- anything may happen ----------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {
        "kv_block": st.sampled_from((4, 2)),
        "state_block": st.sampled_from((8, 4, 12)),
        "max_rows": st.sampled_from((4, 2, 1)),
        "max_step_tokens": st.sampled_from((24, 7, 70, 1)),
        "num_state_pages": st.sampled_from((7, 4, 12)),
        "num_kv_pages": st.sampled_from((33, 40)),
        "migration": st.sampled_from(("copyfree", "precopy")),
        "graphs": st.sampled_from(("full", "off")),  # decode steps are padded, or not
        "cache_mode": st.sampled_from(("align", "align", "none")),
    }
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "generate", "next", "step", "leave", "abort", "break")),
        st.integers(0, 60),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(OPTIONS, CALLS)
def test_whoever_calls_what_in_which_order_every_answer_is_right(
    options: dict[str, Any], calls: list[tuple[str, int]]
) -> None:
    """`generate`, `next` and `leave` start, continue and close generators; `break` loses a launch."""
    outputs: list[midstream.Output] = []
    running: list[Any] = []
    with hash_engine(**options) as engine:
        for name, value in calls:
            prompt = PROMPTS[value % 5][: value + 1] + PROMPTS[4][: value % 3]
            params = greedy(1 + value % 33)
            if name == "add":
                engine.add(prompt, params, priority=value % 2)
            elif name == "generate":
                running.append(engine.generate([prompt, *PROMPTS[: value % 3]], params))
            elif name == "next" and running:
                outputs += [out for out in [next(running[value % len(running)], None)] if out]
            elif name == "leave" and running:
                running.pop(value % len(running)).close()
            elif name == "step":
                outputs += [u.output for _ in range(value % 9) for u in engine.step() if u.output]
            elif name == "abort":
                engine.abort(midstream.Handle(value % 9))
            elif name == "break":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine._parts.runner.step, "run", raising(RuntimeError("lost")))
                    with contextlib.suppress(RuntimeError):
                        outputs += [u.output for u in engine.step() if u.output]
            engine.check_books()
        outputs += [out for generator in running for out in generator]
        outputs += settle(engine)
        ledger = engine._ledger
        assert not (ledger.open or ledger.inboxes or ledger.updates or engine._turns.arrivals)
    assert len({out.request_id for out in outputs}) == len(outputs)
    for out in outputs:
        want = answer(out.prompt_token_ids, 64)[: len(out.token_ids)]
        assert list(out.token_ids) == want
        assert out.finish_reason in ("length", "abort", "error")
