"""Small Reformer on bytes for a CPU (4 layers, two streams of width 128), trained on Python's own documentation.

Command:     jaxlm pretrain configs/reformer_tiny.py --run-dir runs/reformer_tiny
             jaxlm generate runs/reformer_tiny "Return a list of"
Hardware:    two CPU cores
Parameters:  860,162 with the 258 symbols of bytes
Result:      held-out lm_loss 7.021 to 2.392 nats per byte, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.reformer import Reformer
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(
        model=Reformer(
            hidden_size=128, num_layers=4, attention_types=("local", "lsh"), num_heads=2, head_dim=64,
            intermediate_size=512, axial_shape=(16, 16), axial_widths=(64, 64), local_chunk_size=32, lsh_chunk_size=32,
            num_hashes=2, buckets=(16,), dropout=0.0, attention_dropout=0.0, lsh_attention_dropout=0.0, init_std=0.08,
            position_init_std=0.08,
        ),
        plain_stream=True,
    ),
    data=TextData(source="python-docs", length=256, tokenizer_kind="bytes", vocab_size=258),
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_steps=50, schedule="cosine", final_share=0.1, b2=0.98, eps=1e-9, weight_decay=0.0
    ),
    train=TrainConfig(steps=300, batch_size=16, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=100),
)
