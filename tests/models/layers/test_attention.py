"""Attention: the choice of the kernel, and that each kernel gives the results of plain attention, without hardware."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl

from jaxlm.data.base import Statistics
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.models.base import Inputs
from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers import attention, kernel_choice, multi_head
from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.config import StackConfig
from jaxlm.models.layers.dropout import dropout_seeds, keep_mask, keep_scale
from jaxlm.models.layers.kernel_choice import Attention
from jaxlm.models.layers.multi_head import MultiHeadAttention, Visibility
from jaxlm.models.layers.rotary import Rope, rotate
from jaxlm.models.layers.row_attention import Options
from jaxlm.models.roberta import Roberta
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.parallel import compiler
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch
from tests.params import first_fast, random_params


def target(monkeypatch, platform: str) -> None:
    """Trace for a platform; jax's questions to an attached GPU about its cuDNN are answered for an H100."""
    monkeypatch.setattr(kernel_choice, "target_platform", lambda: platform)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False, raising=False)
    monkeypatch.setattr(kernel_choice, "target_kind", lambda: "NVIDIA H100")


@pytest.mark.parametrize("mask", [None, (2, 1, 1, 16), (2, 1, 16, 16), (1, 1, 16, 16)])
@pytest.mark.parametrize("bias", [None, (1, 4, 16, 16)])
@pytest.mark.parametrize("segments", [False, True])
def test_cudnn_accepts_masks_and_biases(mask, bias, segments, monkeypatch):
    """Tracing runs jax's checks of shapes and types."""
    target(monkeypatch, "gpu")
    row = jnp.ones((2, 16), jnp.int32) if segments else None

    def loss(x, bias):
        flags = None if mask is None else jnp.ones(mask, bool)
        y = attend(x, x, x, query_segments=row, key_segments=row, mask=flags, bias=bias, causal=True, kernel="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.bfloat16)
    given = None if bias is None else jax.ShapeDtypeStruct(bias, jnp.float32)
    assert "dot_product_attention_bwd" in str(jax.make_jaxpr(jax.grad(loss))(x, given))


def choice(
    monkeypatch, platform, implementation="auto", queries=128, keys=128, dtype="bfloat16", kind="TPU v4", **arguments
) -> str:
    """Return the kernel for these arguments on a platform."""
    target(monkeypatch, platform)
    if platform == "tpu":
        monkeypatch.setattr(kernel_choice, "target_kind", lambda: kind)
    what = Attention(queries, keys, dtype=dtype, **dict(heads=12, head_dim=64) | arguments)
    return kernel_choice.choose_kernel(implementation, what)


@pytest.mark.parametrize(("kind", "dtype", "expected"), [
    ("TPU v3", "bfloat16", "xla"), ("TPU v3", "float32", "splash"), ("TPU v4", "bfloat16", "rows"),
])
def test_kernels_need_v4_for_bfloat16(kind, dtype, expected, monkeypatch):
    assert choice(monkeypatch, "tpu", dtype=dtype, kind=kind) == expected


@pytest.mark.parametrize(("precision", "dtype", "queries", "expected"), [
    ("highest", "bfloat16", 4096, "xla"), ("highest", "float32", 4096, "splash"), ("highest", "bfloat16", 128, "rows"),
    ("bfloat16", "bfloat16", 4096, "splash"),
])
def test_splash_attention_has_no_exact_products_of_bfloat16(precision, dtype, queries, expected, monkeypatch):
    with jax.default_matmul_precision(precision):
        assert choice(monkeypatch, "tpu", dtype=dtype, queries=queries, keys=queries) == expected


def test_a_line_says_which_kernel_and_why_not(monkeypatch):
    """The reason is the library's own."""
    with kernel_choice.recorded_choices() as kernels:
        choice(monkeypatch, "gpu", queries=512, keys=512)
        choice(monkeypatch, "gpu", queries=512, keys=512, head_dim=12)
    assert kernels() == (
        "512 x 512 by cudnn; 512 x 512 by xla (scores in memory: NotImplementedError: The head dim must be <= 256 "
        "and a multiple of 8, but got 12.)"
    )
    for platform, reason in (
        ("gpu", "cuDNN needs --objective.model.attention-dropout 0"),
        ("tpu", "dropout of the scores, which only the kernel for short rows has"),
    ):
        with kernel_choice.recorded_choices() as kernels:
            choice(monkeypatch, platform, queries=4096, keys=4096, drops=True)
        assert kernels() == f"4096 x 4096 by xla (scores in memory: {reason})"
    monkeypatch.setattr(kernel_choice, "target_options", lambda: compiler.GPU_OPTIONS)
    assert choice(monkeypatch, "gpu") == "cudnn"
    monkeypatch.setattr(kernel_choice, "target_options", lambda: compiler.DETERMINISTIC_GPU_OPTIONS)
    with kernel_choice.recorded_choices() as kernels:
        assert choice(monkeypatch, "gpu") == "xla"
    assert kernels().endswith("by cuDNN under --train.deterministic)")
    with kernel_choice.recorded_choices() as kernels:
        assert choice(monkeypatch, "cpu") == "xla"
    assert kernels() == "", "a CPU has no choice"


@pytest.mark.parametrize(("platform", "arguments", "expected"), [
    ("cpu", {}, "xla"), ("gpu", {}, "cudnn"), ("gpu", dict(drops=True), "xla"), ("tpu", {}, "rows"),
    ("tpu", dict(drops=True), "rows"), ("gpu", dict(implementation="xla"), "xla"),
    ("tpu", dict(implementation="xla"), "xla"), ("gpu", dict(dtype="float32"), "xla"),
    ("tpu", dict(dtype="float32"), "splash"), ("tpu", dict(dtype="float32", drops=True), "xla"),
    ("tpu", dict(queries=4096, keys=4096), "splash"), ("tpu", dict(queries=4096, keys=4096, drops=True), "xla"),
    ("tpu", dict(queries=1024, keys=1024, causal=True), "rows"), ("tpu", dict(queries=1024, keys=1024), "rows"),
    ("tpu", dict(queries=2048, keys=2048, head_dim=128), "splash"),
    ("tpu", dict(queries=2048, keys=2048, head_dim=128, causal=True), "rows"),
    ("tpu", dict(queries=2048, keys=2048, causal=True), "rows"), ("tpu", dict(queries=256, causal=True), "splash"),
    ("tpu", dict(queries=1152, keys=1152, causal=True), "splash"),
    ("tpu", dict(queries=2048, keys=2048), "splash"), ("tpu", dict(queries=1024, keys=1024, head_dim=32), "rows"),
    ("tpu", dict(heads=3), "splash"), ("tpu", dict(heads=3, drops=True), "xla"),
    ("tpu", dict(head_dim=80), "splash"), ("tpu", dict(head_dim=128, heads=3, drops=True), "rows"),
    ("tpu", dict(bias=(1, 12, 128, 128)), "rows"), ("tpu", dict(bias=(1, 3, 128, 128), heads=3), "xla"),
    ("tpu", dict(bias=(1, 12, 512, 1024), queries=512, keys=1024), "xla"),
    ("tpu", dict(bias=(1, 12, 128, 128), dtype="float32"), "xla"), ("tpu", dict(bias=(2, 12, 128, 128)), "xla"),
    ("tpu", dict(mask=(2, 1, 1, 128)), "xla"), ("tpu", dict(queries=20), "xla"),
    ("tpu", dict(queries=256), "rows"),
    ("gpu", dict(bias=(1, 12, 128, 128)), "cudnn"), ("gpu", dict(bias=(1, 12, 128, 127), keys=127), "xla"),
    ("gpu", dict(keys=127), "xla"), ("gpu", dict(queries=79), "xla"), ("gpu", dict(queries=80, packed=True), "cudnn"),
    ("gpu", dict(head_dim=12), "xla"), ("gpu", dict(mask=(16, 1, 1, 128)), "cudnn"),
    ("gpu", dict(band=65), "cudnn"),
])
def test_the_chosen_kernel_fits_platform_and_arguments(platform, arguments, expected, monkeypatch):
    assert choice(monkeypatch, platform, **arguments) == expected


@pytest.mark.parametrize(("platform", "length", "arguments", "expected"), [
    ("cpu", 511, {}, "xla"), ("cpu", 512, {}, "xla in blocks"), ("gpu", 999, {}, "cudnn in blocks"),
    ("gpu", 512, dict(drops=True), "xla in blocks"), ("gpu", 512, dict(implementation="xla"), "xla"),
    ("gpu", 512, dict(causal=True), "cudnn"), ("gpu", 512, dict(causal=True, packed=True), "cudnn in blocks"),
    ("gpu", 512, dict(causal=True, dtype="float32"), "xla in blocks"), ("gpu", 382, dict(causal=True), "cudnn"),
    ("gpu", 382, dict(causal=True, packed=True), "cudnn"), ("tpu", 512, {}, "rows"),
    ("tpu", 512, dict(drops=True), "rows"),
])
def test_bands_are_computed_in_blocks_where_these_halve_the_scores(platform, length, arguments, expected, monkeypatch):
    """Blocks of 128 queries with 256 keys, or causal with 192; a TPU's kernels and cuDNN's window need none."""
    assert choice(monkeypatch, platform, queries=length, keys=length, band=65, **arguments) == expected


SIZES = dict(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, dtype="bfloat16", attention_dropout=0.0)
ELECTRA = {f"generator_{name}": size for name, size in SIZES.items() if name not in ("dtype", "attention_dropout")}
ERNIE = SIZES | dict(num_layers=3, num_text_layers=1, entity_hidden_size=16, entity_num_heads=2)


@pytest.mark.parametrize(("objective", "length", "kernels"), [
    (MaskedLM(model=Bert(**SIZES), input_format="document"), 32, 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (MaskedLM(model=Bert(**SIZES), input_format="document"), 31, 0),
        (MaskedLM(model=Roberta(**SIZES), input_format="full-sentences"), 32, 2),
        (MaskedLM(model=Roberta(**SIZES), input_format="packed"), 32, 2),
        (SpanBoundary(model=Bert(**SIZES)), 32, 2), (ReplacedTokens(model=Electra(**SIZES, **ELECTRA)), 32, 4),
        (EntityAutoencoder(model=Ernie(**ERNIE), max_entities=3), 32, 4), (CausalLM(model=Gpt2(**SIZES)), 32, 2))),
])
def test_training_steps_are_lowered_with_cudnn(objective, length, kernels, monkeypatch):
    """All layers, also the last one at an odd number of predicted positions; rows of odd length without cuDNN."""
    target(monkeypatch, "gpu")
    objective = objective.bind(Vocabulary.stand_in(200), length, Statistics(np.arange(200), 0.0))
    shape = jax.ShapeDtypeStruct((2, objective.row_format(length).length), jnp.int32)
    entities = [shape] if isinstance(objective, EntityAutoencoder) else []
    key = jax.eval_shape(lambda: jax.random.key(0))
    example = jax.eval_shape(objective.corrupt, key, TokenBatch(shape, shape, *entities))
    objective = objective.with_constants({"vectors": jnp.zeros((301, 16))})

    def loss(params, example, key):
        return sum(term.total for term in objective.loss(params, example, key, True).values())

    traced = jax.jit(jax.grad(loss)).trace(jax.eval_shape(objective.init, key), example, key)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"@__cudnn\$fmha\w*Backward\(", text)) == kernels


@functools.cache
def arrays(length: int):
    """Return query, key, value [2, length, 2, 64] and the cotangent of the result."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((2, length, 2, 64)), jnp.float32) for _ in range(4))


def segments(length: int, *rows: list[int]) -> jax.Array:
    """Return rows of three runs with these segment numbers; 0 is padding."""
    sizes = [length // 2 - 10, length // 4 + 5, length - length // 2 - length // 4 + 5]
    return jnp.asarray([np.repeat(row, sizes) for row in rows], jnp.int32)


def use(kernel: str, monkeypatch) -> None:
    """Make models choose a kernel; the TPU's run in Pallas's interpreter."""
    interpreted = functools.partial(attention.make_splash_mha, interpret=True)
    monkeypatch.setattr(attention, "make_splash_mha", interpreted)
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    monkeypatch.setattr(multi_head, "choose_kernel", lambda *_, **__: kernel)


def results(kernel, monkeypatch, length, real, **arguments):
    """Return attention at non-padding positions, and its gradients, by a kernel."""
    use(kernel, monkeypatch)

    def run(query, key, value):
        y = attend(query, key, value, scale=0.125, kernel=kernel, **arguments)
        return jnp.where(real[..., None, None], y, 0)

    return with_gradients(run, *arrays(length))


def with_gradients(run, *arrays) -> list[np.ndarray]:
    """Return a function's result and gradients, as one program, from its arguments and the result's cotangent."""

    @jax.jit
    def both(*arrays):
        *inputs, cotangent = arrays
        y, pull = jax.vjp(run, *inputs)
        return y, *pull(cotangent)

    return jax.device_get(both(*arrays))


def masked(length: int, kind: str) -> tuple[jax.Array, dict]:
    """Return the mask of non-padding positions and the arguments of `attend`."""
    packed, padded = segments(length, [1, 2, 0], [1, 1, 2]), segments(length, [1, 1, 0], [1, 1, 1])
    lengths = jnp.sum(padded > 0, axis=1)
    if kind == "left":
        padded = padded[:, ::-1]
    if kind == "holes":
        padded = padded.at[:, length // 5 :: 3].set(0)
    return {
        "packed": (packed > 0, dict(query_segments=packed, key_segments=packed)),
        "lengths": (padded > 0, dict(key_segments=padded, lengths=lengths)),
        "holes": (padded > 0, dict(key_segments=padded)),
        "padded": (padded > 0, dict(key_segments=padded)),
        "left": (padded > 0, dict(key_segments=padded)),
        "whole": (jnp.ones((2, length), bool), {}),
    }[kind]


# Each kind of segments once; the tests of bias and bands have rows of one block, and causality without segments.
QUICK = [("packed", True, ("splash", 128)), ("padded", False, ("rows", 384))]

# Sums over 128 keys in another order: a few units of float32's precision (6e-8) at values of order 1.
TOLERANCE = dict(rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("kind", "causal", "kernel", "length"), [
    pytest.param(kind, causal, *kernel, marks=() if (kind, causal, kernel) in QUICK else pytest.mark.slow)
    for kind in ("packed", "padded", "left", "holes", "whole") for causal in (False, True)
    for kernel in (("splash", 128), ("rows", 128), ("rows", 384))
])
def test_the_kernels_of_tpus_equal_scores_in_memory(kind, causal, kernel, length, monkeypatch):
    """In Pallas's interpreter: segments, causality, scale and gradients; 384 positions are three blocks of queries."""
    real, arguments = masked(length, kind)
    expected = results("xla", monkeypatch, length, real, causal=causal, **arguments)
    found = results(kernel, monkeypatch, length, real, causal=causal, **arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("head_dim", "causal", "band", "at", "with_scores"), [
    (64, False, 65, False, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (128, True, None, False, False), (8, True, 150, False, False), (64, False, None, True, False),
        (64, False, None, False, True))),
])
def test_rotary_positions_in_the_kernel(head_dim, causal, band, at, with_scores, monkeypatch):
    """Packed; queries at some positions are rotated before, and those of collected scores."""
    heads, length = 256 // head_dim, 128 if at or with_scores else 384
    config = StackConfig(hidden_size=128, num_layers=1, num_heads=heads, head_dim=head_dim, band=band,
                         intermediate_size=128, init="normal", init_std=0.2, rope=Rope(100.0))
    rng, segments = np.random.default_rng(0), jnp.asarray(np.cumsum(np.arange(length) % 90 == 0))[None]
    own = jnp.arange(length)[None]
    positions = jnp.asarray(rng.permutation(length)[None]) if at else own
    visibility = Visibility(segments[:, positions[0]], segments)
    x, cotangent = (jnp.asarray(rng.standard_normal((1, length, 128)), jnp.float32) for _ in range(2))
    use("rows", monkeypatch)

    def layer(params, x):
        given = dict(visibility=visibility, causal=causal, positions=positions if at else None, with_scores=with_scores)
        return MultiHeadAttention(config).apply({"params": params}, x[:, positions[0]], x, **given)

    def formula(params, x):
        dense = lambda name, x: x @ params[name]["kernel"] + params[name]["bias"]  # noqa: E731
        query, key, value = (dense(name, x).reshape(1, length, heads, -1) for name in ("query", "key", "value"))
        query, key = rotate(query[:, positions[0]], positions, Rope(100.0)), rotate(key, own, Rope(100.0))
        given = dict(causal=causal, band=band, scale=config.attention_scale)
        y = attend(query, key, value, query_segments=visibility.query_segments, key_segments=segments, **given)
        scores = config.attention_scale * jnp.einsum("bqhk,bshk->bhqs", query, key) if with_scores else None
        return dense("out", y.reshape(1, length, -1)), scores

    def values(function, params):
        (y, scores), pull = jax.vjp(jax.jit(function), params, x)
        return jax.tree.leaves([y, scores, pull((cotangent, scores))])

    params = jax.jit(MultiHeadAttention(config).init)(jax.random.key(0), x)["params"]
    for ours, theirs in zip(values(layer, params), values(formula, params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "band", "has_bias"), first_fast([("packed", 150, False), ("padded", None, True)]))
def test_narrow_heads_of_long_rows_take_turns(kind, band, has_bias, monkeypatch):
    """16 heads of 8 in one block of columns, at 256 positions one a step of the grid."""
    assert Options(head_dim=8).heads_of_step(256, 256) == 1 < Options(head_dim=8).heads_of_step(128, 128)
    use("rows", monkeypatch)
    real, arguments = masked(256, kind)
    *inputs, cotangent = (x.reshape(2, 256, 16, 8) for x in arrays(256))
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((1, 16, 256, 256)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def values(kernel, *inputs):
        def run(query, key, value, bias):
            y = attend(query, key, value, bias=bias if has_bias else None, causal=band is not None, band=band,
                       scale=0.3, kernel=kernel, **arguments)
            return jnp.where(real[..., None, None], y, 0)

        y, pull = jax.vjp(run, *inputs, bias)
        return y, *pull(cotangent)[: 4 if has_bias else 3]

    for ours, theirs in zip(values("rows", *inputs), values("xla", *inputs), strict=True):
        assert np.abs(theirs).max() > 0.5
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("kind", "causal"), [
    pytest.param(kind, causal, marks=() if (kind, causal) == ("packed", False) else pytest.mark.slow)
    for kind in ("padded", "packed", "whole") for causal in (False, True)
])
def test_a_bias_in_the_kernel_equals_scores_in_memory(kind, causal, monkeypatch):
    """Two heads in one block of columns; the gradient of the bias sums over all rows."""
    use("rows", monkeypatch)
    real, arguments = masked(256, kind)
    *inputs, cotangent = arrays(256)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 256, 256)), jnp.float32)

    def run(kernel, query, key, value, bias):
        y = attend(query, key, value, bias=bias, causal=causal, scale=0.125, kernel=kernel, **arguments)
        return jnp.where(real[..., None, None], y, 0)

    found, expected = (
        with_gradients(functools.partial(run, kernel), *inputs, bias, cotangent) for kernel in ("rows", "xla")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 0.1
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("kind", "causal", "kernel", "length", "band"), [
    ("packed", False, "rows", 640, 150),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("packed", True, "splash", 128, 20),
        ("whole", True, "splash", 128, 20), ("packed", False, "splash", 128, 20), ("packed", True, "rows", 128, 20),
        ("whole", True, "rows", 128, 20), ("packed", True, "rows", 640, 150), ("whole", True, "rows", 640, 150))),
])
def test_bands_in_the_kernels_equal_scores_in_memory(kind, causal, kernel, length, band, monkeypatch):
    """GPT-3's bands and ModernBERT's; they differ from full attention. Rows of 640 skip blocks beyond the band."""
    real, arguments = masked(length, kind)
    expected = results("xla", monkeypatch, length, real, causal=causal, band=band, **arguments)
    found = results(kernel, monkeypatch, length, real, causal=causal, band=band, **arguments)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)
    dense = results("xla", monkeypatch, length, real, causal=causal, **arguments)
    assert np.abs(dense[0] - expected[0]).max() > 0.1


@pytest.mark.parametrize("causal", first_fast([True, False]))
@pytest.mark.parametrize("kernel", first_fast(["xla", "splash", "rows"]))
def test_packed_documents_are_isolated(kernel, causal, monkeypatch):
    """Other keys and values in one document leave the results and gradients of the others bit-identical.

    The gradients of the others with respect to that document are 0.
    """
    use(kernel, monkeypatch)
    packed = segments(128, [1, 2, 3], [1, 2, 0])
    changed = (packed == 2)[..., None, None]
    one = arrays(128)
    other = tuple(jnp.where(changed, jnp.flip(x), x) for x in one[:3])

    @jax.jit
    def run(query, key, value):
        def attended(query, key, value):
            return attend(query, key, value, query_segments=packed, key_segments=packed, causal=causal, scale=0.125,
                          kernel=kernel)

        y, pull = jax.vjp(attended, query, key, value)
        return y, *pull(jnp.where(changed, 0, one[3]))

    first, second = jax.device_get((run(*one[:3]), run(*other)))
    there = np.asarray(packed) == 2
    assert np.abs(first[0][there] - second[0][there]).max() > 0.1
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[~there], b[~there])
        assert np.abs(a[~there]).max() > 0.1
    for gradient in (*first[1:], *second[1:]):
        assert not gradient[there].any()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["xla", "splash", "rows"])
def test_packed_documents_are_isolated_in_a_model(kernel, monkeypatch):
    """Other words in one document change neither the hidden states nor the gradients of the others."""
    model = Gpt2(vocab_size=300, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=64, max_positions=128,
                 init_std=0.3)
    params = jax.tree.map(jnp.asarray, random_params(model, 0, 0.3))
    use(kernel, monkeypatch)
    packed = segments(128, [1, 2, 3])
    there = np.asarray(packed[0]) == 2
    ids = np.arange(128)[None]  # every position has its own word, whose gradient is that of the position
    changed = np.where(there, ids + 150, ids)

    @jax.jit
    def run(ids):
        def hidden(words):
            embeddings = params["embeddings"] | {"word": {"embedding": words}}
            return model.hidden_states(params | {"embeddings": embeddings}, Inputs(ids, documents=packed))

        states, pull = jax.vjp(hidden, params["embeddings"]["word"]["embedding"])
        return states[0], pull(jnp.where(there[:, None], 0, jnp.sin(jnp.arange(128.0)))[None])[0]

    (first, gradient), (second, other) = jax.device_get((run(ids), run(changed)))
    assert np.abs(first[there] - second[there]).max() > 0.1
    np.testing.assert_array_equal(first[~there], second[~there])
    words = ids[0][~there]
    np.testing.assert_array_equal(gradient[words], other[words])
    assert np.abs(gradient[words]).max(axis=1).min() > 1e-3
    assert not np.delete(gradient, words, axis=0).any() and not np.delete(other, words, axis=0).any()


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_scores_in_memory_equal_the_formula(rate):
    """softmax(scale · q kᵀ + bias) with dropped probabilities, times v; its gradients are those of autodiff."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 4, 8)), jnp.float32) for n in (6, 9, 9))
    mask = jnp.asarray(rng.random((2, 1, 6, 9)) < 0.7).at[..., 0].set(True)
    bias = jnp.asarray(rng.standard_normal((1, 4, 6, 9)), jnp.float32)
    cotangent = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)
    key = jax.random.key(0)
    keep = keep_mask(dropout_seeds(key, (2, 4)), (6, 9), rate)

    def formula(q, k, v, bias):
        scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + bias, -jnp.inf)
        probabilities = jax.nn.softmax(scores) * keep * keep_scale(rate)
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)

    def ours(q, k, v, bias):
        return attend(q, k, v, mask=mask, bias=bias, scale=0.3, dropout_rate=rate, dropout_key=key)

    def values(function):
        y, pull = jax.vjp(function, q, k, v, bias)
        return y, *pull(cotangent)

    assert (0.6 < jnp.mean(keep) < 0.8) if rate else jnp.all(keep)
    for found, expected in zip(jax.jit(lambda: values(ours))(), jax.jit(lambda: values(formula))(), strict=True):
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(found, expected, atol=1e-5)
