"""Exact resume: a run that was killed and resumed is, number for number, the run that was not. And nothing is lost in between."""

import os
import signal
from dataclasses import asdict, replace

import pytest
import torch
from helpers import moments, timeless
from safetensors.torch import load_file

import train
from nanoragen.run import files, folder, metrics, records
from nanoragen.run.log import Log

SMALL = ["--env", "frozen_lake", "--steps", "4", "--groups", "3", "--group_size", "3", "--max_turns", "2", "--max_tokens", "24",
         "--final_episodes", "4", "--keep", "9", "--eval_every", "2"]  # fmt: skip
EACH = ["--save_every", "1"]
SETTINGS = {
    "default": [],
    "kl, epochs, decay": ["--beta", "0.1", "--epochs", "2", "--minibatches", "2", "--weight_decay", "0.1", "--filter", "none",
                          "--entropy_coef", "0.01", "--lr_schedule", "cosine", "--gradient_checkpointing"],
    "dr_grpo": ["--algo", "dr_grpo", "--soft_reweight"],
    "dapo": ["--algo", "dapo", "--scale", "per_reward", "--filter", "ragen"],
    "rloo": ["--algo", "rloo", "--credit", "turn"],
    "adapters": ["--lora", "2", "--beta", "0.1", "--algo", "ppo", "--filter", "none", "--gradient_checkpointing"],
    "ppo": ["--algo", "ppo", "--filter", "none", "--bi_level", "--turn_gamma", "0.95", "--value_clip", "0.5"],
}  # fmt: skip


def killed_after(step, monkeypatch):
    """The process dies when it is about to log the step after this one: its update is done, and lost."""
    log = Log.step

    def fatal(self, line):
        if line["step"] > step:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write('{"step": 3, "rew')  # torn
            raise KeyboardInterrupt
        log(self, line)

    monkeypatch.setattr(Log, "step", fatal)


@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS.keys())
def test_killed_and_resumed_equals_not_killed_bit_for_bit(more, tmp_path, monkeypatch):
    if "--lora" in more:
        pytest.importorskip("peft")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.main([*SMALL, *EACH, *more, "--out", str(whole)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed_after(2, patch)
        train.main([*SMALL, *EACH, *more, "--out", str(cut)])
    torch.manual_seed(99)  # a new process has other random states
    train.main(["--resume", str(cut)])
    assert timeless(cut) == timeless(whole) and [line["step"] for line in timeless(cut)] == [1, 2, 3, 4]
    assert all(f"collapse_{name}_sample/marginal_std_ema" in timeless(cut)[-1] for name in ("first_turn", "trajectory"))
    assert (cut / "rollouts.jsonl").read_bytes() == (whole / "rollouts.jsonl").read_bytes()
    assert (cut / "config.json").read_text().replace(str(cut), str(whole)) == (whole / "config.json").read_text()
    a, b = (run / "step_000004" for run in (cut, whole))
    for x, y in ((load_file(a / "model.safetensors"), load_file(b / "model.safetensors")), (moments(a), moments(b))):
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    assert (a / "trainer_state.json").read_text() == (b / "trainer_state.json").read_text()
    assert (a / "critic.pt").is_file() == ("ppo" in more)
    if "ppo" in more:
        assert (a / "critic.pt").read_bytes() == (b / "critic.pt").read_bytes()
    assert (a / "adapter").is_dir() == ("--lora" in more)
    if "--lora" in more:
        x, y = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (a, b))
        assert x and all(torch.equal(x[k], y[k]) for k in x) and any(k.endswith("lora_B.weight") and v.any() for k, v in x.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(number, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.main([*SMALL, "--save_every", "0", "--out", str(whole)])
    rollouts = metrics.rollout_metrics

    def signalled(*args):  # in the middle of step 2
        if (cut / "metrics.jsonl").is_file():
            os.kill(os.getpid(), number)
        return rollouts(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(metrics, "rollout_metrics", signalled)
        train.main([*SMALL, "--save_every", "0", "--out", str(cut)])
    assert stop.value.code == 130 and f"--resume {cut}" in capsys.readouterr().out
    assert [line["step"] for line in timeless(cut)] == [1, 2] and (cut / "step_000002/complete.json").is_file()
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)  # the handler is gone again
    train.main(["--resume", str(cut)])
    assert timeless(cut) == timeless(whole)


@pytest.mark.parametrize(
    "argv, said",
    [(["--resume", "{run}/nowhere"], "holds no run"), (["--resume", "{run}", "--out", "x"], "--resume"),
     (["--resume", "{run}"], "no whole checkpoint"), (["--resume", "{done}"], "--steps above 7"),
     (["--resume", "{done}", "--steps", "6"], "--steps above 7"), (["--resume", "{done}", "--env", "sokoban"], "a run of bandit"),
     (["--resume", "{done}", "--steps", "8", "--algo", "ppo"], "algo: ppo"),
     (["--resume", "{done}", "--steps", "8", "--baseline", "critic"], "valid: mean"),
     (["--resume", "{done}/step_000007"], "is a checkpoint; valid: its run, "), (["--resume", "{old}"], "--steps above 7")],
)  # fmt: skip
def test_what_cannot_be_resumed_is_one_line(argv, said, tmp_path, capsys):
    for name in ("run", "done", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"env": "bandit", "steps": 7, "algo": "grpo", "baseline": "mean"}')
    for name in ("done/step_000007", "old/step_000007.old"):  # .old: killed between the two renames of a save
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        train.main([a.format(run=tmp_path / "run", done=tmp_path / "done", old=tmp_path / "old") for a in argv])
    message = capsys.readouterr().err
    assert stop.value.code not in (0, None) and said in message and len(message.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["", '{"env": "bandit", "ste', "[]", '{"env": "bandit"}', "env: bandit", "[" * 100_000])
def test_a_damaged_config_is_never_replaced_by_defaults(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "step_000007").mkdir()
    (tmp_path / "step_000007/complete.json").write_text("{}")
    with pytest.raises(SystemExit):
        train.main(["--resume", str(tmp_path)])
    assert f"resume: {tmp_path / 'config.json'} is damaged" in capsys.readouterr().err


def test_settings_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    Log(tmp_path, {"steps": 1})
    monkeypatch.setattr(files, "sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        Log(tmp_path, {"steps": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == '{\n "steps": 1\n}\n'


@pytest.mark.parametrize("text", ["r\U0001f600", "r\u00e9", "half \udcff"])
def test_settings_come_back_as_they_were(text, tmp_path):
    c = train.Config(env="bandit", steps=8, out=str(tmp_path), log="")
    Log(tmp_path, asdict(replace(c, data=text)))
    (tmp_path / "step_000007").mkdir()
    (tmp_path / "step_000007/complete.json").write_text("{}")
    with folder.release_locks():
        assert folder.resumed(train.Config(resume=str(tmp_path)), [])[0].data == text


def test_two_runs_never_share_a_folder(tmp_path, monkeypatch, capsys):
    """The second starts before the first has logged anything. A start that failed leaves its folder free."""
    monkeypatch.chdir(tmp_path)
    default, named = train.Config(env="bandit"), train.Config(env="bandit", out="run")
    with folder.release_locks():
        assert folder.run_folder(default) != folder.run_folder(default)
        folder.run_folder(named)
        with pytest.raises(ValueError, match="out: run already holds a run"):
            folder.run_folder(named)
    assert folder.run_folder(named).name == "run"
    (tmp_path / "run/step_000001").mkdir()
    (tmp_path / "run/step_000001/complete.json").write_text("{}")
    with pytest.raises(SystemExit):
        train.main(["--resume", "run"])  # while it is held
    assert "is being written by another process" in capsys.readouterr().err
    with pytest.raises(ValueError, match="out: run already holds a run"):  # without a log, but a checkpoint
        folder.run_folder(named)


def test_rates_given_at_a_resume_are_used(tmp_path, capsys):
    """All three, whatever the checkpoint's optimizers had; and a file of settings beside --resume adds to the run's own."""
    small = ["--env", "bandit", "--groups", "2", "--group_size", "2", "--max_turns", "1", "--max_tokens", "4", "--final_episodes", "2",
             "--eval_every", "0", "--algo", "ppo", "--filter", "none", "--lr_schedule", "constant", "--lr_warmup", "0",
             "--entropy_coef", "0.01"]  # fmt: skip
    train.main([*small, "--steps", "1", "--keep", "3", "--out", str(tmp_path / "run")])
    (tmp_path / "more.yaml").write_text("steps: 2\nlr: 1e-5\n")
    more = ["--config", str(tmp_path / "more.yaml"), "--weight_decay", "0.25", "--critic_lr", "2e-4"]
    train.main(["--resume", str(tmp_path / "run"), *more])
    state = tmp_path / "run/step_000002"
    policy = torch.load(state / "optimizer.pt", weights_only=True)["param_groups"][0]
    critic = torch.load(state / "critic.pt", weights_only=True)["optimizer"]["param_groups"][0]
    for group, rate in ((policy, 1e-5), (critic, 2e-4)):
        assert group["lr"] == group["initial_lr"] == rate and group["weight_decay"] == 0.25
    first, second = timeless(tmp_path / "run")
    assert (first["lr"], second["lr"]) == (6e-4, 1e-5)
    (tmp_path / "run/metrics.jsonl").unlink()
    train.main(["--resume", str(tmp_path / "run"), "--steps", "3"])
    assert "resumed after step 2" in (said := capsys.readouterr().out) and "the log is gone, so early stops count anew" in said
    assert len((tmp_path / "run/rollouts.jsonl").read_text().splitlines()) == 3 * 4  # the run's own groups
    a, b = (load_file(tmp_path / f"run/step_00000{n}/model.safetensors") for n in (1, 2))
    updates = 4  # of AdamW: each moves a weight by about the rate, and by decay times rate times itself
    assert 0 < max(((a[k] - b[k]).abs() - 0.25 * updates * 1e-5 * a[k].abs()).max() for k in a) < 3 * updates * 1e-5


def test_rewind_keeps_whole_lines_up_to_a_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "x\n{"step": 6}\n{"step": 2}\n{"step": 3}\n{"st')
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 2')
    assert records.rewind(tmp_path, 2) == [{"step": 1}, {"step": 2}]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2, "x\n{"step": 6}\n{"step": 2}\n'
    assert (tmp_path / "rollouts.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_resumed_run_runs_its_reference_as_the_whole_run_does(tmp_path, monkeypatch):
    """Layers that run again share no beginnings of rows, which rounds otherwise: so the KL would not be the same bit for bit."""
    from nanoragen.policy import loading

    class Enough(Exception):
        pass

    def reference(model):
        seen.append(any(getattr(m, "is_checkpointed", False) for m in model.modules()))
        raise Enough

    seen, c = [], train.Config(device="cpu", gradient_checkpointing=True, beta=0.1)
    model, tokenizer = loading.load_policy(c)
    monkeypatch.setattr(loading, "reference", reference)
    for saved in (None, tmp_path):
        with pytest.raises(Enough):
            train.run(c, model, tokenizer, tmp_path, saved)
    assert seen == [True, True]
