"""RoBERTa and XLM-RoBERTa, whose positions begin behind that of padding, and DistilBERT: BERT with other names."""

from __future__ import annotations

from ratoon.layers.weights import Weights
from ratoon.models.bert import BertModel
from ratoon.models.heads import ClassifierHead
from ratoon.models.post_norm import PostNormLayer

# In files saved with a head for another task: the tensors after the layers.
ROBERTA_HEADS = (
    "lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias", "lm_head.decoder.weight", "lm_head.decoder.bias", "classifier.dense.weight",
    "classifier.dense.bias", "classifier.out_proj.weight", "classifier.out_proj.bias",
)  # fmt: skip
DISTILBERT_HEADS = (
    "vocab_transform.weight", "vocab_transform.bias", "vocab_layer_norm.weight", "vocab_layer_norm.bias",
    "vocab_projector.weight", "vocab_projector.bias", "pre_classifier.weight", "pre_classifier.bias",
    "classifier.weight", "classifier.bias",
)  # fmt: skip


class RobertaModel(BertModel):
    body, heads = "roberta", ROBERTA_HEADS

    def build_head(self, weights: Weights, model: Weights) -> ClassifierHead:
        return self.assemble_head(weights, weights / "classifier" / "dense", weights / "classifier" / "out_proj")


class DistilBertModel(BertModel):
    body, stack, heads = "distilbert", ("transformer", "layer"), DISTILBERT_HEADS

    def build_head(self, weights: Weights, model: Weights) -> ClassifierHead:
        return self.assemble_head(weights, weights / "pre_classifier", weights / "classifier")

    def build_layer(self, weights: Weights, index: int) -> PostNormLayer:
        attention, feed_forward = weights / "attention", weights / "ffn"
        return self.assemble_layer(
            index,
            (attention, ("q_lin", "k_lin", "v_lin")),
            (attention / "out_lin", weights / "sa_layer_norm"),
            (feed_forward / "lin1", feed_forward / "lin2", weights / "output_layer_norm"),
        )
