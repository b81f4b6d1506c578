"""Seconds a training step: nanoragen against TRL's GRPOTrainer on its multi-turn path (`rollout_func` + `env_mask`).

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -e . trl==1.16        # an environment of its own, CPU torch first
    /tmp/trl/bin/python tests/speed_trl.py                                    # prints one Markdown table
    /tmp/trl/bin/python tests/speed_trl.py --groups 4 --steps 3 --minibatches 4 --micro_batch 8

Both train the same model on the same instances of the same environment, in the same Python and torch: float32, GRPO without KL,
the same temperature, turns, tokens a turn, episodes, optimiser passes, updates and micro-batch. The learning rate is so small that
the policy stays what it was. Each samples in its own way, so tokens and turns differ a little, and are in the table; that the rows
of nanoragen sampled the same is checked. Each trainer lives in a process of its own and takes one step when told to, while the
others wait; the order changes from round to round; the median of each is printed.

    nanoragen   train.py's own loop. Without the filter every episode is in the loss, as in TRL (those whose advantage is 0 add
                nothing to the gradient, and are not run). With it only groups that hold signal are: that row is what a user waits,
                not the same loss
    TRL         GRPOTrainer. TRL leaves the loop over turns to the user; here it is as in its own loop over tool calls: each turn
                one batched `generate` of the episodes that still play, on their ids so far, padded on the left. Replies are
                parsed and environments stepped as in nanoragen. No log-probs are returned, because without vLLM TRL does not
                read them. Gradient checkpointing and bf16, its defaults, are off.

Counted is from the first rollout to the last update of a step; logging and evaluation are not. Not a test: pytest does not
collect it.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

from nanoragen.run import cli  # noqa: E402

TOLD, ANSWER = "go\n", "step "


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--env", default="sokoban", help="environment")
    parser.add_argument("--env_options", default="", help="its options")
    parser.add_argument("--model", default="nano", help="nano (bundled) or a folder")
    parser.add_argument("--groups", type=int, default=16, help="prompts of a step")
    parser.add_argument("--group_size", type=int, default=8, help="episodes of each")
    parser.add_argument("--max_turns", type=int, default=5, help="turns of an episode at most")
    parser.add_argument("--max_actions_per_turn", type=int, default=2, help="actions executed of one reply")
    parser.add_argument("--max_tokens", type=int, default=64, help="tokens of one reply")
    parser.add_argument("--minibatches", type=int, default=1, help="updates of a step")
    parser.add_argument("--micro_batch", type=int, default=32, help="episodes in one forward pass of an update")
    parser.add_argument("--steps", type=int, default=5, help="steps that count, after one that does not")
    parser.add_argument("--threads", type=int, default=2, help="of torch, in each process")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # what one of the processes is
    a = parser.parse_args()
    if a.groups * a.group_size % (a.minibatches * a.micro_batch):
        parser.error(
            f"micro_batch: {a.micro_batch}; valid: divides the episodes of a minibatch ({a.groups * a.group_size // a.minibatches})"
        )
    return a


# -- one process: a trainer that takes a step when it is told to -------------------------------------------------------------------


class Turns:
    """Wait to be told, and answer with what a step took. The answers go to the real stdout, everything else to stderr.

    Of several processes of one trainer the first is told and answers."""

    def __init__(self):
        self.answers, sys.stdout, self.number = sys.stdout, sys.stderr, 0

    def wait(self):
        import torch

        from nanoragen.run import distributed

        told = distributed.rank() == 0 and sys.stdin.readline() == TOLD
        if not distributed.first(told):
            os._exit(0)
        self.number += 1
        torch.manual_seed(self.number)

    def answer(self, **found):
        from nanoragen.run import distributed

        if distributed.rank() == 0:
            print(ANSWER + json.dumps(found), file=self.answers, flush=True)


def digest(ids):
    """Of the ids of all episodes in order: equal where all tokens are."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def nanoragen_side(a, **settings):
    """train.py's loop, held up where it moves its progress bar: after a step and before the next."""
    import train
    from nanoragen.policy.loading import load
    from nanoragen.run import distributed
    from nanoragen.run.session import Session
    from nanoragen.run.signals import Stop

    turns, _ = Turns(), distributed.start("cpu")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        c = train.Config(
            env=a.env, env_options=a.env_options, model=a.model, algo="grpo", groups=a.groups, group_size=a.group_size,
            max_turns=a.max_turns, max_actions_per_turn=a.max_actions_per_turn, max_tokens=a.max_tokens, minibatches=a.minibatches,
            micro_batch=a.micro_batch, lr=1e-9, steps=a.steps + 2, eval_every=0, final_episodes=1, save_every=0,
            early_stop="none", device="cpu", out=folder, **settings,
        )  # fmt: skip

        class Bar:
            initial = n = 0

            def write(self, text):
                if text.startswith("before training"):
                    turns.wait()

            def set_description_str(self, text):
                pass

            def update(self):
                if distributed.rank():
                    return turns.wait()
                line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
                played = [json.loads(e) for e in (out / "rollouts.jsonl").read_text().splitlines()[-a.groups * a.group_size :]]
                turns.answer(
                    seconds=line["step_time"], rollout=line["time/rollout"], diagnosis=line["time/diagnosis"],
                    turns=mean(len(e["turns"]) for e in played), tokens=sum(sum(e["mask"]) for e in played),
                    sampled=digest([e["ids"] for e in played]),
                )  # fmt: skip
                turns.wait()

            def close(self):
                pass

        model, tokenizer = load(c.model, device="cpu")
        with Stop() as stop:
            train.train(c, model, tokenizer, Session(c, out, None, stop, Bar()))


def trl_side(a):
    """GRPOTrainer, held up before the first micro-batch of a step."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from nanoragen.envs.base import train_seeds
    from nanoragen.envs.registry import make
    from nanoragen.policy.loading import load
    from nanoragen.rollout.chat import Chat, parse_reply
    from nanoragen.rollout.episodes import UNREADABLE
    from nanoragen.run import distributed

    turns = Turns()
    model, tokenizer = load(a.model, device="cpu")
    chat = Chat(tokenizer)
    N = int(os.environ.get("WORLD_SIZE", 1))  # processes
    B, updates = a.groups * a.group_size // N, a.minibatches
    envs = [make(a.env, **cli.options(a.env_options)) for _ in range(B)]
    clock = {}

    def rollout_func(prompts, trainer):
        """prompts: the instances' seeds, as text. One batch of the episodes that still play each turn."""
        pad = tokenizer.pad_token_id
        shown = [env.reset(seed=int(seed))[0] for env, seed in zip(envs, prompts)]
        prompt_ids = [chat.prompt(env.instruction, text) for env, text in zip(envs, shown)]
        completion, mask, reward, replies = [[] for _ in envs], [[] for _ in envs], [0.0] * B, [0] * B
        playing = list(range(B))
        for turn in range(a.max_turns):
            contexts = [prompt_ids[i] + completion[i] for i in playing]
            width = max(map(len, contexts))
            ids = torch.tensor([[pad] * (width - len(c)) + c for c in contexts])
            seen = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
            with torch.no_grad():
                out = trainer.model.generate(input_ids=ids, attention_mask=seen, generation_config=trainer.generation_config)
            staying = []
            for i, row in zip(playing, out[:, width:].tolist()):
                end = next((n for n, id in enumerate(row) if id in trainer.eos_token_ids), len(row) - 1)
                reply_ids, done, state = row[: end + 1], False, shown[i]
                completion[i] += reply_ids
                mask[i] += [1] * len(reply_ids)
                replies[i] += 1
                reply = parse_reply(chat.reply_text(reply_ids))
                for action in reply.actions[: a.max_actions_per_turn] if reply.parsed else []:
                    state, r, terminated, truncated, _ = envs[i].step(action)
                    reward[i] += r
                    done = terminated or truncated
                    if done:
                        break
                if not reply.parsed:
                    reward[i] -= 0.1
                shown[i] = state
                if not done and turn + 1 < a.max_turns:
                    glue = chat.follow(reply_ids, state if reply.parsed else UNREADABLE + state)
                    completion[i] += glue
                    mask[i] += [0] * len(glue)
                    staying.append(i)
            playing = staying
            if not playing:
                break
        ids = [p + c for p, c in zip(prompt_ids, completion)]
        clock.update(rolled=time.perf_counter(), turns=mean(replies), tokens=sum(map(sum, mask)), ids=ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completion, "logprobs": None, "env_mask": mask, "reward": reward}

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step % updates == 0:
                turns.wait()
                clock["start"] = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % updates == 0:
                end, start, rolled = time.perf_counter(), clock["start"], clock["rolled"]
                every = distributed.gather((clock["turns"], clock["tokens"], clock["ids"]))
                counts = {"turns": mean(t for t, _, _ in every), "tokens": sum(n for _, n, _ in every), "sampled": digest(every)}
                turns.answer(seconds=end - start, rollout=rolled - start, diagnosis=0.0, **counts)

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, ddp_backend="gloo" if N > 1 else None, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
            disable_tqdm=True, loss_type="grpo", beta=0.0, epsilon=0.2, epsilon_high=0.2, temperature=1.0, top_p=1.0, top_k=0,
            num_generations=a.group_size, max_completion_length=a.max_tokens, per_device_train_batch_size=a.micro_batch,
            steps_per_generation=B // a.micro_batch, gradient_accumulation_steps=B // a.micro_batch // updates, num_iterations=1,
            max_steps=(a.steps + 2) * updates, learning_rate=1e-9, max_grad_norm=1.0, shuffle_dataset=False,
        )  # fmt: skip
        seeds = [str(s) for step in range(1, a.steps + 3) for s in train_seeds(0, step, a.groups)]
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, args=args, train_dataset=Dataset.from_dict({"prompt": seeds}),
            reward_funcs=lambda reward, **kwargs: reward, rollout_func=rollout_func, callbacks=[Clock()],
        )  # fmt: skip
        if trainer.eos_token_ids != chat.end_ids:
            raise ValueError(f"model: TRL ends a turn at {trainer.eos_token_ids}, nanoragen at {chat.end_ids}; valid: the same")
        trainer.train()


SIDES = {
    "TRL": trl_side,
    "TRL, two processes": trl_side,
    "nanoragen": lambda a: nanoragen_side(a, filter="none", mi_every=0),
    "nanoragen, two processes": lambda a: nanoragen_side(a, filter="none", mi_every=0),
    "nanoragen, collapse measured": lambda a: nanoragen_side(a, filter="none", mi_every=1),
    "nanoragen, collapse measured, filter top_p 0.9 (its defaults)": lambda a: nanoragen_side(a, filter="top_p", mi_every=1),
}


# -- the parent: the processes in turn, and the table ------------------------------------------------------------------------------


def step(process):
    """Tell one process to take a step, wait for it, and return what it says."""
    process.stdin.write(TOLD)
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    sys.exit("speed_trl.py: a trainer ended early; what it said is above")


def main():
    a = arguments()
    if importlib.util.find_spec("trl") is None:
        cli.fail("speed_trl.py", "trl is not installed; valid: an environment with trl==1.16 (see the first lines of this file)")
    if a.side:
        import torch

        torch.set_num_threads(a.threads // int(os.environ.get("WORLD_SIZE", 1)))
        return SIDES[a.side](a)
    pipe, processes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}, {}
    for side in SIDES:
        N = 2 if side.endswith("two processes") else 1
        environment = {**os.environ, "OMP_NUM_THREADS": str(a.threads // N), "TOKENIZERS_PARALLELISM": "false"}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={N}"] if N > 1 else []
        command = [sys.executable, *launch, __file__, *sys.argv[1:], "--side", side]
        processes[side] = subprocess.Popen(command, env=environment, **pipe)
    found = {side: [] for side in SIDES}
    for number in range(a.steps + 1):
        sampled = set()
        for side in list(SIDES)[:: -1 if number % 2 else 1]:
            took = step(processes[side])
            print(f"step {number} of {a.steps}: {side}: {took['seconds']:.2f} s, rollout {took['rollout']:.2f} s", file=sys.stderr)
            if not side.startswith("TRL"):
                sampled.add(took["sampled"])
            if number:  # the first step warms up
                found[side].append(took)
        if len(sampled) > 1:
            print(f"step {number}: the rows of nanoragen sampled different tokens, compare with care", file=sys.stderr)
    for process in processes.values():
        process.stdin.close()
        process.wait()

    version = importlib.metadata.version
    print(
        f"{a.env}, model {a.model}, float32 on a CPU, {a.threads} threads; TRL {version('trl')}, transformers "
        f"{version('transformers')}, torch {version('torch')}: {a.groups} prompts x {a.group_size} episodes, at most {a.max_turns} "
        f"turns of {a.max_tokens} tokens and {a.max_actions_per_turn} actions, {a.minibatches} update(s) a step, micro-batches of "
        f"{a.micro_batch}; median of {a.steps} interleaved steps.\n"
    )
    columns = (
        "trainer",
        "s a step",
        "rollout",
        "diagnosis",
        "rest (advantages, loss, update)",
        "turns an episode",
        "tokens a step",
    )
    print("| " + " | ".join([*columns, "TRL's time / its"]) + " |")
    print("|---|---|---|---|---|---|---|---|")
    for side, steps in found.items():
        rest = median(s["seconds"] - s["rollout"] - s["diagnosis"] for s in steps)
        whole, rollout, diagnosis = (median(s[key] for s in steps) for key in ("seconds", "rollout", "diagnosis"))
        ratio = median(other["seconds"] / own["seconds"] for other, own in zip(found["TRL"], steps))
        counts = f"{mean(s['turns'] for s in steps):.2f} | {mean(s['tokens'] for s in steps):,.0f}"
        print(f"| {side} | {whole:.2f} | {rollout:.2f} | {diagnosis:.2f} | {rest:.2f} | {counts} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
