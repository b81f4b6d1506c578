"""Settings of the whole suite: no network, and GPU tests only where there is a GPU."""

import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us in the background leaves it ignored

# One thread each: tiny tensors gain nothing from more, and processes side by side (-n 2, runs that tests start) lose by it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may wait for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
