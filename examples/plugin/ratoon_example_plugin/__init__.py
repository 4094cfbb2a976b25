"""An example of a package that adds parts to Ratoon. Importing this module does not import torch."""

from __future__ import annotations

from ratoon.models.family import ModelFamily

# A config.json of this family has the fields of Llama's.
SOFTCAP = ModelFamily("ratoon_example_plugin.model:SoftcapForCausalLM", config="LlamaForCausalLM")
