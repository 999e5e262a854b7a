"""keys: what was hashed is what is read, however it grew."""

import numpy as np
import pytest

from midstream.runtime.hashing import as_keys
from midstream.runtime.keys import Keys


def test_keys_are_the_hashes_however_they_were_appended() -> None:
    draw = np.random.default_rng(1)
    hashes = draw.integers(0, 2**64, (100, 2), np.uint64)
    want, keys, done = as_keys(hashes), Keys(), 0
    while done < 100:
        many = int(draw.integers(0, 30))
        keys.append(hashes[done : done + many])
        done = min(done + many, 100)
        assert len(keys) == done and list(keys) == want[:done]
    assert [keys[n] for n in (0, 99, -1, -100)] == [want[n] for n in (0, 99, -1, -100)]
    assert keys[3:70] == want[3:70] and keys[90:200] == want[90:]
    assert want[50] in keys and keys.index(want[50]) == 50


def test_a_key_of_a_block_that_is_not_there_is_refused() -> None:
    keys = Keys()
    assert not keys
    keys.append(np.ones((2, 2), np.uint64))
    for place in (2, -3):
        with pytest.raises(IndexError, match="of 2"):
            keys[place]
