"""transformers' scaled-dot-product attention, as a CPU likes it: `model.set_attn_implementation(NAME)` after an import of this file.

The numbers are those of "sdpa" up to rounding; two copies are saved that it makes in every layer:
- Grouped heads: "sdpa" repeats keys and values for each query head where there is a mask (for the sake of CUDA). The CPU's kernel
  takes them as they are; a single new token is packed by "sdpa" itself, which is faster still.
- The mask: bool at transformers, added to the scores in the kernel. It is made a number once for all layers, not in each.

Left out: CUDA, where transformers chooses between kernels that want other things; models that bring a bias of their own, and
those that ask for "sdpa" by name (`support.takes_other_attention`).
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "sdpa_cpu"
TAKES_MASK = ("sdpa", NAME, "eager")  # attentions that add a 4D mask of one's own; all but "eager" take a bool one


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query [B, H, Q, D], key, value [B, H / n, C, D], attention_mask [B, 1, Q, C] bool or None -> ([B, Q, H, D], None)."""
    bias = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if attention_mask is not None and attention_mask.dtype == torch.bool and not bias:
        attention_mask = _additive(attention_mask, query.dtype)
    grouped = query.shape[1] != key.shape[1] and query.shape[2] > 1 and attention_mask is not None
    if not grouped or bias or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _additive(mask, dtype):
    """0 where mask is True, -inf elsewhere; kept on the mask, which is one object for all layers of a forward pass."""
    if getattr(mask, "additive", None) is None or mask.additive.dtype != dtype:
        mask.additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.additive


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
