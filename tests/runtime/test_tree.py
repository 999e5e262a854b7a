"""tree: children in their order, whoever leaves; the quick way to publish against the careful one."""

from itertools import permutations

import numpy as np
import pytest
from host_rig import Case, Rig

from midstream.runtime.paged_tree import KV, PagedTree
from midstream.runtime.pages import PagePool
from midstream.runtime.tree import Node


@pytest.mark.parametrize("leaving", list(permutations(range(3))))
def test_children_keep_their_order_whoever_leaves(leaving: tuple[int, ...]) -> None:
    root = Node(0, None, 0, 1)
    children = [Node(key, root, 4, 1) for key in (1, 2, 3)]
    tail = Node(0, root, 1, 1, tail=(7,))
    left = list(children)
    for place in leaving:
        assert root.children() == [*left, tail] and not root.is_leaf
        children[place].detach()
        left.remove(children[place])
    assert root.children() == [tail] == list(root.below())
    tail.detach()
    assert root.is_leaf and root.children() == []
    late = Node(4, root, 4, 1)
    assert root.children() == [late]


def tree_of_two_blocks() -> tuple[PagedTree, PagePool, Node]:
    pool = PagePool(9, "kv")
    tree = PagedTree([pool], state=-1, kv_block=4)
    first, second = pool.take(2)
    assert tree.publish_kv([71, 72], 0, first, b"") and tree.publish_kv([71, 72], 1, second, b"")
    return tree, pool, tree.nodes[72]


def test_a_block_behind_a_known_one_is_published() -> None:
    tree, pool, node = tree_of_two_blocks()
    (page,) = pool.take(1)
    changes = tree.num_changes
    found = tree.publish_next(node, 73, 12, page)
    assert found is tree.nodes[73] and found.pages == [page] and found.parent is node
    assert pool.is_published(page) and tree.num_changes == changes + 1
    tree.check_books()


@pytest.mark.parametrize(
    "what", ["dropped", "cleared", "longer", "known", "no parent", "same page"]
)
def test_what_is_not_plainly_the_next_block_is_left_to_the_caller(what: str) -> None:
    tree, pool, node = tree_of_two_blocks()
    (page,) = pool.take(1)
    parent: Node | None = node
    key, num_tokens = 73, 12
    if what == "dropped":
        tree.forget(tree.groups[KV], node.pages[KV])
    elif what == "cleared":
        tree.clear()
    elif what == "longer":
        num_tokens = 16
    elif what == "known":
        key = 71
    elif what == "no parent":
        parent = None
    else:
        page = node.pages[KV]
    before, published = dict(tree.nodes), pool.is_published(page)
    assert tree.publish_next(parent, key, num_tokens, page) is None
    assert tree.nodes == before and pool.is_published(page) == published


def plans_of(rig: Rig, seed: int) -> list[object]:
    """Every decision over a random run of requests that share prefixes, with preemption and a reset."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, 20, 40).tolist() for _ in range(3)]
    seen: list[object] = []
    for turn in range(250):
        if draw.random() < 0.3 and rig.scheduler.num_unfinished < 6:
            text = texts[draw.integers(3)][: draw.integers(1, 40)]
            rig.add(
                [*text, *draw.integers(0, 20, draw.integers(0, 5)).tolist()],
                int(draw.integers(1, 20)),
            )
        if turn == 120:
            rig.index.reset()
        if draw.random() < 0.03 and rig.scheduler.running:
            rig.preempt(rig.scheduler.running[-1])
        plan = rig.schedule()
        if plan is not None:
            seen.append((plan.rows[:, : plan.num_rows].tolist(), rig.live.running_page.tolist()))
            seen.append(
                (rig.live.kv_table.tolist(), plan.released, [c.export_page for c in plan.chunks])
            )
            rig.launch(plan)
        if len(rig.flights) > 1 or (plan is None and rig.flights):
            rig.commit()
    rig.run()
    return [*seen, rig.done, rig.index.evictions]


@pytest.mark.parametrize("seed", range(6))
def test_plans_do_not_depend_on_how_blocks_were_published(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(num_state_pages=12, num_kv_pages=50)
    quick, hits = Rig(case), 0
    publish = PagedTree.publish_next

    def counting(*args: object) -> object:
        nonlocal hits
        node = publish(*args)  # type: ignore[arg-type]
        hits += node is not None
        return node

    monkeypatch.setattr(PagedTree, "publish_next", counting)
    plans = plans_of(quick, seed)
    assert hits > 20 and quick.index.evictions > 0
    monkeypatch.setattr(PagedTree, "publish_next", lambda *args: None)
    assert plans_of(Rig(case), seed) == plans
