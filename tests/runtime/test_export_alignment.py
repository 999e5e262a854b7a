"""Prompt chunks are cut where the model's scans can export their states."""

from dataclasses import replace

import pytest
from tiny_models import build, prompt

import midstream
from midstream.compiler.families import FAMILIES
from midstream.compiler.families.mixer import export_alignment
from midstream.compiler.families.ssd import SSD
from midstream.compiler.lowering import lower
from midstream.ops.causal_conv_chunk import causal_conv_chunk
from midstream.ops.ssd_chunk import ssd_chunk
from midstream.runtime.plan import Chunk


def exporting(monkeypatch: pytest.MonkeyPatch, alignment: int | None) -> None:
    """Let bamba's scan declare where it exports."""
    scan = replace(ssd_chunk, export_alignment=alignment)
    kind = replace(SSD, chunk_ops=(scan, causal_conv_chunk))
    family = replace(FAMILIES["BambaForCausalLM"], mixers={"BambaMixer": kind})
    monkeypatch.setitem(FAMILIES, "BambaForCausalLM", family)


@pytest.mark.parametrize(
    ("alignments", "together"),
    [((1, 1), 1), ((64, 1), 64), ((6, 4), 12), ((None, 1), None), ((), 1)],
)
def test_a_model_exports_where_all_of_its_scans_can(
    alignments: tuple[int | None, ...], together: int | None
) -> None:
    kinds = [replace(SSD, chunk_ops=(replace(ssd_chunk, export_alignment=a),)) for a in alignments]
    assert export_alignment(kinds) == together
    ops = tuple(op for kind in kinds for op in kind.chunk_ops)
    assert export_alignment([replace(SSD, chunk_ops=ops)]) == together


def serve(family: str) -> tuple[list[list[int]], list[Chunk]]:
    """Answers to prompts that begin alike, and the chunks that they were computed in."""
    chunks: list[Chunk] = []
    with midstream.Engine(
        build(family), max_len=256, state_block=64, kv_block=16, max_step_tokens=200,
        num_state_pages=40, retention=None,
    ) as engine:  # fmt: skip
        scheduler = engine._parts.scheduler
        plan_next = scheduler.next_step

        def watched():  # type: ignore[no-untyped-def]
            plan = plan_next()
            chunks.extend(plan.chunks if plan is not None else ())
            return plan

        scheduler.next_step = watched  # type: ignore[method-assign]
        params = midstream.SamplingParams(max_tokens=3, temperature=0.0)
        ids = prompt(230).tolist()
        prompts = [ids[:190], ids, ids[:100] + ids[:50]]
        answers = [
            list(output.token_ids) for each in prompts for output in engine.generate([each], params)
        ]
    return answers, chunks


@pytest.mark.parametrize("alignment", [64, None])
def test_states_are_exported_on_the_grid_of_the_scan_and_answers_stay_the_same(
    monkeypatch: pytest.MonkeyPatch, alignment: int | None
) -> None:
    answers, free = serve("bamba")
    assert lower(build("bamba")).export_alignment == 1
    assert any((p - c.begin) % 64 for c in free for p in c.export_position)
    exporting(monkeypatch, alignment)
    assert lower(build("bamba")).export_alignment == alignment
    same, aligned = serve("bamba")
    assert same == answers and len(aligned) > len(free)
    exports = [(p - c.begin) % (alignment or 1) for c in aligned for p in c.export_position]
    assert not any(exports) and bool(exports) == (alignment is not None)
    # what cannot be exported ends a chunk instead: the same positions are kept
    assert {p for c in aligned for p in c.wanted} == {p for c in free for p in c.wanted}
