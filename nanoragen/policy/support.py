"""What a model supports, asked here alone: from its configuration, or, as no list of models is complete, by a try on a few tokens.

A function called `..._unsupported` returns the reason as a line to print, "" where the model can do it.
"""

import inspect
import math
import sys
from functools import wraps
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from nanoragen.run.memory import out_of_memory


def once_per_model(question):
    """The answer of question(model, ...) is found once for each model, with the arguments of its first call."""
    answers = WeakKeyDictionary()

    @wraps(question)
    def answer(model, *args, **kwargs):
        if model not in answers:
            answers[model] = question(model, *args, **kwargs)
        return answers[model]

    return answer


def close_to(found, want, **tolerance) -> bool:
    """Whether found() is close to want(), in torch.allclose's sense. A model that breaks in found() is not; lack of memory is raised."""
    try:
        found = found()
    except Exception as e:  # whatever a model does with what it was not made for
        if out_of_memory(e):
            raise
        return False
    return torch.allclose(found, want(), **tolerance)


def rounding(model) -> float:
    """Tolerance of states computed in two ways, relative to their spread."""
    return 1e-3 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 0.05


def max_positions(model) -> float:
    """Tokens the model has positions for; infinity where it says nothing of it (BLOOM, Mamba)."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # of most, by transformers' own renaming (n_positions, ...); of MPT
    return next((limit for name in names if (limit := getattr(config, name, None))), math.inf)


def takes_argument(model, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def cache_argument(model) -> str:
    """What transformers calls the cache among this model's arguments: renamed within its version 5."""
    return "cache" if takes_argument(model, "cache") else "past_key_values"


def is_checkpointed(model) -> bool:
    """Whether layers run again in the backward pass (loading.checkpoint_activations): they would write to a cache twice."""
    return any(getattr(m, "is_checkpointed", False) for m in model.modules())


def packs_sequences(model) -> bool:
    """Whether episodes go in one row without padding: it uses flash-attn, and nothing in it carries a state from token to token."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attends = kinds <= {"full_attention", "sliding_attention"} and not getattr(model, "_is_stateful", False)
    return attends and getattr(model.config, "_attn_implementation", None) == "flash_attention_2"


def takes_other_attention(model) -> bool:
    """Whether the model takes an attention from outside, under any name. DeepSeek V3.2 and others mask what their indexer did
    not choose only where the attention is called "sdpa" or "eager", and say nothing where it is not."""
    return model._supports_attention_backend and '"sdpa"' not in inspect.getsource(sys.modules[type(model).__module__])


def kv_cache_unsupported(model) -> str:
    """Why keys and values cannot be kept from turn to turn, so that a rollout encodes every context anew."""
    slow = f"rollouts encode every context anew each turn: {type(model).__name__}"
    if not takes_argument(model, cache_argument(model)):  # GPT-1
        return f"{slow} takes no cache"
    if getattr(model, "_is_stateful", False):
        return f"{slow} carries a state from token to token"
    layers = {type(layer) for layer in DynamicCache(config=model.config.get_text_config()).layers}
    others = sorted(kind.__name__ for kind in layers - {DynamicLayer, DynamicSlidingWindowLayer})
    return f"{slow} caches more than keys and values ({', '.join(others)})" if others else ""


def prefix_cache_unsupported(model, longest: int) -> str:
    """Why nothing can follow the cached keys and values of a prefix, in sequences of so many tokens."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds or "sliding_attention" in kinds else None
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers other than softmax attention over all tokens ({', '.join(sorted(kinds))})"
    if window and window < longest:
        return f"its sliding window of {window} is shorter than the {longest} tokens of a pair"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's name for a window, counted in cached tokens
        return f"it has local attention, over the last {config.window_size} tokens of the cache"
    return positions_depend_on_length(model, longest)


def positions_depend_on_length(model, longest: int) -> str:
    """Why a token's position depends on how long its sequence is, "" if it does not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    trained = getattr(config, "original_max_position_embeddings", None) or getattr(config, "max_position_embeddings", None)
    for one in (rope, *(v for v in rope.values() if isinstance(v, dict))):  # of all layers, or of each kind
        limit = one.get("original_max_position_embeddings") or trained or math.inf
        if one.get("rope_type") in ("longrope", "dynamic") and longest > limit:
            return f"its positions ({one['rope_type']}) are others beyond {limit} tokens, and a pair has {longest}"
    return ""


def packed_reasonings_unsupported(model, longest: int, takes_mask) -> str:
    """Why reasonings cannot be scored in one row after a cached prompt. takes_mask: attentions that add a mask of one's own."""
    config, attention = model.config.get_text_config(), getattr(model.config, "_attn_implementation", None)
    scaled = [n for n in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(config, n, None) not in (None, 1)]
    if reason := prefix_cache_unsupported(model, longest):
        return reason
    if scaled:
        return f"its logits are more than hidden x weight ({', '.join(scaled)})"
    if attention not in takes_mask:
        return f"its attention ({attention}) takes no mask of our own"
    return "" if takes_argument(model.get_decoder(), "position_ids") else "it takes no position ids"


@torch.no_grad()
def respects_attention_mask(model) -> bool:
    """Whether a row gives the same numbers alone and padded on the left beside another. Attention over keys and values leaves out
    what is masked, so only other models are tried: the state of some takes in the padding (RWKV, RecurrentGemma)."""
    if not kv_cache_unsupported(model):
        return True
    device = next(model.parameters()).device
    ids = torch.arange(32, device=device).view(2, 16) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[0, :-3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def last(*at) -> torch.Tensor:  # logits of the first row's last token
        more = {"position_ids": positions[at]} if takes_argument(model, "position_ids") else {}
        return model(input_ids=ids[at], attention_mask=mask[at], **more).logits[0, -1].float()

    def difference() -> torch.Tensor:  # in units of the tolerance
        alone, padded = last(slice(0, 1), slice(-3, None)).nan_to_num(), last(slice(None), slice(None)).nan_to_num()
        return (padded - alone) / (alone.std() + alone.abs()).clamp(min=1e-30)  # broken weights are the rollout's to report

    return close_to(difference, lambda: torch.zeros(1, device=device), rtol=0.0, atol=rounding(model))


@once_per_model
@torch.no_grad()
def lm_head_is_linear(model) -> bool:
    """Whether logits = hidden @ weight.T + bias, with nothing before or after: an adapter, a scale, a cap."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:  # an adapter's, a quantised one
        return False
    ids = torch.arange(4, device=head.weight.device)[None] % len(head.weight)
    with torch.autocast(head.weight.device.type, enabled=False):
        logits, hidden = through_head(model, lambda x: x, input_ids=ids, use_cache=False)
        return torch.allclose(logits.float(), head(hidden).float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def through_head(model, pick, run_head=True, **inputs):
    """(logits, hidden) of a forward pass in which the LM head sees pick(hidden) in place of hidden; or nothing, if not run_head."""
    picked = []

    def before(head, args):
        picked.append(pick(args[0]))
        return (picked[0] if run_head else picked[0][:, :0],)

    hook = model.get_output_embeddings().register_forward_pre_hook(before)
    try:
        return model(**inputs).logits, picked[0]
    finally:
        hook.remove()
