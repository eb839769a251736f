"""Tables of names: layers, transposes, fused and reshaped matrices, bare names, ties."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.huggingface.table import Entry, Table, dense, embedding
from jaxlm.trees import get, leaves, nest, subtrees

LAYER = "layers"
QKV = (f"{LAYER}/query/kernel", f"{LAYER}/key/kernel", f"{LAYER}/value/kernel")
TABLE = Table(
    entries=(
        *embedding("word", "m.wte"),
        Entry(QKV, "m.h.{layer}.qkv.weight"),
        *dense(f"{LAYER}/out", "m.h.{layer}.out"),
        *dense("head", "score", bias=False),
    ),
    prefix="m.",
    ties={"lm_head.weight": "m.wte.weight"},
    optional=("head",),
)


def example():
    values = iter(range(10_000))

    def array(*shape):
        return np.array([next(values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    def layers():
        return {
            "query": {"kernel": array(2, 3, 4)}, "key": {"kernel": array(2, 3, 4)}, "value": {"kernel": array(2, 3, 5)},
            "out": {"kernel": array(2, 4, 3), "bias": array(2, 3)},
        }

    return {"word": {"embedding": array(7, 3)}, "layers": layers(), "head": {"kernel": array(3, 6)}}


def back(tensors, template=None, table=TABLE):
    shapes = {name: array.shape for name, array in tensors.items()}
    return nest(table.from_transformers(shapes, tensors.__getitem__, template or example(), "here"))


def test_layout():
    params = example()
    tensors = dict(TABLE.to_transformers(params))
    assert {name: array.shape for name, array in tensors.items()} == TABLE.tensor_shapes(params) == {
        "m.wte.weight": (7, 3),
        "m.h.0.qkv.weight": (3, 13), "m.h.1.qkv.weight": (3, 13),
        "m.h.0.out.weight": (3, 4), "m.h.1.out.weight": (3, 4), "m.h.0.out.bias": (3,), "m.h.1.out.bias": (3,),
        "score.weight": (6, 3),
    }
    layers = params["layers"]
    np.testing.assert_array_equal(tensors["m.h.1.out.weight"], layers["out"]["kernel"][1].T)
    np.testing.assert_array_equal(tensors["m.h.1.qkv.weight"][:, 4:8], layers["key"]["kernel"][1])
    np.testing.assert_array_equal(tensors["m.h.0.qkv.weight"][:, 8:], layers["value"]["kernel"][0])


def assert_equal(left, right):
    assert sorted(leaves(left)) == sorted(leaves(right))
    for path in leaves(right):
        np.testing.assert_array_equal(get(left, path), get(right, path), err_msg=path)


def test_round_trip():
    assert_equal(back(dict(TABLE.to_transformers(example()))), example())


def test_matrices_with_heads_as_a_dimension():
    """XLNet's q is [hidden, heads, width], and its o too, applied transposed."""
    table = Table(entries=(
        Entry((f"{LAYER}/query/kernel",), "layer.{layer}.q", shape=(3, 2, 4)),
        Entry((f"{LAYER}/out/kernel",), "layer.{layer}.o", transpose=True, shape=(3, 2, 4)),
    ))
    rng = np.random.default_rng(0)
    params = {"layers": {"query": {"kernel": rng.normal(size=(1, 3, 8)).astype(np.float32)},
                         "out": {"kernel": rng.normal(size=(1, 8, 3)).astype(np.float32)}}}
    tensors = dict(table.to_transformers(params))
    assert table.tensor_shapes(params) == {"layer.0.q": (3, 2, 4), "layer.0.o": (3, 2, 4)}
    x = rng.normal(size=(5, 3)).astype(np.float32)
    query, out = (params["layers"][name]["kernel"][0] for name in ("query", "out"))
    heads = np.einsum("ih,hnd->ind", x, tensors["layer.0.q"])
    np.testing.assert_allclose(heads.reshape(5, 8), x @ query, rtol=1e-5)
    np.testing.assert_allclose(
        np.einsum("ind,hnd->ih", heads, tensors["layer.0.o"]), heads.reshape(5, 8) @ out, rtol=1e-5
    )
    assert_equal(back(tensors, params, table), params)


def test_bare_names_and_the_second_name_of_a_tie():
    tensors = dict(TABLE.to_transformers(example()))
    bare = {name.removeprefix("m."): array for name, array in tensors.items()}
    assert_equal(back(bare), example())
    bare["lm_head.weight"] = bare.pop("wte.weight")
    assert_equal(back(bare), example())


def test_a_missing_head_is_left_out():
    tensors = dict(TABLE.to_transformers(example()))
    del tensors["score.weight"]
    assert set(back(tensors)) == {"word", "layers"}


@pytest.mark.parametrize("name", ["m.wte.weight", "m.h.1.qkv.weight", "m.h.0.out.bias"])
def test_any_other_missing_tensor_is_an_error(name):
    tensors = dict(TABLE.to_transformers(example()))
    del tensors[name]
    with pytest.raises(UserError, match=f"here lacks {name}"):
        back(tensors)


def test_unknown_and_misshapen_tensors_are_named():
    tensors = dict(TABLE.to_transformers(example()))
    with pytest.raises(UserError, match=r"has m\.h\.2\.out\.bias, surprise, which"):
        back(tensors | {"m.h.2.out.bias": np.zeros(3), "surprise": np.zeros(1)})
    # A square matrix would hide a missing transpose; these shapes do not.
    with pytest.raises(UserError, match=r"m\.h\.0\.out\.weight \[4, 3\] instead of \[3, 4\]"):
        back(tensors | {"m.h.0.out.weight": tensors["m.h.0.out.weight"].T})
    with pytest.raises(UserError, match=r"lm_head\.weight \[7\] instead of \[7, 3\]"):
        back(tensors | {"lm_head.weight": np.zeros(7)})


def test_different_values_of_one_tensor_are_refused():
    tensors = dict(TABLE.to_transformers(example()))
    with pytest.raises(UserError, match=r"has wte\.weight that differs from m\.wte\.weight"):
        back(tensors | {"wte.weight": tensors["m.wte.weight"] + 1})


def test_subtrees_are_the_largest_ones():
    every = ["a/b/x", "a/b/y", "a/c", "ab", "d/x", "d/y"]
    assert subtrees(["a/b/x", "a/b/y", "d/x", "d/y"], every) == ["a/b", "d"]
    assert subtrees(["a/b/x", "ab"], every) == ["a/b/x", "ab"]
    assert subtrees([], every) == []
