"""Rollouts: many episodes at once, turn by turn.

Invariants (DESIGN section 4):
- A turn's context is the previous context + the sampled ids + the new observation in its glue. Nothing is re-tokenised.
- `Episode.mask` is 1 on exactly the ids the model sampled (its own end of turn included). It is written down as they
  are sampled, never found again by value, so padding id = end-of-turn id does not matter.
- Ids are drawn from softmax(logits / temperature) and nothing else, whatever the model's own generation config says.
- What an episode draws depends on the random state, its group and its place in the group, not on the episodes beside it: so
  --rollout_batch, the kept cache and the number of processes change nothing (but for a tie within float rounding).

How replies are generated is in nanoragen/rollout/generation.py. Left out on purpose: training on the log-probs that are seen while
sampling (they are for reading, the trainer scores the same ids), environments in other processes.
"""

import itertools
import math
import numbers
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from nanoragen.envs.base import MAX_REWARD, check_attributes
from nanoragen.rollout.chat import Chat, parse_reply, reasoning_span
from nanoragen.rollout.generation import CachedContexts, PlainContexts, positions, sampling_mode, why_plain
from nanoragen.run import distributed
from nanoragen.run.faults import containing, time_limit

UNREADABLE = "That reply could not be read. Reply with <think>...</think><answer>...</answer>.\n"


@dataclass
class Turn:
    """One reply: its ids are episode.ids[start:end], its reasoning episode.ids[start:think_end] (empty if unparsed)."""

    start: int
    end: int
    think_end: int
    observation: str  # what the model was shown
    reply: str  # what it answered after "<think>", without its end of turn
    actions: list[str]  # those that were executed
    parsed: bool
    reward: float
    advantage: float | None = None  # mean over its tokens, where it was trained on


@dataclass
class Episode:
    """ids: prompt, replies, observations; mask: 1 on the sampled ids. truncated: "" | "turns" | "context" | "env" | "error"."""

    env: str
    seed: int
    group: int
    ids: list[int]
    mask: list[int]
    turns: list[Turn] = field(default_factory=list)
    terminated: bool = False
    truncated: str = ""
    success: bool = False
    instruction: str = ""
    observation: str = ""  # the first one
    error: str = ""  # the traceback, where the environment failed
    # of each sampled id, in order: log-prob and entropy of what it was drawn from, nats. Rounding may differ by the way of sampling
    logprobs: list[float] = field(default_factory=list, compare=False)
    entropies: list[float] = field(default_factory=list, compare=False)

    @property
    def reward(self) -> float:
        return float(sum(t.reward for t in self.turns))

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return sum(self.mask)

    @property
    def messages(self) -> list[dict]:
        """The conversation as role/content dicts, for reading."""
        out = [{"role": "system", "content": self.instruction}]
        if not self.turns:
            out.append({"role": "user", "content": self.observation})
        for t in self.turns:
            out += [{"role": "user", "content": t.observation}, {"role": "assistant", "content": "<think>" + t.reply}]
        return out


@dataclass
class Sampling:
    """How to play. None = the environment's or the model's own value."""

    temperature: float = 1.0  # 0 = greedy
    max_tokens: int = 64  # of one reply
    max_turns: int | None = None
    max_actions_per_turn: int | None = None
    max_context: int | None = None  # tokens; never more than the model has positions for
    format_penalty: float = -0.1  # reward of a reply that does not parse
    rollout_batch: int | None = None  # episodes generated at a time, None = all
    keep_cache: bool = True  # False: the plain path
    contain_faults: bool = False  # True: an environment that fails ends its episode with `error`; False: it raises
    env_timeout: float | None = None  # seconds of one reset, or of the actions of one reply

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature}; valid: 0 (greedy) or more")
        for name in ("max_tokens", "max_turns", "max_actions_per_turn", "max_context", "rollout_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}; valid: 1 or more")


def rollout(model, tokenizer, envs, seeds, groups, sampling, *, env_name, progress=None) -> list[Episode]:
    """Play one episode in each environment, and return them in the same order.

    envs, seeds, groups: one each an episode; an environment is reset here with its seed. Episodes of a group with the
    same seed must get the same prompt (ValueError if not). progress: called with a line of text before each turn.
    Takes one of torch's global random numbers. Under torchrun each process plays some of the groups, and all return all episodes
    (nanoragen/run/distributed.py). A reward that is no finite number is a ValueError naming environment and seed,
    and with `contain_faults` this and whatever else an environment raises ends its episode alone (it may have no ids).
    Logits that are NaN are a FloatingPointError naming the turn. Score the ids in the precision (autocast) of this call.

    A reply that does not parse earns `format_penalty` and the environment does not move. An episode ends as
    `terminated` by its environment, or as `truncated`: out of turns (then the last turn is also charged env.step_reward
    for each action left unused, so that doing nothing is not the cheapest way to fail), out of context (perhaps with no
    turn at all), or by the environment.
    """
    if not len(envs) == len(seeds) == len(groups):
        raise ValueError(f"envs, seeds, groups: lengths {len(envs)}, {len(seeds)}, {len(groups)}; valid: all equal")
    chat, run, seen = Chat(tokenizer), int(torch.randint(2**62, ())), Counter()
    mine, tables = set(distributed.share(list(dict.fromkeys(groups)))), []
    for env, seed, group in zip(envs, seeds, groups):
        seen[group] += 1
        if group in mine:
            rng = np.random.default_rng([run, group, seen[group]])
            tables.append(_Table(env, env_name, seed, group, chat, sampling, rng))
    prompts = {}
    for t in tables:
        if not t.over and prompts.setdefault((t.episode.group, t.episode.seed), t.episode.ids) != t.episode.ids:
            with t._faults():
                raise ValueError(f"env: {t.name} gave two different first observations; valid: reset(seed) alone decides")
    limit = min(sampling.max_context or math.inf, positions(model))
    with sampling_mode(model):
        for rows in _chunks([t.episode.group for t in tables], sampling.rollout_batch or len(tables)):
            _play([tables[r] for r in rows], model, chat, sampling, limit, progress)
    played = {}  # group -> its episodes, in their order
    for episode in itertools.chain(*distributed.gather([t.episode for t in tables])):
        played.setdefault(episode.group, []).append(episode)
    return [played[group].pop(0) for group in groups]


def _chunks(groups, size: int):
    """Lists of at most `size` episode numbers, whole groups where they fit (so that their prompt is encoded once)."""
    members = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    chunk = []
    for rows in members.values():
        if chunk and len(chunk) + len(rows) > size:
            yield chunk
            chunk = []
        chunk = chunk + rows
        while len(chunk) > size:
            yield chunk[:size]
            chunk = chunk[size:]
    if chunk:
        yield chunk


def _play(tables, model, chat, sampling, limit, progress):
    """Play these episodes to their ends, all in step."""
    tables = [t for t in tables if not t.over and not t.out_of_context(len(t.episode.ids), limit)]
    keep = sampling.keep_cache and not why_plain(model)
    contexts = (CachedContexts if keep else PlainContexts)(model, chat, sampling, [t.episode.ids for t in tables])
    turn = 0
    while tables:
        turn += 1
        if progress:
            progress(f"turn {turn}: {len(tables)} episodes")
        staying, glue = [], []
        for row, (table, reply_ids) in enumerate(zip(tables, contexts.sample(turn, [t.luck() for t in tables]))):
            table.note(contexts.values[row][: len(reply_ids)])
            observation = table.take(reply_ids)
            if table.over:
                continue
            follow = table.follow(reply_ids, observation)
            if not table.over and not table.out_of_context(len(table.episode.ids) + len(follow), limit):
                table.show(observation, follow)
                staying.append(row)
                glue.append(follow)
        tables = [tables[row] for row in staying]
        if tables:
            contexts.follow(staying, glue)


class _Table:
    """One episode with the environment it is played in."""

    def __init__(self, env, env_name, seed, group, chat, sampling, rng):
        self.env, self.chat, self.sampling, self.rng = env, chat, sampling, rng
        self.name = f"{env_name} (seed {seed})"
        self.state, self.max_turns = "", sampling.max_turns or env.max_turns
        self.max_actions = sampling.max_actions_per_turn or env.max_actions_per_turn
        self.episode = Episode(env_name, int(seed), int(group), [], [], instruction=env.instruction)
        with self._faults():
            check_attributes(env, self.name)
            self.state, info = env.reset(seed=seed)  # the environment's text, without any remark of ours
            self._check_text(self.state)
            self.episode.ids = chat.prompt(env.instruction, self.state)
            self.episode.mask = [0] * len(self.episode.ids)
            self.episode.observation = self.shown = self.state
            self.episode.success = bool(info.get("success", False))

    def _faults(self):
        """Where the environment's code runs."""
        limit = self.sampling.env_timeout
        return containing(self.episode, limit) if self.sampling.contain_faults else time_limit(limit)

    @property
    def over(self) -> bool:
        return self.episode.terminated or bool(self.episode.truncated)

    def out_of_context(self, length: int, limit: float) -> bool:
        """Whether a context of this length leaves no room for a reply; if so the episode is over."""
        if length + self.sampling.max_tokens <= limit:
            return False
        episode = self.episode
        episode.truncated = "context"
        if len(episode.ids) > limit:  # a first prompt: nothing was sampled, and no forward pass may fail on it
            episode.ids, episode.mask = episode.ids[: int(limit)], episode.mask[: int(limit)]
        return True

    def luck(self) -> list[float]:
        """A number in [0, 1) for every id of the next reply. [max_tokens]"""
        return self.rng.random(self.sampling.max_tokens).tolist()

    def show(self, observation: str, glue: list[int]):
        """The next turn begins: its observation, and the ids that carry it."""
        self.shown = observation
        self.episode.ids += glue
        self.episode.mask += [0] * len(glue)

    def follow(self, reply_ids: list[int], observation: str) -> list[int]:
        """The ids that carry the next observation; that no tokenizer can read is a fault of the environment."""
        with self._faults():
            return self.chat.follow(reply_ids, observation)
        return []

    def note(self, values):
        """What was seen while a reply was sampled: (log-prob, entropy) of each of its ids."""
        self.episode.logprobs += [logprob for logprob, _ in values]
        self.episode.entropies += [entropy for _, entropy in values]

    def take(self, reply_ids: list[int]) -> str:
        """Record a reply, act on it, and return the next observation."""
        episode, start = self.episode, len(self.episode.ids)
        episode.ids += reply_ids
        episode.mask += [1] * len(reply_ids)
        text = self.chat.reply_text(reply_ids)
        reply = parse_reply(text)
        executed, reward = self._act(reply.actions) if reply.parsed else ([], self.sampling.format_penalty)
        thought = reasoning_span(reply_ids, self.chat.tokenizer) if reply.parsed and reply.reasoning else 0
        episode.turns.append(
            Turn(start, len(episode.ids), start + thought, self.shown, text, executed, reply.parsed, float(reward))
        )
        if not self.over and len(episode.turns) == self.max_turns:
            episode.truncated = "turns"
            unused = self.max_turns * self.max_actions - sum(len(t.actions) for t in episode.turns)
            episode.turns[-1].reward += self.env.step_reward * unused
        return self.state if reply.parsed else UNREADABLE + self.state

    def _act(self, actions) -> tuple[list[str], float]:
        """Step the environment through the actions of one reply. Returns those executed and their summed reward."""
        executed, rewards = [], []
        with self._faults():
            self._step(actions, executed, rewards)
        return executed, sum(rewards)

    def _step(self, actions, executed, rewards):
        for action in actions[: self.max_actions]:
            self.state, reward, terminated, truncated, info = self.env.step(action)
            self._check_text(self.state)
            if not isinstance(reward, numbers.Real) or not abs(reward) < MAX_REWARD:  # NaN compares false
                raise ValueError(f"env: {self.name} returned the reward {reward!r}; valid: a finite number, below {MAX_REWARD:g}")
            executed.append(action)
            rewards.append(float(reward))
            self.episode.success = bool(info.get("success", False))
            self.episode.terminated = bool(terminated)
            if truncated and not terminated:
                self.episode.truncated = "env"
            if self.over:
                break

    def _check_text(self, observation):
        if not isinstance(observation, str):
            raise ValueError(f"env: {self.name} returned the observation {observation!r:.80}; valid: text")
