"""tree: children in their order, whoever leaves; the quick ways to publish against the careful one."""

from collections import Counter
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
from host_rig import Case, Rig

from midstream.errors import ContractError
from midstream.runtime.events import EventLog
from midstream.runtime.page_passes import fill_chain
from midstream.runtime.paged_tree import KV, PagedTree
from midstream.runtime.pages import PagePool
from midstream.runtime.tree import Branch, Node


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
    case, hits = Case(num_state_pages=12, num_kv_pages=50), Counter[str]()

    def counted(name: str) -> Callable[..., object]:
        quick = getattr(PagedTree, name)

        def call(*args: object) -> object:
            found = quick(*args)
            hits[name] += bool(found)
            return found

        return call

    quick_ways = ("publish_next", "graft")
    for name in quick_ways:
        monkeypatch.setattr(PagedTree, name, counted(name))
    rig = Rig(case)
    plans = plans_of(rig, seed)
    assert min(hits[name] for name in quick_ways) > 5 and rig.index.evictions > 0
    for name in quick_ways:
        monkeypatch.setattr(PagedTree, name, lambda *args: None)
    assert plans_of(Rig(case), seed) == plans


def branch_behind(tree: PagedTree, pool: PagePool, keys: list[int]) -> Branch:
    return tree.new_branch(keys, np.array(pool.take(len(keys)), np.int32), num_tokens=8)


def test_a_branch_is_not_seen_before_it_is_grafted_and_then_as_if_published_block_by_block() -> (
    None
):
    tree, pool, node = tree_of_two_blocks()
    branch = branch_behind(tree, pool, [73, 74, 75])
    assert tree.longest_known([71, 72, 73, 74, 75], 20) == (node, 2) and node.is_leaf
    tree.check_books()
    changes = tree.num_changes
    assert tree.graft(node, branch)
    last, known = tree.longest_known([71, 72, 73, 74, 75, 76], 24)
    assert (last, known, last.num_tokens) == (branch.nodes[-1], 5, 20)
    assert tree.num_changes == changes + 3 and tree.nodes[73].parent is node
    assert all(pool.is_published(page) for page in branch.pages.tolist())
    tree.check_books()


@pytest.mark.parametrize("what", ["dropped", "cleared", "longer", "known", "same page", "watched"])
def test_a_branch_that_does_not_plainly_fit_is_left_to_the_caller(what: str) -> None:
    tree, pool, node = tree_of_two_blocks()
    branch = branch_behind(tree, pool, [73, 74, 75])
    if what == "dropped":
        tree.forget(tree.groups[KV], node.pages[KV])
    elif what == "cleared":
        tree.clear()
    elif what == "longer":
        assert node.parent is not None
        node = node.parent
    elif what == "known":
        tree.publish_kv([71, 72, 73, 74], 2, pool.take(1)[0], b"")
    elif what == "same page":
        tree.publish_kv([71, 72, 83], 2, int(branch.pages[1]), b"")
    else:
        tree.log = EventLog()
    before = dict(tree.nodes)
    assert not tree.graft(node, branch)
    assert tree.nodes == before
    tree.check_books()


def test_a_branch_whose_page_nobody_holds_is_refused_and_changes_nothing() -> None:
    tree, pool, node = tree_of_two_blocks()
    branch = branch_behind(tree, pool, [73, 74, 75])
    pool.release(int(branch.pages[1]))
    with pytest.raises(ContractError, match="nobody holds it"):
        tree.graft(node, branch)
    pool.release(branch.pages[::2].tolist())
    tree.check_books()
    assert len(tree.nodes) == 2 and node.is_leaf


def test_pages_of_a_prefix_are_read_without_its_nodes_whichever_copy_of_a_block_is_left() -> None:
    tree, pool, node = tree_of_two_blocks()
    (copy,) = pool.take(1)
    tree.publish_kv([71], 0, copy, b"")
    assert tree.graft(node, branch_behind(tree, pool, [73, 74]))
    tree.check_books()
    pages = np.zeros(4, np.int32)
    first, second = tree.nodes[71].pages[KV], node.pages[KV]
    assert fill_chain(tree.above, tree.nodes[74].pages[KV], pages) == 0
    assert pages.tolist() == [first, second, 4, 5]
    assert tree.end_of_chain(pages[::-1].copy(), 1) == 4
    tree.forget(tree.groups[KV], first)  # the copy takes its place
    tree.check_books()
    fill_chain(tree.above, tree.nodes[74].pages[KV], pages)
    assert pages.tolist() == [copy, second, 4, 5]
    tree.above[second] = first
    with pytest.raises(ContractError, match=f"KV page {second} of 8 tokens is noted behind page 1"):
        tree.check_books()
