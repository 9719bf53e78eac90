"""Our window files and the shipped count file; damage is one clear ValueError."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.recorded import read, write_windows
from planner.window import Window

FIELDS = ("length", "routed_rows", "demand", "group", "estimated")


def make_window(window_id, num, *, num_layers=2, num_experts=6, top_k=2, seed=0, long=1):
    rng = np.random.default_rng([seed, window_id])
    rows = rng.integers(0, 9, num) * long
    share = rng.dirichlet(np.ones(num_experts), (num, num_layers))
    demand = np.stack([rng.multinomial(rows[i] * top_k, share[i]) for i in range(num)])
    return Window(
        window_id=window_id,
        length=rows + 1,
        routed_rows=rows,
        demand=demand,
        top_k=top_k,
        group=np.arange(num) // 2,
        estimated=rng.random(num) < 0.3,
        layer_numbers=tuple(range(1, num_layers + 1)),
    )


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(0, 99))
def test_windows_survive_a_round_trip(tmp_path_factory, sizes, seed):
    path = tmp_path_factory.mktemp("windows") / "w.npz"
    windows = [make_window(3 * i, num, seed=seed) for i, num in enumerate(sizes)]
    write_windows(path, windows)
    back = read(path)
    assert len(back) == len(windows)
    for old, new in zip(windows, back, strict=True):
        assert (old.window_id, old.top_k, old.layer_numbers) == (
            new.window_id,
            new.top_k,
            new.layer_numbers,
        )
        for field in FIELDS:
            assert np.array_equal(getattr(old, field), getattr(new, field))
    assert back[0].demand.dtype == np.uint16


def test_counts_above_16_bits_survive(tmp_path):
    window = make_window(0, 3, long=50_000)
    write_windows(tmp_path / "w.npz", [window])
    assert np.array_equal(read(tmp_path / "w.npz")[0].demand, window.demand)


def test_a_directory_is_read_in_window_order(tmp_path):
    for window_id in (10, 9, 2):
        write_windows(tmp_path / f"window{window_id}.npz", [make_window(window_id, 2)])
    assert [window.window_id for window in read(tmp_path)] == [2, 9, 10]
    assert [window.window_id for window in read(tmp_path, num_windows=1)] == [2]


def test_a_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "run" / "w.npz"
    write_windows(path, [make_window(0, 2)])
    write_windows(path, [make_window(1, 2)])
    assert [window.window_id for window in read(path)] == [1]
    assert [entry.name for entry in path.parent.iterdir()] == ["w.npz"]


@pytest.mark.parametrize(
    "windows, name, message",
    [
        ([], "w.npz", "no windows"),
        ([make_window(0, 2)], "w.bin", r"ends in \.npz"),
        ([make_window(0, 2), make_window(1, 2, num_experts=7)], "w.npz", "window 1 and window 0"),
        ([make_window(0, 2), make_window(1, 2, num_layers=1)], "w.npz", "window 1 and window 0"),
    ],
)
def test_a_file_that_could_not_be_read_back_is_not_written(tmp_path, windows, name, message):
    with pytest.raises(ValueError, match=message):
        write_windows(tmp_path / name, windows)
    assert not list(tmp_path.iterdir())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_one_clear_error_or_reads_the_same(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "w.npz"
    write_windows(path, [make_window(0, 4)])
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        read(path)
    except ValueError as error:
        assert str(path) in str(error)


def test_no_byte_of_the_archive_s_own_tables_ends_in_another_error(tmp_path):
    path = tmp_path / "w.npz"
    write_windows(path, [make_window(0, 4)])
    raw = path.read_bytes()
    directory = raw.index(b"PK\x01\x02")
    first_entry = raw.index(b"PK\x01\x02", directory + 1)
    end = raw.rindex(b"PK\x05\x06")
    for place in (*range(64), *range(directory, first_entry), *range(end, len(raw))):
        for mask in (0x01, 0x08, 0xFF):
            damaged = bytearray(raw)
            damaged[place] ^= mask
            path.write_bytes(damaged)
            try:
                read(path)
            except ValueError as error:
                assert str(path) in str(error)


def test_foreign_files_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    with pytest.raises(ValueError, match=r"a\.npz: holds \['x'\]"):
        read(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros(2))
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(ValueError, match=r"b\.npz: not a readable"):
        read(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", format=np.array("routepack-windows-9"))
    with pytest.raises(ValueError, match=r"c\.npz: format 'routepack-windows-9'"):
        read(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", format=np.array("routepack-windows-1"))
    with pytest.raises(ValueError, match=r"d\.npz: damaged"):
        read(tmp_path / "d.npz")
    np.savez(tmp_path / "e.npz", format=np.array({"a": 1}, object))
    with pytest.raises(ValueError, match=r"e\.npz: not a readable"):
        read(tmp_path / "e.npz")
    (tmp_path / "f.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"f\.txt: expected"):
        read(tmp_path / "f.txt")
    with pytest.raises(ValueError, match="no such file"):
        read(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="a directory without"):
        read(tmp_path / "empty")


def write_counts(path, **changes):
    window = make_window(0, 5)
    arrays = {
        "counts": window.demand.astype(np.uint16),
        "routed_tokens": window.routed_rows.astype(np.int32),
        "prompt_tokens": np.arange(5, dtype=np.int32) + 7,
    }
    # the first sample decides top-k: give it rows
    if not window.routed_rows[0]:
        arrays = {key: value[::-1] for key, value in arrays.items()}
    np.savez(path, **{**arrays, **changes})
    return {**arrays, **changes}


def test_a_count_file_keeps_prompts_out_of_demand(tmp_path):
    arrays = write_counts(tmp_path / "counts.npz")
    (window,) = read(tmp_path / "counts.npz", num_trajectories=4)
    assert window.top_k == 2 and window.num_trajectories == 4
    assert np.array_equal(window.routed_rows, arrays["routed_tokens"][:4])
    expected = (arrays["routed_tokens"] + arrays["prompt_tokens"])[:4]
    assert np.array_equal(window.length, expected)


@pytest.mark.parametrize(
    "changes, options",
    [
        ({"routed_tokens": np.ones(5, np.int32)}, {}),
        ({"routed_tokens": np.ones(4, np.int32)}, {}),
        ({"counts": np.zeros((5, 2), np.uint16)}, {}),
        ({"counts": np.zeros((0, 2, 3), np.uint16), "routed_tokens": np.zeros(0)}, {}),
        ({}, {"top_k": 3}),
    ],
)
def test_a_wrong_count_file_is_named(tmp_path, changes, options):
    write_counts(tmp_path / "counts.npz", **changes)
    with pytest.raises(ValueError, match=r"counts\.npz"):
        read(tmp_path / "counts.npz", **options)


def test_more_trajectories_than_there_are_is_an_error(tmp_path):
    write_windows(tmp_path / "w.npz", [make_window(0, 2)])
    with pytest.raises(ValueError, match="num_trajectories asks for 3"):
        read(tmp_path / "w.npz", num_trajectories=3)
    with pytest.raises(ValueError, match="num_windows"):
        read(tmp_path / "w.npz", num_windows=0)


def test_the_shipped_trace(traces):
    (window,) = read(traces / "counts_703x24x32.npz")
    assert window.demand.shape == (703, 24, 32) and window.top_k == 4
    assert (window.routed_rows.min(), window.routed_rows.max()) == (30, 511)
