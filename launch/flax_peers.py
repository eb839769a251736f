#!/usr/bin/env python3
"""Times the Flax classes that Transformers had, on one v5e chip, by the TPU compiler; needs no TPU.

The last version with Flax classes wants an environment of its own:

    python3 -m venv peer && peer/bin/pip install -e '.[tpu]' 'transformers==4.57.3'
    peer/bin/python launch/flax_peers.py [bert electra …]

Each family's train step is that of the published base size at the rows a chip of the table in configs/RESULTS.md:
AdamW, bfloat16 over float32 parameters, the published dropout, logits at all positions and random keys of threefry as
in Transformers' own training scripts. The time is counted as `jaxlm plan` counts ours. No kernels are in these steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxlm.analysis import compilation

compilation.prepare_environment()

import jax  # noqa: E402 - after the environment is set
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import transformers  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxlm.analysis.hlo import parse  # noqa: E402
from jaxlm.parallel.peaks import tpu_generation  # noqa: E402

DEVICE = compilation.topology_devices("v5e:2x2")[0]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Step(NamedTuple):
    """A train step: the models, and (parameters of each model, dropout key, arrays) -> loss."""

    models: dict[str, Any]
    loss: Callable[..., jax.Array]
    arrays: tuple[tuple[int, ...], ...]
    """Shapes of the int32 inputs."""
    frozen: tuple[str, ...] = ()
    """Models that are not trained."""


def build(class_name: str, config: Any) -> Any:
    """Return a model of a Flax class without parameters."""
    return getattr(transformers, class_name)(config, dtype=jnp.bfloat16, _do_init=False)


def masked_mean(losses: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean over the positions whose label is not negative."""
    weight = (labels >= 0).astype(jnp.float32)
    return jnp.sum(losses * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def masked_lm(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return masked_mean(cross_entropy(logits.astype(jnp.float32), jnp.maximum(labels, 0)), labels)


def bert(rows: int = 16) -> Step:
    models = {"bert": build("FlaxBertForPreTraining", transformers.BertConfig())}

    def loss(params, key, ids, mask, types, labels, is_next):
        out = models["bert"](ids, attention_mask=mask, token_type_ids=types, params=params["bert"], dropout_rng=key,
                             train=True)
        order = cross_entropy(out.seq_relationship_logits.astype(jnp.float32), is_next).mean()
        return masked_lm(out.prediction_logits, labels) + order

    return Step(models, loss, ((rows, 512),) * 4 + ((rows,),))


def one_masked_lm(class_name: str, config: Any, rows: int = 16) -> Step:
    """Return a step with a masked language model alone."""
    models = {"model": build(class_name, config)}

    def loss(params, key, ids, mask, labels):
        out = models["model"](ids, attention_mask=mask, params=params["model"], dropout_rng=key, train=True)
        return masked_lm(out.logits, labels)

    return Step(models, loss, ((rows, 512),) * 3)


def roberta() -> Step:
    config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    return one_masked_lm("FlaxRobertaForMaskedLM", config)


def albert(rows: int = 16) -> Step:
    config = transformers.AlbertConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=12, hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    models = {"albert": build("FlaxAlbertForPreTraining", config)}

    def loss(params, key, ids, mask, types, labels, order):
        out = models["albert"](ids, attention_mask=mask, token_type_ids=types, params=params["albert"],
                               dropout_rng=key, train=True)
        is_swapped = cross_entropy(out.sop_logits.astype(jnp.float32), order).mean()
        return masked_lm(out.prediction_logits, labels) + is_swapped

    return Step(models, loss, ((rows, 512),) * 4 + ((rows,),))


def electra(rows: int = 16) -> Step:
    sizes = dict(embedding_size=768, num_hidden_layers=12)
    small = transformers.ElectraConfig(hidden_size=256, num_attention_heads=4, intermediate_size=1024, **sizes)
    large = transformers.ElectraConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072, **sizes)
    models = {
        "generator": build("FlaxElectraForMaskedLM", small),
        "discriminator": build("FlaxElectraForPreTraining", large),
    }

    def loss(params, key, ids, mask, labels):
        keys = jax.random.split(key, 3)
        out = models["generator"](ids, attention_mask=mask, params=params["generator"], dropout_rng=keys[0], train=True)
        logits = out.logits.astype(jnp.float32)
        drawn = jax.random.categorical(keys[1], jax.lax.stop_gradient(logits))
        replaced = jnp.where(labels >= 0, drawn, ids)
        is_replaced = (labels >= 0) & (drawn != labels)
        out = models["discriminator"](replaced, attention_mask=mask, params=params["discriminator"],
                                      dropout_rng=keys[2], train=True)
        found = optax.sigmoid_binary_cross_entropy(out.logits.astype(jnp.float32), is_replaced.astype(jnp.float32))
        return masked_lm(logits, labels) + 50.0 * jnp.mean(found * mask)

    return Step(models, loss, ((rows, 512),) * 3)


def distilbert(rows: int = 16) -> Step:
    models = {
        "student": build("FlaxDistilBertForMaskedLM", transformers.DistilBertConfig()),
        "teacher": build("FlaxBertForMaskedLM", transformers.BertConfig()),
    }

    def loss(params, key, ids, mask, labels):
        teacher = models["teacher"](ids, attention_mask=mask, params=params["teacher"], output_hidden_states=True)
        student = models["student"](ids, attention_mask=mask, params=params["student"], dropout_rng=key, train=True,
                                    output_hidden_states=True)
        ours, theirs = (x.logits.astype(jnp.float32) for x in (student, teacher))
        soft = optax.kl_divergence(jax.nn.log_softmax(ours / 2.0), jax.nn.softmax(theirs / 2.0))
        cosine = optax.cosine_similarity(student.hidden_states[-1].astype(jnp.float32),
                                         teacher.hidden_states[-1].astype(jnp.float32))
        return 20.0 * masked_mean(soft, labels) + 2.0 * masked_lm(ours, labels) + jnp.mean((1.0 - cosine) * mask)

    return Step(models, loss, ((rows, 512),) * 3, frozen=("teacher",))


def gpt2(rows: int = 8) -> Step:
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    models = {"gpt2": build("FlaxGPT2LMHeadModel", config)}

    def loss(params, key, ids):
        logits = models["gpt2"](ids, params=params["gpt2"], train=False).logits[:, :-1]
        return cross_entropy(logits.astype(jnp.float32), ids[:, 1:]).mean()

    return Step(models, loss, ((rows, 1024),))


def t5(rows: int = 4) -> Step:
    config = transformers.T5Config(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=2048, num_layers=12, num_heads=12, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, dropout_rate=0.0, decoder_start_token_id=0,
    )
    models = {"t5": build("FlaxT5ForConditionalGeneration", config)}

    def loss(params, key, ids, decoder_ids, labels):
        logits = models["t5"](ids, decoder_input_ids=decoder_ids, params=params["t5"], train=False).logits
        return cross_entropy(logits.astype(jnp.float32), labels).mean()

    return Step(models, loss, ((rows, 512), (rows, 114), (rows, 114)))


STEPS = {function.__name__: function for function in (bert, roberta, albert, electra, distilbert, gpt2, t5)}


def seconds(step: Step) -> tuple[float, float]:
    """Return the estimated seconds of a step and its HBM in bytes."""
    sharding, optimizer = SingleDeviceSharding(DEVICE), optax.adamw(1e-4)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def train(params, state, frozen, key, *arrays):
        value, gradients = jax.value_and_grad(lambda params: step.loss(params | frozen, key, *arrays))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = {name: jax.eval_shape(lambda model=model: model.init_weights(jax.random.key(0), (1, 8)))
              for name, model in step.models.items()}
    frozen = {name: params.pop(name) for name in step.frozen}
    arguments = params, jax.eval_shape(optimizer.init, params), frozen, jax.eval_shape(lambda: jax.random.key(0))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in step.arrays]
    lowered = jax.jit(train, donate_argnums=(0, 1)).lower(*placed(arguments), *placed(arrays))
    compiled = lowered.compile()
    module, memory = parse(compiled.as_text()), compiled.memory_analysis()
    cycles = sum(
        runs * instruction.cycles for name, runs in module.executions(fused=False).items()
        for instruction in module.computations[name]
    )
    return cycles / tpu_generation(DEVICE).clock, memory.argument_size_in_bytes + memory.temp_size_in_bytes


def main() -> None:
    clip = jnp.clip  # T5's class calls it by keywords that jax has dropped since
    jnp.clip = lambda x, *bounds, a_min=None, a_max=None: clip(x, *bounds or (a_min, a_max))
    for name in sys.argv[1:] or STEPS:
        step = STEPS[name]()
        time, memory = seconds(step)
        rows, *length = step.arrays[0]
        print(f"{name}: {rows} × {length[0]}, {1e3 * time:.1f} ms, {memory / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
