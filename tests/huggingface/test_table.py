"""The mechanism on a table of its own: stacks, transposes, fused matrices, bare matrices, ties."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlm.errors import UserError
from jaxlm.huggingface.table import Entry, Table, dense, embedding, paths

QKV = ("layers/query/kernel", "layers/key/kernel", "layers/value/kernel")
TABLE = Table(
    entries=(
        *embedding("word", "m.wte"),
        Entry(QKV, "m.h.{layer}.qkv.weight"),
        *dense("layers/out", "m.h.{layer}.out"),
        *dense("head", "score", bias=False),
    ),
    prefix="m.",
    ties={"lm_head.weight": "m.wte.weight"},
    heads=("head",),
)


def example():
    values = iter(range(10_000))

    def array(*shape):
        return np.array([next(values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    return {
        "word": {"embedding": array(7, 3)},
        "layers": {
            "query": {"kernel": array(2, 3, 4)}, "key": {"kernel": array(2, 3, 4)}, "value": {"kernel": array(2, 3, 5)},
            "out": {"kernel": array(2, 4, 3), "bias": array(2, 3)},
        },
        "head": {"kernel": array(3, 6)},
    }


def back(tensors, template=None):
    shapes = {name: array.shape for name, array in tensors.items()}
    return TABLE.from_transformers(shapes, tensors.__getitem__, template or example(), "here")


def test_layout():
    params = example()
    tensors = dict(TABLE.to_transformers(params))
    assert {name: array.shape for name, array in tensors.items()} == TABLE.their_names(params) == {
        "m.wte.weight": (7, 3),
        "m.h.0.qkv.weight": (3, 13), "m.h.1.qkv.weight": (3, 13),
        "m.h.0.out.weight": (3, 4), "m.h.1.out.weight": (3, 4), "m.h.0.out.bias": (3,), "m.h.1.out.bias": (3,),
        "score.weight": (6, 3),
    }
    layers = params["layers"]
    np.testing.assert_array_equal(tensors["m.h.1.out.weight"], layers["out"]["kernel"][1].T)
    np.testing.assert_array_equal(tensors["m.h.1.qkv.weight"][:, 4:8], layers["key"]["kernel"][1])
    np.testing.assert_array_equal(tensors["m.h.0.qkv.weight"][:, 8:], layers["value"]["kernel"][0])


def test_round_trip():
    params = example()
    again, fresh = back(dict(TABLE.to_transformers(params)))
    assert fresh == [] and list(paths(again)) == list(paths(params))
    for a, b in ((again["layers"], params["layers"]), (again, params)):
        for name in b:
            for leaf in b[name]:
                if isinstance(b[name][leaf], np.ndarray):
                    np.testing.assert_array_equal(a[name][leaf], b[name][leaf])


def test_bare_names_and_the_second_name_of_a_tie():
    tensors = dict(TABLE.to_transformers(example()))
    bare = {name.removeprefix("m."): array for name, array in tensors.items()}
    np.testing.assert_array_equal(back(bare)[0]["layers"]["out"]["bias"], example()["layers"]["out"]["bias"])
    bare["lm_head.weight"] = bare.pop("wte.weight")
    np.testing.assert_array_equal(back(bare)[0]["word"]["embedding"], example()["word"]["embedding"])


def test_a_missing_head_is_left_out_and_named():
    tensors = dict(TABLE.to_transformers(example()))
    del tensors["score.weight"]
    params, fresh = back(tensors)
    assert fresh == ["head/kernel"] and "head" not in params


@pytest.mark.parametrize("name", ["m.wte.weight", "m.h.1.qkv.weight", "m.h.0.out.bias"])
def test_any_other_missing_tensor_is_an_error(name):
    tensors = dict(TABLE.to_transformers(example()))
    del tensors[name]
    with pytest.raises(UserError, match=f"here lacks {name}"):
        back(tensors)


def test_unknown_and_misshapen_tensors_are_named():
    tensors = dict(TABLE.to_transformers(example()))
    with pytest.raises(UserError, match=r"holds m\.h\.2\.out\.bias, surprise, which"):
        back(tensors | {"m.h.2.out.bias": np.zeros(3), "surprise": np.zeros(1)})
    # A square matrix would hide a forgotten transpose; these shapes do not.
    with pytest.raises(UserError, match=r"m\.h\.0\.out\.weight \[4, 3\] instead of \[3, 4\]"):
        back(tensors | {"m.h.0.out.weight": tensors["m.h.0.out.weight"].T})
    with pytest.raises(UserError, match=r"lm_head\.weight \[7\] instead of \[7, 3\]"):
        back(tensors | {"lm_head.weight": np.zeros(7)})


def test_one_tensor_under_two_names_is_refused():
    tensors = dict(TABLE.to_transformers(example()))
    with pytest.raises(UserError, match=r"wte\.weight twice"):
        back(tensors | {"wte.weight": tensors["m.wte.weight"] + 1})
