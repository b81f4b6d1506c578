"""Settings of the whole suite: no network, one thread, GPU tests only where there is a GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may wait for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
