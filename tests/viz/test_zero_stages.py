import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.zero_stages import bytes_per_parameter, stage_bars, stage_grid
from tests.viz.reading import boxes, overlaps, words


def area(axes):
    """Bytes a parameter, as the cell's filled rectangles show them."""
    filled = [p for p in axes.patches if p.get_facecolor()[3] > 0]
    return sum(p.get_width() * p.get_height() for p in filled)


@pytest.mark.parametrize("ranks", [2, 4])
def test_areas_are_the_bytes_of_a_rank(ranks):
    figure = stage_grid(ranks)
    cells = [figure.axes[row * (ranks + 1) + rank] for row in range(4) for rank in range(ranks)]
    want = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    assert [area(cell) for cell in cells] == pytest.approx([n for n in want for _ in range(ranks)])
    assert [float(bytes_per_parameter(stage, ranks)) for stage in range(4)] == want


def test_the_table_of_the_paper():
    """Figure 1 of arXiv 1910.02054: 7.5 billion parameters on 64 ranks."""
    gigabytes = [7.5 * float(bytes_per_parameter(stage, 64)) for stage in range(4)]
    assert [round(n, 1) for n in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def test_slices_of_the_ranks_make_up_the_whole():
    figure = stage_grid(4)
    slices = [p for rank in range(4) for p in figure.axes[3 * 5 + rank].patches if p.get_facecolor()[3] > 0]
    starts = sorted({round(p.get_x(), 6) for p in slices})
    assert starts == [0, 0.25, 0.5, 0.75] and {p.get_width() for p in slices} == {0.25}
    assert len({p.get_facecolor() for p in slices}) == 4


def test_formulas_stand_beside_the_stages():
    seen = words(stage_grid(4))
    assert {"16Ψ", "4Ψ + 12Ψ/D", "2Ψ + 14Ψ/D", "16Ψ/D", "D = 4: 5.5 bytes a parameter"} <= set(seen)
    assert not overlaps(stage_grid(4)) and not overlaps(stage_grid(2))
    with_fp32 = stage_grid(2, {"weights": 2, "gradients": 4, "optimizer state": 12})
    assert "6Ψ + 12Ψ/D" in words(with_fp32)


def test_bars_are_the_bytes_by_owner():
    predicted = {"stage 0": {"parameters": 2e9, "moments": 6e9}, "stage 1": {"parameters": 2e9, "moments": 3e9}}
    measured = {"stage 0": {"parameters": 2e9, "moments": 6.5e9}, "stage 1": {"parameters": 2e9, "moments": 3e9}}
    figure = stage_bars(predicted, measured, capacity=8e9, binary=False)
    found = [(b.get_hatch() or "", round(b.get_height(), 6)) for b in boxes(figure)]
    assert found == [("///", 2), ("///", 6), ("", 2), ("", 6.5), ("///", 2), ("///", 3), ("", 2), ("", 3)]
    seen = words(figure)
    assert {"8", "8.5", "5", "GB on one rank", "a GPU has 8 GB", "predicted", "measured"} <= set(seen)
    assert not overlaps(figure)
    assert "measured" not in words(stage_bars(predicted))


def test_other_stages_are_refused():
    with pytest.raises(ConfigError, match="predicted"):
        stage_bars({"0": {"parameters": 1.0}}, {"1": {"parameters": 1.0}})
    with pytest.raises(ConfigError, match="on 1 ranks"):
        stage_grid(1)
