import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import GLOBAL, PASSIVE, REGISTERS, SHARED, dealt, hierarchy
from tests.viz.reading import boxes, overlaps, words


def test_blocks_are_dealt_to_the_sms_in_turn():
    assert dealt(5, 2) == [[0, 2, 4], [1, 3]] and dealt(1, 3) == [[0], [], []]
    with pytest.raises(ConfigError, match="0 blocks on 2 SMs"):
        dealt(0, 2)


def test_each_block_each_thread_and_each_memory_is_drawn_once():
    from matplotlib.colors import to_hex

    figure = hierarchy(blocks=3, threads=64, sms=2)
    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    assert colours.count(PASSIVE) == 64
    assert (colours.count(REGISTERS), colours.count(SHARED), colours.count(GLOBAL)) == (3 + 2, 2, 1)
    seen = words(figure)
    assert {"grid: 3 blocks", "block 0", "block 1", "block 2", "SM 1 runs", "block 0, 2"} <= set(seen)
    assert "thread 5 of block 2: i = 2 * 64 + 5 = 133" in seen
    assert any(text.startswith("warp 1: threads 32 to 63") for text in seen)
    assert not overlaps(figure) and not overlaps(hierarchy(blocks=6, threads=32))


def test_a_block_is_made_of_warps():
    with pytest.raises(ConfigError, match="48 threads"):
        hierarchy(threads=48)
