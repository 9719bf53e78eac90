"""The wire format: round trips, every integer type, and refusals that name the sample."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_hooks.counts import _count, _count_numpy, count
from rollout_hooks.routed_experts import (
    CaptureError,
    CaptureSpec,
    _compact,
    _compact_numpy,
    compact,
    decode,
    encode,
)


def random_routing(rng, num_rows, spec):
    """int32 [row, num_hidden_layers, top_k] as the server fills it: zeros in dense layers."""
    routed = np.zeros((num_rows, spec.num_hidden_layers, spec.top_k), np.int32)
    for layer in spec.moe_layers:
        scores = rng.random((num_rows, spec.num_experts))
        routed[:, layer] = np.argsort(scores, 1)[:, : spec.top_k]
    return routed


@st.composite
def captures(draw):
    num_hidden_layers = draw(st.integers(1, 5))
    moe_layers = draw(st.sets(st.integers(0, num_hidden_layers - 1), min_size=1))
    num_experts = draw(st.sampled_from([1, 2, 5, 16, 255, 256, 257, 512]))
    spec = CaptureSpec(
        num_hidden_layers=num_hidden_layers,
        moe_layers=tuple(sorted(moe_layers)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 8))),
    )
    num_prompt, num_new = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    start_len = draw(st.integers(0, num_prompt))
    num_rows = max(0, num_prompt + num_new - 1 - start_len)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return spec, num_prompt, num_new, start_len, random_routing(rng, num_rows, spec)


@settings(max_examples=60, deadline=None)
@given(captures())
def test_encode_decode_compact_count_equals_bincount(capture):
    spec, num_prompt, num_new, start_len, routed = capture
    decoded = decode(encode(routed), num_prompt, num_new, spec, "s", start_len)
    assert decoded.dtype == np.int32 and np.array_equal(decoded, routed)
    kept = compact(decoded, spec, "s")
    assert np.array_equal(kept, routed[:, list(spec.moe_layers)])
    counts = count(kept, spec.num_experts)
    for i, layer in enumerate(spec.moe_layers):
        expected = np.bincount(routed[:, layer].ravel(), minlength=spec.num_experts)
        assert np.array_equal(counts[i], expected)
    assert (counts.sum(1) == len(routed) * spec.top_k).all()


@settings(max_examples=60, deadline=None)
@given(captures(), st.data())
def test_compact_kernel_equals_its_numpy_twin_on_faults_too(capture, data):
    spec, _, _, _, routed = capture
    if routed.size and data.draw(st.booleans()):
        at = tuple(data.draw(st.integers(0, n - 1)) for n in routed.shape)
        routed[at] = data.draw(st.sampled_from([-1, 0, spec.num_experts - 1, spec.num_experts]))
    layers = np.array(spec.moe_layers)
    shape = (len(routed), len(layers), spec.top_k)
    out, twin = np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)
    fault = _compact(routed, layers, spec.num_experts, out)
    assert fault == _compact_numpy(routed, layers, spec.num_experts, twin)
    if not fault[0]:
        assert np.array_equal(out, twin)


@settings(max_examples=40, deadline=None)
@given(captures(), st.data())
def test_count_kernel_equals_its_numpy_twin(capture, data):
    spec, _, _, _, routed = capture
    ids = routed.astype(data.draw(st.sampled_from([np.int32, np.int64, np.uint16])))
    if ids.size and data.draw(st.booleans()):
        ids[0, 0, 0] = spec.num_experts
    out = np.zeros((routed.shape[1], spec.num_experts), np.int32)
    twin = out.copy()
    good = _count(ids, out)
    assert good == _count_numpy(ids, twin)
    assert not good or np.array_equal(out, twin)


SPEC_512 = CaptureSpec(num_hidden_layers=2, moe_layers=(0, 1), num_experts=512, top_k=2)


@pytest.mark.parametrize("dtype", ["i2", "u2", "i4", "u4", "i8", "u8", ">i4"])
def test_case_7_expert_511_in_every_type_that_can_hold_it(dtype):
    routed = np.array([[[511, 0], [1, 511]], [[2, 3], [511, 510]]], dtype)
    kept = compact(routed, SPEC_512, "s")
    assert kept.dtype == np.uint16 and np.array_equal(kept, routed)
    counts = count(kept, 512)
    assert counts[0, 511] == 1 and counts[1, 511] == 2 and counts.sum() == 8


@pytest.mark.parametrize("dtype", ["u1", "i1"])
def test_case_7_a_wrapped_type_is_refused(dtype):
    wrapped = np.array([[[511, 0], [1, 511]]], np.int32).astype(dtype)
    with pytest.raises(CaptureError, match=r"sample s9.*cannot hold"):
        compact(wrapped, SPEC_512, "s9")


@pytest.mark.parametrize("bad", [-1, 512, 2**40])
def test_case_7_an_id_outside_the_experts_names_sample_and_layer(bad):
    routed = np.zeros((3, 2, 2), np.int64)
    routed[..., 1] = 1
    routed[2, 1, 0] = bad
    with pytest.raises(CaptureError, match=rf"sample s9: layer 1, row 2: expert id {bad} "):
        compact(routed, SPEC_512, "s9")


def test_a_repeated_expert_names_sample_and_layer():
    routed = np.array([[[0, 1], [4, 4]]])
    with pytest.raises(CaptureError, match="sample s9: layer 1, row 0: expert id 4 appears twice"):
        compact(routed, SPEC_512, "s9")


def test_small_models_take_one_byte_an_id():
    for num_experts, size in ((2, 1), (256, 1), (257, 2)):
        spec = CaptureSpec(num_hidden_layers=1, moe_layers=(0,), num_experts=num_experts, top_k=2)
        assert compact(np.array([[[0, 1]]]), spec, "s").itemsize == size


def test_case_5_five_tokens_have_four_rows_and_padding_is_never_counted():
    spec = CaptureSpec(num_hidden_layers=3, moe_layers=(1, 2), num_experts=6, top_k=2)
    routed = random_routing(np.random.default_rng(0), 4, spec)
    kept = compact(decode(encode(routed), 2, 3, spec, "s"), spec, "s")
    padded = np.concatenate([kept, np.zeros((3, 2, 2), kept.dtype)])
    counts = count(padded, 6, num_rows=4)
    assert (counts.sum(1) == 4 * 2).all()
    assert np.array_equal(counts, count(kept, 6))


def test_case_6_layers_come_from_configuration_and_keep_global_numbers():
    spec = CaptureSpec.from_moe_layer_freq(
        [0, 1, 1, 1], num_hidden_layers=4, num_experts=8, top_k=2
    )
    assert spec.moe_layers == (1, 2, 3)
    routed = random_routing(np.random.default_rng(1), 5, spec)
    routed[:, 0] = 7  # whatever a dense layer holds, it never reaches demand
    counts = count(compact(routed, spec, "s"), 8)
    assert counts.shape == (3, 8) and (counts.sum(1) == 10).all()
    # a layer whose demand truly sits on expert 0 is kept
    routed[:, 1] = [0, 1]
    assert count(compact(routed, spec, "s"), 8)[0].tolist() == [5, 5, 0, 0, 0, 0, 0, 0]


def test_case_6_an_integer_frequency_follows_megatron():
    spec = CaptureSpec.from_moe_layer_freq(2, num_hidden_layers=5, num_experts=4, top_k=1)
    assert spec.moe_layers == (0, 2, 4)


@pytest.mark.parametrize(
    "kwargs, field",
    [
        ({"moe_layer_freq": [0, 1, 1], "num_hidden_layers": 4}, "moe_layer_freq"),
        ({"moe_layer_freq": [0, 2, 1, 1], "num_hidden_layers": 4}, "moe_layer_freq"),
        ({"moe_layer_freq": 0, "num_hidden_layers": 4}, "moe_layer_freq"),
        ({"moe_layer_freq": [0, 0], "num_hidden_layers": 2}, "moe_layers"),
        ({"moe_layer_freq": 1, "num_hidden_layers": 2, "top_k": 9}, "top_k"),
    ],
)
def test_a_wrong_configuration_names_the_field(kwargs, field):
    with pytest.raises(ValueError, match=field):
        CaptureSpec.from_moe_layer_freq(**{"num_experts": 8, "top_k": 2, **kwargs})


@pytest.mark.parametrize("change", [b"", b"abcd", None])
def test_a_wrong_byte_count_names_sample_got_and_expected(change):
    spec = CaptureSpec(num_hidden_layers=2, moe_layers=(1,), num_experts=4, top_k=2)
    good = encode(random_routing(np.random.default_rng(2), 4, spec))
    text = good[:-8] if change is None else change
    with pytest.raises(CaptureError, match=r"sample s7: routed_experts holds \d+ bytes, exp.* 64"):
        decode(text, 2, 3, spec, "s7")


@pytest.mark.parametrize("text", ["????", "ab", 12, "é" * 4])
def test_text_that_is_not_base64_is_refused(text):
    with pytest.raises(CaptureError, match="sample s7: routed_experts is not base64"):
        decode(text, 2, 3, SPEC_512, "s7")


@pytest.mark.parametrize(
    "routed",
    [np.zeros((4, 3, 2), np.int32), np.zeros((4, 2), np.int32), np.zeros((4, 2, 2), np.float32)],
)
def test_compact_refuses_a_wrong_shape_or_type(routed):
    with pytest.raises(CaptureError, match="sample s7"):
        compact(routed, SPEC_512, "s7")


def test_count_refuses_a_wrong_shape_id_or_row_count():
    with pytest.raises(ValueError, match="routed"):
        count(np.zeros((2, 2), np.uint8), 4)
    with pytest.raises(ValueError, match="outside"):
        count(np.full((1, 1, 1), 4, np.uint8), 4)
    with pytest.raises(ValueError, match="num_rows"):
        count(np.zeros((1, 1, 1), np.uint8), 4, num_rows=2)


def test_case_12_token_level_routing_is_copied_once():
    spec = CaptureSpec(
        num_hidden_layers=12, moe_layers=tuple(range(1, 12)), num_experts=64, top_k=8
    )
    encoded = encode(random_routing(np.random.default_rng(3), 2047, spec))
    wire = 2047 * 12 * 8 * 4
    compact(decode(encoded, 1024, 1024, spec, "s"), spec, "s")  # compile first
    tracemalloc.start()
    decoded = decode(encoded, 1024, 1024, spec, "s")
    assert decoded.base is not None
    kept = compact(decoded, spec, "s")
    counts = count(kept, spec.num_experts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept.nbytes == 2047 * 11 * 8
    assert peak < wire + kept.nbytes + counts.nbytes + 100_000
