"""The table of sharding rules and the mesh, on paper."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxlm.errors import UserError
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig, make_inference_mesh
from jaxlm.parallel.rules import RULES, partition_spec, shardings
from jaxlm.trees import path_string

AXES = {"data": 2, "fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("encoder/layers/attention/query/kernel", (12, 768, 768), P(None, "fsdp", "tensor")),
        ("encoder/layers/attention/out/kernel", (12, 768, 768), P(None, ("tensor", "fsdp"), None)),
        ("encoder/layers/mlp/wo/kernel", (12, 12, 768), P(None, ("tensor",), None)),  # 8 devices do not divide 12 rows
        ("encoder/layers/mlp/wi/bias", (12, 3072), P(None, "tensor")),
        ("encoder/layers/attention_norm/scale", (12, 768), P()),
        ("word/embedding", (30522, 768), P("tensor", "fsdp")),
        ("word/embedding", (30521, 768), P(None, "fsdp")),
        ("word/embedding", (30522, 767), P("tensor", None)),
        ("opt_state/1/mu/word/embedding", (30522, 768), P("tensor", "fsdp")),
        ("opt_state/0/v_row/encoder/layers/mlp/wi/kernel", (12, 768), P(None, "fsdp")),
        ("opt_state/0/v_col/encoder/layers/mlp/wi/kernel", (12, 3072), P(None, "tensor")),
        ("opt_state/0/v_row/word/embedding", (1,), P()),  # not factored
        ("position/embedding", (512, 768), P(None, "fsdp")),
        ("opt_state/count", (), P()),
        ("wi/kernel", (), P()),
        ("reword/embedding", (30522, 768), P(None, "fsdp")),  # whole names only
    ],
)
def test_rules(path, shape, spec):
    found = partition_spec(path, shape, AXES)
    assert tuple(found) + (None,) * (len(shape) - len(found)) == tuple(spec) + (None,) * (len(shape) - len(spec))


def test_every_rule_is_the_first_to_match_some_parameter():
    """Of some family, or of its optimizer's state; the last rule takes all."""
    from jaxlm.config.experiment import OptimizerConfig
    from jaxlm.systems import all_systems
    from jaxlm.tasks.contrastive import Contrastive
    from jaxlm.tokenizers.vocabulary import Vocabulary
    from jaxlm.training.optimizers import make_optimizer

    objectives = [cls() for cls in {Contrastive, *(system.objective for system in all_systems())}]
    (t5,) = (objective for objective in objectives if isinstance(objective, SpanCorruption))
    untied = dataclasses.replace(t5.model, activation="gated-gelu", tied_head=False, scaled_head=False)  # as T5 1.1
    paths: set[str] = set()
    for objective in (*objectives, dataclasses.replace(t5, model=untied)):
        bound = objective.bind(Vocabulary.stand_in(32000), 128)
        params = jax.eval_shape(bound.init, jax.random.key(0))
        paths |= {path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    state = jax.eval_shape(make_optimizer(OptimizerConfig(name="adafactor"), 10).init, params)
    paths |= {path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]}
    patterns = [pattern for pattern, _ in RULES]
    first = {next(p for p in patterns if re.search(rf"(^|/)({p})$", path)) for path in paths}
    assert [pattern for pattern in patterns if pattern not in first] == []
    assert RULES[-1] == (r".*", ())
    assert {axis for _, tail in RULES for axis in mesh_axes(tail)} == {"fsdp", "tensor"}


def mesh_axes(spec):
    """Return the mesh axes of a PartitionSpec or of a rule."""
    return {axis for axes in spec if axes for axis in (axes if isinstance(axes, tuple) else (axes,))}


@pytest.mark.parametrize("cls", [MaskedLM, SpanBoundary, ReplacedTokens, CausalLM, SpanCorruption])
def test_every_large_parameter_of_every_family_is_split(cls):
    """By fsdp and, in the layers, by tensor: nothing that grows with the model stays whole."""
    from jaxlm.tokenizers.vocabulary import Vocabulary

    objective = cls().bind(Vocabulary.stand_in(32000), 128)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        name = "/".join(entry.key for entry in path)
        spec = partition_spec(name, leaf.shape, AXES)
        if leaf.size > 500_000:
            assert "fsdp" in mesh_axes(spec), (name, leaf.shape)
        if "layers/" in name and leaf.size > 500_000:
            assert "tensor" in mesh_axes(spec), (name, leaf.shape)


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [((-1, 1, 1), 8, (8, 1, 1)), ((2, -1, 1), 8, (2, 4, 1)), ((1, 2, -1), 8, (1, 2, 4)), ((2, 2, 2), 8, (2, 2, 2)),
     ((-1, 1, 1), 1, (1, 1, 1))],
)
def test_mesh_sizes(sizes, devices, shape):
    assert MeshConfig(*sizes).shape(devices) == shape


@pytest.mark.parametrize("sizes", [(-1, 3, 1), (3, 1, 1), (-1, -1, 1), (0, 1, 1), (2, 2, 1), (16, 1, 1), (-2, 1, 1)])
def test_meshes_that_do_not_fit(sizes):
    with pytest.raises(UserError) as error:
        MeshConfig(*sizes).shape(8)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_a_model_on_the_host_is_on_one_device():
    assert make_inference_mesh(MeshConfig(), "host").devices.tolist() == [[[jax.devices("cpu")[0]]]]
    assert make_inference_mesh(MeshConfig(), None).size == len(jax.local_devices())


def test_the_mesh_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshConfig().data = 3


@pytest.mark.parametrize("optimizer", ["adamw", "stable-adamw", "lion", "muon", "lamb", "adafactor", "momentum"])
def test_optimizer_states_are_split_like_their_parameters(optimizer):
    """Each moment by the rule of its parameter, through all of optax's wrappers; Adafactor's are small."""
    from jaxlm.config.experiment import OptimizerConfig
    from jaxlm.tokenizers.vocabulary import Vocabulary
    from jaxlm.training.optimizers import make_optimizer
    from tests.training.test_optimizers import Momentum

    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    params = jax.eval_shape(MaskedLM().bind(Vocabulary.stand_in(30522), 512).init, jax.random.key(0))
    config = Momentum() if optimizer == "momentum" else OptimizerConfig(name=optimizer)  # one's own
    state = jax.eval_shape(make_optimizer(config, 10).init, params)
    held = whole = 0
    kernels = []
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings(state, mesh)), strict=True):
        part = sharding.shard_shape(leaf.shape)
        whole, held = whole + leaf.size, held + math.prod(part)
        if leaf.shape == (12, 768, 3072):
            kernels.append(part)
    if optimizer == "adafactor":
        assert not kernels and whole < 2_000_000
    else:
        assert kernels == [(12, 192, 1536)] * (1 if optimizer in ("lion", "muon", "momentum") else 2)  # one moment
        assert held < whole / 7
