"""
Which states a step keeps, and when others may see them: decided while a step is planned, published when it is
committed.
"""

from __future__ import annotations

import numpy as np

from midstream.runtime.chains import Chains
from midstream.runtime.eviction import speculative
from midstream.runtime.live import I32, LiveTable
from midstream.runtime.ownership import PageOwnership
from midstream.runtime.paged_tree import KV
from midstream.runtime.pages import NULL_PAGE
from midstream.runtime.plan import Chunk, Ending, Publication, StepPlan
from midstream.runtime.request import Request
from midstream.runtime.retention import Retention
from midstream.runtime.tree import Branch, Node

_FEW = 16  # blocks, from which on a branch of the tree is quicker


class Checkpoints:
    """Exports of prompt chunks, boundaries that answers cross, and what is left when a request ends."""

    def __init__(
        self,
        live: LiveTable,
        ownership: PageOwnership,
        chains: Chains,
        retention: Retention,
        export_alignment: int | None = 1,
        few: int = _FEW,
    ) -> None:
        """
        Args:
            export_alignment: tokens between positions, from the begin of a chunk on, at which the model's
                scans can export their state; None: at the end of a chunk only.
            few: fewer blocks than that are published one by one.
        """
        self.live = live
        self.ownership = ownership
        self.chains = chains
        self.retention = retention
        self.export_alignment = export_alignment
        self.few = few
        self.boundaries = (ownership.state_block, retention.interval) if self.is_on else (0, 0)
        self._most_exports = (
            2 * ownership.layout.num_slots + 8
        )  # cuts off the block grid in one step

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.chains.hasher is not None

    # -- chunks -----------------------------------------------------------------------------------------

    def wanted(self, request: Request, begin: int, end: int) -> dict[int, bool]:
        """Positions in (begin, end] where the request's state is to be kept; True for a guess."""
        if not self.is_on:
            return {}
        known = len(request.prompt) + len(request.outputs)
        positions = self.retention.positions(begin, end, known, request.junction, request.marks)
        self.chains.of_live(request, end)
        return {p: guess for p, guess in positions.items() if not self._exists(request, p)}

    def end_of_chunk(self, begin: int, end: int, wanted: dict[int, bool]) -> int:
        """Where the chunk must end so that the first wanted state that no scan can export is its last."""
        for position in wanted:
            if position < end and not self._can_export(begin, position):
                return position
        return end

    def kept_by_request(self, wanted: dict[int, bool], end: int) -> list[int]:
        """Positions whose pages the request itself holds to its end."""
        own = self.ownership
        if not own.keeps_all:
            return []
        return [p for p in wanted if p % own.state_block == 0 and p < end]

    def begin(self, chunk: Chunk, kept: list[int]) -> None:
        """The chunk is in the plan: expect its states; those of `kept` have the request's last pages."""
        own, request = self.ownership, chunk.request
        for position in chunk.wanted:
            if position % own.kv_block == 0:
                key = request.hashes[position // own.kv_block - 1]
                own.index.expected.add(chunk.epoch, key, position)
        if kept:
            pages = request.state_pages[-len(kept) :]
            own.state_pool.share(pages)
            chunk.export_page, chunk.export_position = pages, kept

    def take_pages(self, plan: StepPlan, num_running: int) -> None:
        """Give wanted states a page.  Exports leave a page for each live request; none is made to wait."""
        own = self.ownership
        room = self._most_exports
        for chunk in plan.chunks:
            # if not all get one: what was asked for before guesses, and later ones before earlier ones
            for position in sorted(chunk.wanted, key=lambda p: (chunk.wanted[p], -p)):
                if position == chunk.end:
                    self._publish_running(plan, chunk.request, position)
                    self.live.relocate[chunk.request.slot] = bool(position % own.state_block)
                elif position in chunk.export_position:
                    continue
                elif own.state_pool.available > num_running and room > 0:
                    room -= position % own.state_block > 0
                    chunk.export_page += own.state_pool.take(1)
                    chunk.export_position.append(position)
                elif position % own.kv_block == 0:
                    key = chunk.request.hashes[position // own.kv_block - 1]
                    own.index.expected.end(chunk.epoch, [key])
            _sort_exports(chunk)

    def at_boundaries(self, plan: StepPlan, slots: list[int]) -> None:
        """Decoding requests whose running state comes to stand on a boundary leave a checkpoint."""
        own, every = self.ownership, self.retention.interval
        for slot in slots:
            request = self.live.request[slot]
            assert request is not None
            position = int(self.live.computed[slot])
            stays = bool(every) and position % every == 0
            self._publish_running(plan, request, position, is_passing=not stays)
            self.live.relocate[slot] = bool(position % own.state_block)

    # -- endings ------------------------------------------------------------------------------------------

    def leave(self, request: Request, flight: StepPlan | None, fresh: set[int]) -> None:
        """Keep the running state of a request that leaves its slot, under its exact length.

        Args:
            flight: the step in flight, if any: what it writes is published when it is committed.
            fresh: pages that nothing has written yet.
        """
        own, slot, grid = self.ownership, request.slot, self.ownership.kv_block
        page, count = int(self.live.running_page[slot]), int(self.live.computed[slot])
        known = len(request.prompt) + int(self.live.num_outputs[slot])
        if not self.is_on or not page or page in fresh or not 0 < count <= known:
            return
        row = -1 if flight is None or flight.is_over else _row_of(flight, request.epoch)
        begin = count if row < 0 or flight is None else int(flight.num_computed[row])
        first, last = begin // grid, -(-count // grid)
        keys, tail = self.chains.of_live(request, count), self.chains.tail(request, count)
        ending = Ending(request.epoch, keys, request.root, count, tail, first)
        if row < 0 or flight is None:
            ending.kv_pages, ending.state_page = self.live.kv_pages(slot)[first:last], page
            self._publish_ending(ending)
            return
        flight.endings.append(ending)
        if count >= grid:  # what continues this sequence may wait for it
            own.index.expected.add(request.epoch, keys[count // grid - 1], count)
        ending.kv_pages = own.hand_over_kv(slot, first, last)
        ending.state_page, self.live.running_page[slot] = page, NULL_PAGE

    # -- commit -------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """While the device computes: make ready what `publish` will enter."""
        for chunk in plan.chunks:
            if self.is_on and chunk.request.epoch == chunk.epoch and chunk.branch is None:
                chunk.branch = self._new_branch(chunk)

    def publish(self, plan: StepPlan, filled: I32) -> None:
        """Everything that the step wrote becomes visible; rows whose request has left leave only endings.

        `filled`: rows whose request is in its slot and that completed KV pages.
        """
        if len(filled):
            self._publish_kv(plan, filled)
        for chunk in plan.chunks:
            if chunk.request.epoch == chunk.epoch:
                self._publish_chunk(chunk)
        for item in plan.publications:
            if item.request.epoch == item.epoch:
                self._publish_passing(item)
        for ending in plan.endings:
            self._publish_ending(ending)

    def _publish_kv(self, plan: StepPlan, filled: I32) -> None:
        num_chunks = int(np.searchsorted(filled, len(plan.chunks)))
        for row in filled[:num_chunks].tolist():
            self._publish_prompt(plan.chunks[row])
        if num_chunks < len(filled):
            self._publish_answers(plan, filled[num_chunks:])

    def _publish_prompt(self, chunk: Chunk) -> None:
        """The KV pages of all blocks that a chunk has completed."""
        request, grid, last_node = chunk.request, self.ownership.kv_block, self.chains.last_node
        slot, begin, end = request.slot, chunk.begin // grid, chunk.end // grid
        branch = chunk.branch
        if branch is None:
            self._publish_blocks(request, begin, end)
            return
        first = branch.nodes[0].num_tokens // grid - 1
        self._publish_blocks(request, begin, first)
        node = last_node[slot]
        if node is not None and self.ownership.index.tree.graft(node, branch):
            last_node[slot] = branch.nodes[-1]
        else:
            self._publish_blocks(request, first, end)

    def _publish_blocks(self, request: Request, begin: int, end: int) -> None:
        """Blocks [begin, end) of a request, whatever is there already."""
        grid, slot = self.ownership.kv_block, request.slot
        keys = self.chains.of_live(request, end * grid)[begin:end]
        publish, node = self.ownership.index.tree.publish_next, self.chains.last_node[slot]
        for block, page in enumerate(self.live.kv_table[slot, begin:end].tolist(), start=begin):
            node = publish(node, keys[block - begin], (block + 1) * grid, page)
            node = node or self._publish_block(request, block, page)
        self.chains.last_node[slot] = node

    def _new_branch(self, chunk: Chunk) -> Branch | None:
        """What a chunk adds to the tree behind its first block and what is known; None if it is little."""
        grid, tree, slot = self.ownership.kv_block, self.ownership.index.tree, chunk.request.slot
        first, end = chunk.begin // grid + 1, chunk.end // grid
        if end - first < self.few:
            return None
        keys = self.chains.of_live(chunk.request, chunk.end)
        first = max(first, tree.longest_known(keys, chunk.end)[1])
        if end - first < self.few:
            return None
        pages = self.live.kv_table[slot, first:end].copy()
        return tree.new_branch(keys[first:end], pages, first * grid)

    def _publish_answers(self, plan: StepPlan, rows: I32) -> None:
        """The KV page of the block that each of these decoding rows has completed."""
        slots, grid = plan.slot[rows], self.ownership.kv_block
        blocks = plan.num_computed[rows] // grid
        keys = self.chains.next_keys(slots, blocks)
        pages = self.live.kv_table[slots, blocks].tolist()
        last_node, publish = self.chains.last_node, self.ownership.index.tree.publish_next
        completed = zip(slots.tolist(), blocks.tolist(), keys, pages, strict=True)
        for slot, block, key, page in completed:
            node = publish(last_node[slot], key, (block + 1) * grid, page)
            if node is None:
                request = self.live.request[slot]
                assert request is not None
                node = self._publish_block(request, block, page)
            last_node[slot] = node

    def _publish_block(self, request: Request, block: int, page: int) -> Node | None:
        """Publish a KV page, whatever is there already; returns the block's node."""
        index, num_blocks = self.ownership.index, block + 1
        keys = self.chains.of_live(request, num_blocks * index.kv_block)
        index.publish_kv(keys, block, page, request.root)
        return index.tree.node_before(keys, num_blocks, request.root)

    def _publish_chunk(self, chunk: Chunk) -> None:
        request, grid = chunk.request, self.ownership.kv_block
        for position, page in zip(chunk.export_position, chunk.export_page, strict=True):
            self._publish_state(request, position, page, chunk.wanted[position])
        keys = [
            request.hashes[p // grid - 1] for p in chunk.wanted if p % grid == 0 and p < chunk.end
        ]
        self.ownership.index.expected.end(chunk.epoch, keys)

    def _publish_passing(self, item: Publication) -> None:
        request, grid, index = item.request, self.ownership.kv_block, self.ownership.index
        node = self.chains.last_node[request.slot]
        if node is not None and node.num_tokens == item.position and node.pages[KV]:
            published = index.publish_state_on(node, item.page)
        else:
            node, published = None, self._publish_state(request, item.position, item.page, False)
        if item.position % grid == 0:
            key = node.key if node is not None else request.hashes[item.position // grid - 1]
            index.expected.end(item.epoch, [key])
            if published and item.is_passing:
                request.boundaries.append((key, item.page))
                if len(request.boundaries) > 2:
                    index.retract(*request.boundaries.pop(0))

    def _publish_state(self, request: Request, position: int, page: int, is_guess: bool) -> bool:
        grid = self.ownership.kv_block
        partial = position % grid > 0
        return self.ownership.index.publish_state(
            self.chains.of_live(request, position),
            page,
            position,
            root=request.root,
            tail=self.chains.tail(request, position) if partial else (),
            kv_page=int(self.live.kv_table[request.slot, position // grid])
            if partial
            else NULL_PAGE,
            value=speculative() if is_guess else None,
        )

    def _publish_ending(self, ending: Ending) -> None:
        own = self.ownership
        whole = ending.num_tokens // own.kv_block
        for block, page in enumerate(ending.kv_pages, start=ending.first_block):
            if block < whole:
                own.index.publish_kv(ending.keys, block, page, ending.root)
        if not own.state_pool.is_published(
            ending.state_page
        ):  # else the end was a checkpoint already
            own.index.publish_state(
                ending.keys,
                ending.state_page,
                ending.num_tokens,
                root=ending.root,
                tail=ending.tail,
                kv_page=ending.kv_pages[-1] if ending.tail else NULL_PAGE,
            )

    def _publish_running(
        self, plan: StepPlan, request: Request, position: int, is_passing: bool = False
    ) -> None:
        page = int(self.live.running_page[request.slot])
        plan.publications.append(Publication(request, request.epoch, position, page, is_passing))

    def _exists(self, request: Request, position: int) -> bool:
        index, grid = self.ownership.index, self.ownership.kv_block
        if position % grid:
            tail = self.chains.tail(request, position)
            return index.has_tail(request.hashes, request.root, tail, position)
        return index.has_state(request.hashes[position // grid - 1])

    def _can_export(self, begin: int, position: int) -> bool:
        alignment = self.export_alignment
        return alignment is not None and (position - begin) % alignment == 0


def _row_of(plan: StepPlan, epoch: int) -> int:
    """The row of a slot's occupant in a step, -1 if it has none."""
    rows = np.nonzero(plan.epoch == epoch)[0]
    return int(rows[0]) if len(rows) else -1


def _sort_exports(chunk: Chunk) -> None:
    order = sorted(zip(chunk.export_position, chunk.export_page, strict=True))
    chunk.export_position = [position for position, _ in order]
    chunk.export_page = [page for _, page in order]
