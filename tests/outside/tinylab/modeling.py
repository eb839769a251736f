"""The encoder in PyTorch, for Transformers' auto classes. Only a reader of exported folders imports it."""

from __future__ import annotations

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
)


class GatedBertConfig(BertConfig):
    model_type = "gated-bert"


class Gated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden):
        return nn.functional.gelu(self.gate(hidden)) * self.dense(hidden)


def gate(model):
    for layer in model.bert.encoder.layer:
        layer.intermediate = Gated(model.config)


class GatedBertForMaskedLM(BertForMaskedLM):
    config_class = GatedBertConfig

    def __init__(self, config):
        super().__init__(config)
        gate(self)


class GatedBertForSequenceClassification(BertForSequenceClassification):
    config_class = GatedBertConfig

    def __init__(self, config):
        super().__init__(config)
        gate(self)


AutoConfig.register("gated-bert", GatedBertConfig)
AutoModelForMaskedLM.register(GatedBertConfig, GatedBertForMaskedLM)
AutoModelForSequenceClassification.register(GatedBertConfig, GatedBertForSequenceClassification)
