"""`jaxlm check`: it passes what is right, and finds a mutant in each kernel, in dropout and in a preset."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.analysis import check, kernel_checks
from jaxlm.analysis.kernel_checks import KERNELS, check_dropout, check_kernel
from jaxlm.cli import main
from jaxlm.models.layers import attention, chunked_kernel, disentangled_kernel, relative_kernel, row_attention
from tests.params import first_fast

CPU = jax.devices("cpu")[0]


def failures(figures) -> list[str]:
    """Names of the figures beyond their limits."""
    return [name for name, value, limit in figures if not value <= limit]


def forget_rotation(patch):
    patch.setattr(row_attention, "_rotate_back", lambda x, *_: x)


def forget_a_key(patch):
    mask = attention.LocalMask
    patch.setattr(attention, "LocalMask", lambda shape, window, offset: mask(shape, (window[0] + 1, window[1]), offset))


def forget_lengths(patch):
    stand_in = jax.nn.dot_product_attention
    patch.setattr(jax.nn, "dot_product_attention", lambda *a, key_value_seq_lengths, **b: stand_in(*a, **b))


def scale_gradient(patch):
    gradients = relative_kernel.score_gradients

    def scaled(*arguments):
        d_scores, dq = gradients(*arguments)
        return d_scores, 1.1 * dq

    patch.setattr(relative_kernel, "score_gradients", scaled)


def forget_positions(patch):
    def zeros(k_ref, rq_ref, position_scores):
        position_scores[...] = jnp.zeros_like(position_scores)

    patch.setattr(disentangled_kernel, "_position_scores", zeros)


def attend_to_itself(patch):
    scores = chunked_kernel._scores
    patch.setattr(
        chunked_kernel, "_scores", lambda inputs, chunk, o: scores(inputs, chunk, o._replace(self_score=None))
    )


@pytest.mark.parametrize(("name", "case", "mutate"), [
    ("cudnn", 0, forget_lengths), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("rows", 1, forget_rotation), ("splash", 1, forget_a_key), ("relative", 1, scale_gradient),
        ("disentangled", 0, forget_positions), ("chunked", 0, attend_to_itself))),
])
def test_a_mutant_in_each_kernel_is_found(name, case, mutate, monkeypatch):
    """One case of each kernel in bfloat16; cuDNN's call is answered by jax's own implementation."""
    answer = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, implementation, **b: answer(*a, **b, implementation="xla")
    )
    kernel = KERNELS[name]._replace(cases=KERNELS[name].cases[case : case + 1], drops=False, dtypes=("bfloat16",))
    assert not failures(check_kernel(kernel, CPU, CPU))
    mutate(monkeypatch)
    assert failures(check_kernel(kernel, CPU, CPU))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KERNELS if "cpu" in KERNELS[name].platforms])
def test_every_case_of_a_kernel_passes(name):
    assert not failures(check_kernel(KERNELS[name], CPU, CPU))


dropout = kernel_checks.dropout


def twins(x, rate, key):
    """Neighbours share a bit."""
    return x * jnp.repeat(dropout(jnp.ones(x[..., ::2].shape, x.dtype), rate, key), 2, axis=-1)


@jax.custom_vjp
def forgetful(x, key):
    return dropout(x, kernel_checks.RATE, key)


forgetful.defvjp(
    lambda x, key: (forgetful(x, key), key),
    lambda key, g: (dropout(g, kernel_checks.RATE, jax.random.fold_in(key, 1)), None),
)

MUTANTS = {
    "deviations of rate 1": lambda x, rate, key: dropout(x, 1.05 * rate, key),
    "deviations of correlation with itself": twins,
    "deviations of correlation with another key's":
        lambda x, rate, key: dropout(x, rate, None if key is None else kernel_checks.dropout_key(0, 7)),
    "gradients unlike the outputs": lambda x, rate, key: x if key is None else forgetful(x, key),
}


@pytest.mark.parametrize("figure", first_fast(["", *MUTANTS], 2))
def test_a_mutant_of_dropout_is_found(figure, monkeypatch):
    """Another rate, neighbours that share a bit, masks that all keys share, another mask in the backward pass."""
    monkeypatch.setattr(kernel_checks, "dropout", MUTANTS.get(figure, dropout))
    found = failures(check_dropout(CPU, CPU))
    assert (figure in found) if figure else not found


@pytest.mark.parametrize(("place", "name"), [
    (0, "corrupted arrays that differ"), (1, "float32 loss"), (2, "float32 gradients"), (None, ""),
])
def test_a_mutant_of_a_preset_is_found(place, name, monkeypatch):
    """The third evaluation of each type is that of the device. Rounding may change what it changes on the CPU."""
    calls = []

    def evaluate(session, mesh, params):
        calls.append(mesh)
        results = [{"ids": np.arange(8)}, np.float32(2.0), {"w": np.arange(8.0)}]
        if len(calls) == 3 and place is not None:
            results[place] = jax.tree.map(lambda x: x + 1, results[place])
        return results

    monkeypatch.setattr(check, "_evaluate", evaluate)
    assert failures(check.check_preset("word2vec_tiny", CPU)) == [name] * bool(name)


def test_no_check_ends_the_others(tmp_path, monkeypatch, capsys):
    """Reasons are in the library's own words, time that is over is "not reached", and one file has everything."""
    def crash():
        yield "figure", 1.0, 2.0
        raise RuntimeError("Mosaic failed:\n  no such layout")

    def slow():
        monkeypatch.setattr(check.time, "monotonic", lambda: math.inf)
        yield "time", 1.0, None

    checks = {"right": lambda: iter([("error", 1.0, 2.0)]), "crash": crash, "wrong": lambda: iter([("e", 3.0, 2.0)]),
              "lost": lambda: iter([("error", math.nan, 2.0)]), "slow": slow, "late": crash}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "all_checks", lambda names: checks)
    assert main(["check"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out[:5]] == ["✓", "✗", "✗", "✗", "✓"]
    assert "Mosaic failed: no such layout" in out[1] and "e is 3, above 2" in out[2] and "error is nan" in out[3]
    assert "not reached" in out[5] and "2 ✓, 3 ✗, 1 not reached" in out[6]
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text("utf-8"))
    assert "Traceback" in found["checks"]["crash"]["traceback"] and found["facts"]["jax"] == jax.__version__
    assert found["checks"]["crash"]["figures"] == {"figure": {"value": 1.0, "limit": 2.0}}
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "all_checks", lambda names: {"right": checks["right"]})
    assert main(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"]["right"]["result"] == "✓"


@pytest.mark.parametrize(("arguments", "words"), [
    (["bert_tniy"], "there is no check or preset 'bert_tniy'; the checks are xla, rows, xla in blocks"),
    (["--minutes", "0"], "--minutes is 0; it must be above 0"), (["--minutes", "soon"], "invalid float value: 'soon'"),
])
def test_mistakes(arguments, words, capsys):
    assert main(["check", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_the_order_and_the_choice():
    """Kernels first; presets that need another model's folder are left out."""
    names = list(check.all_checks([]))
    kernels = ["xla", "rows", "xla in blocks", "splash", "relative", "disentangled", "chunked"]
    assert names[:10] == [*kernels, "dropout", "twice", "resume"]
    assert {"time:bert_tiny", "xlnet_tiny"} < set(names) and not {"distilbert_tiny", "ernie_tiny"} & set(names)
    assert list(check.all_checks(["gpt2_tiny", "rows"])) == ["gpt2_tiny", "rows"]


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed_and_a_step_is_repeated():
    for one in (check.check_resume, check.check_twice):
        assert not failures(one())
