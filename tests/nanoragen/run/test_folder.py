"""The names of run folders."""

import pytest

import train
from nanoragen.run import folder


@pytest.mark.parametrize(
    "env, name",
    [("bandit", "bandit-grpo-0"), ("gym:pkg:ID", "gym-pkg-ID-grpo-0"), ("gym:pkg/Taxi-v3", "gym-pkg-Taxi-v3-grpo-0"),
     ("my_env:Guess", "my_env-Guess-grpo-0"), ("path/to/my_env.py:Class", "path-to-my_env.py-Class-grpo-0"),
     ("../up/my_env.py:Class", "up-my_env.py-Class-grpo-0"), ("a\\b.py:C", "a-b.py-C-grpo-0")],
)  # fmt: skip
def test_the_default_folder_is_one_name_whatever_the_environment_is_called(env, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with folder.release_locks():
        assert folder.run_folder(train.Config(env=env)).parts == ("runs", name)
        assert folder.run_folder(train.Config(env=env)).parts == ("runs", f"{name}.2")
