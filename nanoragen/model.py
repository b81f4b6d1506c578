"""`from nanoragen.model import load`: a model and its tokenizer by name (nanoragen/policy/loading.py)."""

from nanoragen.policy.loading import load

__all__ = ["load"]
