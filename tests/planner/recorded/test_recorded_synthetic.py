"""The frozen generators: checksums, the kernel's twin, and the presets' shapes."""

import hashlib
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.recorded import preset, read
from planner.recorded.presets import PRESET_NAMES
from planner.recorded.synthetic import (
    FLASH,
    TINY,
    _fill_demand,
    _fill_demand_numpy,
    synthetic_windows,
)

# sha256 (first 16 digits) of little-endian length int64 + demand uint16, windows 0..19, of the
# prototype that the paper's comparison figures were first measured on. Never change them.
TINY_SUMS = [
    "d2c872730f239936",
    "35405f4ec8567c0f",
    "549b10ebd9b230cb",
    "98c0fda871f47871",
    "619732fc20b0ad76",
    "90fa01fe5cf69b15",
    "c49b30c98410de0e",
    "57a6781e06d1543b",
    "f1f7c7e31cececfb",
    "be7882f5672c2c00",
    "ca821d6f5029bdc6",
    "a93b104a3cb1c523",
    "8b3dacc69541ace5",
    "3aff53ea6479c0de",
    "ca2777aa1ed02f61",
    "aedc32ff7f3c4cb7",
    "14c421d6900f0412",
    "2b17c28869767ad8",
    "9edbef7d8fa4dfa3",
    "4f1c9900787fc6f1",
]
FLASH_SUMS = [
    "6a170f3192ea2126",
    "205b38faf33f1551",
    "97fe80df28563282",
    "4b830b43c186dd46",
    "2f6b22434b154f77",
    "d5f4c091881e8901",
    "31dcd35b09327234",
    "f9daa30f3c3d9ac8",
    "360993c4aa47159c",
    "7632a145351892c7",
    "81cc3c12da0b8ea8",
    "28a09a079c9ace33",
    "fcb77c74754193a7",
    "190372dd153cde92",
    "566608c18019f36d",
    "d0cc159d804faf26",
    "6f7fb5378e170613",
    "b00369be9017aba9",
    "7db3a8df11173515",
    "9c712bcadab822f0",
]


@pytest.mark.parametrize(
    ("corpus", "sums"),
    [
        pytest.param(TINY, TINY_SUMS, id="tiny"),
        pytest.param(FLASH, FLASH_SUMS, id="flash", marks=pytest.mark.slow),
    ],
)
def test_the_twenty_windows_are_frozen_bit_for_bit(corpus, sums):
    assert len(sums) == 20
    for window, expected in zip(synthetic_windows(corpus), sums, strict=True):
        payload = window.length.astype("<i8").tobytes() + window.demand.astype("<u2").tobytes()
        assert hashlib.sha256(payload).hexdigest()[:16] == expected, window.window_id


def test_windows_are_groups_of_eight_and_every_position_is_routed():
    window = next(synthetic_windows(TINY))
    assert window.num_trajectories == 512
    assert np.array_equal(window.group, np.repeat(np.arange(64), 8))
    assert np.array_equal(window.routed_rows, window.length) and window.length.max() <= 8192
    assert window.demand.max(2).max() <= window.length.max()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16, 24]))
def test_the_demand_kernel_equals_its_numpy_twin(seed, top_k, num_experts):
    rng = np.random.default_rng(seed)
    num, layers, ranks = 4, 3, 8
    f32 = np.float32
    arguments = (
        rng.standard_normal((2, layers, num_experts), f32) * 2,
        rng.standard_normal((layers, num_experts), f32),
        np.array([0, 0, 1, 1]),
        rng.standard_normal(num).astype(f32),
        rng.standard_normal((num, layers, num_experts), f32),
        0.4,
        0.3,
        rng.standard_normal((num, layers, ranks), f32),
        rng.integers(1, 9000, num),
        top_k,
    )
    out = np.zeros((num, layers, num_experts), np.int32)
    twin = out.copy()
    _fill_demand(*arguments, out)
    _fill_demand_numpy(*arguments, twin)
    assert np.array_equal(out, twin)
    assert (out.sum(2) == arguments[8][:, None] * top_k).all()


def test_another_seed_gives_other_windows():
    first, second = (next(synthetic_windows(TINY, seed=seed)) for seed in (0, 1))
    assert not np.array_equal(first.length, second.length)


def test_experts_that_do_not_split_over_the_ranks_are_refused():
    with pytest.raises(ValueError, match="num_experts"):
        next(synthetic_windows(replace(TINY, num_experts=100)))


# slime 624b824a: (D, shards, P, C, PP, TP, CP, N, MoE layers, experts)
SHAPES = {
    "synthetic:tiny": (8, 1, 8, 8192, 1, 1, 1, 512, 23, 128),
    "synthetic:flash": (8, 1, 8, 8192, 1, 1, 1, 512, 40, 512),
    "slime:qwen3-30b": (2, 1, 8, 20480, 1, 4, 1, 256, 48, 128),
    "slime:qwen3-235b": (2, 1, 16, 32768, 4, 4, 2, 64, 94, 128),
    "slime:glm4.7-355b": (1, 1, 16, 32768, 4, 8, 2, 256, 89, 160),
    "slime:glm5.2": (1, 1, 32, 65536, 8, 4, 8, 64, 75, 256),
    "slime:glm5": (8, 2, 32, 32768, 4, 4, 2, 64, 75, 256),
    "slime:minimax-m2": (32, 16, 4, 8192, 2, 2, 1, 256, 62, 256),
}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_has_the_shape_of_its_script(name):
    chosen = preset(name)
    topology = chosen.topology
    first, second = chosen.windows(2)
    assert SHAPES[name] == (
        topology.num_dp_slots,
        topology.num_shards,
        topology.num_ep_ranks,
        topology.capacity,
        topology.pp,
        topology.tp,
        topology.cp,
        first.num_trajectories,
        first.num_layers,
        first.num_experts,
    )
    assert (first.window_id, second.window_id) == (0, 1)
    assert first.layer_numbers == chosen.layer_numbers
    assert first.num_experts % topology.num_ep_ranks == 0
    assert chosen.cost.alpha.min() > 0 and chosen.cost.beta.max() > 0


def test_dense_layers_keep_their_numbers_out_of_demand():
    assert preset("slime:glm5").layer_numbers == tuple(range(3, 78))


def test_reading_a_preset_gives_its_windows():
    windows = read("slime:qwen3-30b", num_windows=2, num_trajectories=16)
    expected = next(preset("slime:qwen3-30b").windows(1))
    assert [window.window_id for window in windows] == [0, 1]
    assert np.array_equal(windows[0].demand, expected.demand[:16])


def test_windows_are_made_one_at_a_time():
    assert len(list(islice(preset("synthetic:flash").windows(10**9), 1))) == 1


def test_an_unknown_preset_lists_the_names():
    with pytest.raises(ValueError, match=r"synthetic:tiny.*slime:glm5\.2"):
        read("slime:qwen9")
