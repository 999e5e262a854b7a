"""The faults of `seeded_graph_faults`: what engines with captured steps have shipped, put into ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """`old` becomes `new` in the source of one function; without `old`, `new` is the value of a constant."""

    target: str  # module below midstream, and a name in it
    old: str
    new: str
    install_as: str = ""  # another name that callers use


@dataclass(frozen=True, slots=True)
class Fault:
    """One break that the oracles must notice."""

    group: str  # the report that it is on the model of
    name: str
    edits: tuple[Edit, ...]


def _fault(group: str, name: str, target: str, old: str, new: str, *more: Edit) -> Fault:
    compiled = target.startswith("ops.host_rows:fill") or target.endswith(":pad_step_py")
    name_of_compiled = target.rpartition(":")[2].removesuffix("_py") if compiled else ""
    return Fault(group, name, (Edit(target, old, new, name_of_compiled), *more))


_DECODE = "ops.host_rows:fill_decode_step_py"
_RUN = "runtime.device_step:DeviceStep.run"
_STAGE = "runtime.stage:Stage"
_RUNNER = "runtime.runner:StepRunner"

FAULTS = (
    # -- padding and index buffers ---------------------------------------------------------------------
    _fault("A2", "padding rows name slot 0", _DECODE,
           "row_slot[live:rows] = PADDING", "row_slot[live:rows] = 0"),
    _fault("A4", "the slots of an earlier step stay in the padding rows", _DECODE,
           "row_slot[live:rows] = PADDING", "pass"),
    _fault("A4", "KV places of an earlier step stay in the padding rows", _DECODE,
           "kv_slot[live:rows] = PADDING", "pass"),
    _fault("A5", "rows are numbered where slots belong", _DECODE,
           "row_slot[row] = slot[row]", "row_slot[row] = row"),
    _fault("A4", "chunk rows of an earlier step stay behind the last chunk",
           "ops.host_rows:pad_step_py",
           "area[start[_CHUNK_ROW] : start[_CHUNK_ROW + 1]][num_chunks:chunks] = PADDING", "pass"),
    _fault("A4", "tokens of an earlier prompt stay behind the last token", "ops.host_rows:pad_step_py",
           "area[start[_KV_SLOT] : start[_KV_SLOT + 1]][num_tokens:tokens] = PADDING", "pass"),
    _fault("A4", "a step with chunks sends the fields of a decode step only", f"{_STAGE}.write_chunks",
           "self._send(area, self._flat, area.flat)",
           "self._send(area, self._decode_part, area.decode_part)"),
    _fault("A4", "the number of changes of an earlier step stays", f"{_STAGE}._send",
           "self._queue.copy(target, source)", "self._queue.copy(target[1:], source[1:])"),
    _fault("B1", "changes of records that do not fit into one copy are lost", f"{_RUNNER}._flush_deltas",
           "self.queue.run(self.step.apply_deltas)", "pass"),
    _fault("B1", "changes that do not fit are applied ahead of the queue", f"{_RUNNER}._flush_deltas",
           "self.queue.run(self.step.apply_deltas)", "self.step.apply_deltas()"),

    # -- an earlier owner's state ------------------------------------------------------------------------
    _fault("B3", "a new request keeps the running column of the slot's last owner",
           "runtime.slots:SlotLayout.admission", '"state_col": NO_COL,', ""),
    _fault("B3", "a new request keeps the token count of the slot's last owner",
           "runtime.slots:SlotLayout.admission", '"computed": computed,', ""),
    _fault("B2", "the page to resume from is not told to the device", "runtime.slots:SlotLayout.admission",
           '"resume_page": resume_page,', '"resume_page": 0,'),
    _fault("B3", "a new request keeps the least length of the slot's last owner",
           "runtime.slots:SlotLayout.admission", '"min_position": sampling.min_position,',
           '**({"min_position": sampling.min_position} if sampling.params.min_tokens else {}),'),
    _fault("B2", "the page to resume from is read again by every later step", _RUN,
           "self._advance(view, rows)",
           "resume = self.slots.resume_page.clone(); self._advance(view, rows); "
           "self.slots.resume_page.copy_(resume)"),

    # -- what capture froze --------------------------------------------------------------------------------
    _fault("G9", "the number of live rows is a number of Python", _RUN,
           "self._sample(view, rows, logits)",
           "self._sample(view, self.__dict__.get('num_live', 1), logits)",
           Edit(f"{_RUNNER}.launch", "self._look_for_moves()",
                "self.step.num_live = plan.num_rows; self._look_for_moves()")),
    _fault("G9", "positions are copied when the step is bound", f"{_STAGE}.decode_view",
           'position=fields["decode_position"][:rows]', 'position=fields["decode_position"][:rows].clone()'),
    _fault("G9", "a decode step reads the KV places of a chunk step", f"{_STAGE}.decode_view",
           'kv_slot=fields["decode_kv_slot"][:rows]', 'kv_slot=fields["kv_slot"][:rows]'),
    _fault("H3", "the KV table is copied when the pools are bound", "runtime.assembly:_build",
           "Pools(temporal, conv, kv, slots.kv_table, config.kv_block)",
           "Pools(temporal, conv, kv, slots.kv_table.clone(), config.kv_block)"),
    _fault("G2", "a staged buffer is made anew instead of written in place", f"{_STAGE}._send",
           "self._queue.copy(target, source)",
           "self._flat = self._flat.clone(); self._queue.copy(self._flat[: len(source)], source)"),
    _fault("G2", "a result buffer is made anew by every run, and addresses are not checked", _RUN,
           "self._sample(view, rows, logits)",
           "self.token = self.token.clone(); self._sample(view, rows, logits)",
           Edit("runtime.runner:check_addresses", "", "lambda *args: None"),
           Edit("graphs.captured:check_addresses", "", "lambda *args: None")),
    _fault("G6", "the step reads a device value on the host", _RUN,
           "self._advance(view, rows)", "self._advance(view, int((view.row_slot >= 0).sum()))"),
    _fault("G6", "the step makes a tensor from Python data", _RUN,
           "self._advance(view, rows)",
           "view.row_slot[:0].copy_(torch.tensor([1])[:0]); self._advance(view, rows)"),
    _fault("G2", "weights that moved are not captured again", "runtime.engine:Engine.weights_changed",
           "self._parts.runner.recapture()", "pass",
           Edit(f"{_RUNNER}.moved_weights", "return self._weights.moved()", "return []")),
    _fault("G2", "saved state outlives the weights that made it", "runtime.engine:Engine.weights_changed",
           "self._parts.ownership.index.reset()", "pass"),

    # -- keys and pools ------------------------------------------------------------------------------------
    _fault("G5", "a prompt chunk of one token replays the decode graph", f"{_RUNNER}.launch",
           'if plan.kind == "decode" else', "if (plan.num_new == 1).all() else"),
    _fault("G4", "the smallest graph is taken whatever the step needs", "graphs.dispatch:Ladder.decode_step",
           "k.rows >= rows and", ""),
    _fault("G9", "graphs are looked up by the number of rows alone", "graphs.table:GraphTable.replay",
           "self._graphs.get(key) or",
           "next((g for k, g in self._graphs.items() if k.rows == key.rows), None) or"),
    _fault("H1", "logits of the graph captured last are read", f"{_RUNNER}._replay_or_run",
           "return [self._logits[key]]", "return [list(self._logits.values())[-1]]"),
    _fault("H1", "logits of the warm-up run are read", f"{_RUNNER}._capture",
           "self._logits[key] = self.step.run(view, key.rows)",
           "self._logits.setdefault(key, self.step.run(view, key.rows))"),
    _fault("H1", "logits of an earlier run are sampled", _RUN,
           "self._sample(view, rows, logits)",
           "self._sample(view, rows, self.__dict__.setdefault('kept', [logits])[0])"),
    _fault("H1", "a step samples what the replay before it left in a workspace", _RUN,
           "self._sample(view, rows, logits)",
           "left = torch.empty_like(logits); self._sample(view, rows, left); left.copy_(logits)"),
    _fault("R12", "graphs that were released are replayed", f"{_RUNNER}.release_graphs",
           "self.graphs.release()", "pass"),
    _fault("H4", "every new number of rows is captured while serving",
           "graphs.table:GraphTable._capture_late",
           "if key in self._refused or (key not in self._released and key not in self._late):",
           "if False:",
           Edit("runtime.runner:StepRunner._launch_decode",
                "self.ladder.decode_step(plan.num_rows) or GraphKey(plan.num_rows, plan.num_rows, 0)",
                "GraphKey(plan.num_rows, plan.num_rows, 0)")),
    _fault("G1", "warm-up runs go through the buffers of the last real step", f"{_RUNNER}._blank_stage",
           "field.fill_(-1 if padding else 0)", "pass"),
    _fault("A2", "warm-up runs pad with slot 0", f"{_RUNNER}._blank_stage",
           "field.fill_(-1 if padding else 0)", "field.fill_(0)"),
    _fault("G1", "what was staged is lost by a capture", f"{_RUNNER}._blank_stage",
           "field.copy_(staged[name])", "pass"),

    # -- order ---------------------------------------------------------------------------------------------
    _fault("G8", "one staging area, written again while its copy is under way", f"{_STAGE}._next_area",
           "area.sent.synchronize()", "pass",
           Edit("runtime.stage:_NUM_AREAS", "", "1")),
    _fault("G8", "staging areas rotate, but nobody waits for the copy", f"{_STAGE}._next_area",
           "area.sent.synchronize()", "pass"),
    _fault("G8", "the event of an area is recorded ahead of its copy", f"{_STAGE}._send",
           "self._queue.copy(target, source)\n    area.sent.record()",
           "area.sent.record()\n    self._queue.copy(target, source)"),
    _fault("G8", "a launch waits for its own copy", f"{_STAGE}._next_area",
           "self._turn = (self._turn + 1) % _NUM_AREAS", "self._turn = 0",
           Edit(f"{_STAGE}._send", "area.sent.record()", "area.sent.record(); area.sent.synchronize()")),
    _fault("F3", "results are read before they have arrived", f"{_RUNNER}.wait",
           "area.arrived.synchronize()", "pass"),
    _fault("F3", "one area for all results", "runtime.runner:_NUM_RESULTS", "", "1"),
    _fault("F3", "the event of the results is recorded ahead of their copies", f"{_RUNNER}._send_results",
           "area.arrived.record()\n    return area", "return area",
           Edit(f"{_RUNNER}._send_results", "self.queue.copy(area.result, self",
                "area.arrived.record(); self.queue.copy(area.result, self")),
    _fault("F3", "results are sent ahead of the step that makes them", f"{_RUNNER}.launch",
           "return InFlight(plan, self._send_results(plan, *launch(plan)))",
           "area = self._send_results(plan, plan.num_rows, []) if not plan.num_logprobs else None; "
           "ran = launch(plan); return InFlight(plan, area or self._send_results(plan, *ran))"),
    _fault("D11", "a shared KV page is copied after the step that needs it", f"{_RUNNER}.launch",
           "self.queue.copy(self.kv[target], self.kv[source])",
           "later.append((target, source))",
           Edit(f"{_RUNNER}.launch", "self._flush_deltas()", "later = []; self._flush_deltas()"),
           Edit(f"{_RUNNER}.launch", "return InFlight(plan, self._send_results(plan, *launch(plan)))",
                "flight = InFlight(plan, self._send_results(plan, *launch(plan))); "
                "[self.queue.copy(self.kv[t], self.kv[s]) for t, s in later]; return flight")),
)  # fmt: skip
