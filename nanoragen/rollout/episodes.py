"""Many episodes at once, turn by turn. Invariants (DESIGN section 4):

- A turn's context is the previous context + the sampled ids + the new observation's ids. Nothing is tokenised again.
- `Episode.mask` is 1 on exactly the ids the model sampled (its own end of turn included). It is written as the ids are
  appended (`EpisodeRunner._append`), never found by value, so a padding id that is the end-of-turn id does not matter.
- Ids are drawn from softmax(logits / temperature) and nothing else, whatever the model's own generation config says.
- What an episode draws depends on the random state, its group and its place in the group, not on the episodes beside it: so
  --rollout_batch, the KV cache and the number of processes change nothing (but for a tie within float rounding).

Left out on purpose: training on the log-probs that are seen while sampling (they are for reading), environments in other processes.
"""

import itertools
import math
import numbers
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from nanoragen.envs.base import MAX_REWARD, check_attributes
from nanoragen.policy.support import kv_cache_unsupported, max_positions
from nanoragen.rollout.chat import Chat, find_placeholders, parse_reply, reasoning_span
from nanoragen.rollout.generation import CachedGenerator, UncachedGenerator, sampling_mode
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
    actions: list[str] = field(default_factory=list)  # those that were executed
    parsed: bool = True
    reward: float = 0.0
    advantage: float | None = None  # mean over its tokens, where it was trained on
    cut: bool = False  # the reply was as long as max_tokens allows, and had not ended
    invalid: int = 0  # executed actions that the environment calls invalid


@dataclass
class Episode:
    """ids [T]: prompt, replies, observations. mask [T]: 1 on the sampled ids. truncated: "" | "turns" | "context" | "env" | "error".

    An episode without a sampled id (no room for a reply to its prompt) has no turn and the reward 0, and it counts in its
    group's baseline like any other.
    """

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
    keep_cache: bool = True  # False: the reference implementation, every context encoded anew each turn
    contain_faults: bool = False  # True: an environment that fails ends its episode with `error`; False: it raises
    env_timeout: float | None = None  # seconds of one reset, or of the actions of one reply

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature}; valid: 0 (greedy) or more")
        for name in ("max_tokens", "max_turns", "max_actions_per_turn", "max_context", "rollout_batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: {value}; valid: 1 or more")


def sampling_of(c, **more) -> Sampling:
    """How to play under the settings c, where 0 stands for None."""
    zero = ("max_turns", "max_actions_per_turn", "max_context", "rollout_batch")
    given = {name: getattr(c, name) for name in ("temperature", "max_tokens", "format_penalty")}
    return Sampling(**given, **{name: getattr(c, name) or None for name in zero}, **more)


def rollout(model, tokenizer, envs, seeds, groups, sampling, *, env_name, progress=None, ended=None) -> list[Episode]:
    """Play one episode in each environment, and return them in the same order.

    envs, seeds, groups: one each an episode; an environment is reset here with its seed. Episodes of a group with the same seed
    must get the same prompt (ValueError if not). progress: called with a line of text before each turn; ended: with the number of
    episodes that have just ended. Takes one of torch's global random numbers. Under torchrun each process plays some of the groups, and all return all episodes. A reward that is
    no finite number is a ValueError naming environment and seed; with `contain_faults` this and whatever else an environment
    raises ends its episode alone (it may have no ids). Logits that are NaN are a FloatingPointError naming the turn.
    Score the ids in the precision (autocast) of this call.
    """
    if not len(envs) == len(seeds) == len(groups):
        raise ValueError(f"envs, seeds, groups: lengths {len(envs)}, {len(seeds)}, {len(groups)}; valid: all equal")
    chat, run, seen = Chat(tokenizer), int(torch.randint(2**62, ())), Counter()
    max_context = min(sampling.max_context or math.inf, max_positions(model))
    local, runners, prompts = set(distributed.share(list(dict.fromkeys(groups)))), {}, {}
    for place, (env, seed, group) in enumerate(zip(envs, seeds, groups)):
        seen[group] += 1
        if group in local:
            rng = np.random.default_rng([run, group, seen[group]])
            runners[place] = EpisodeRunner(env, env_name, seed, group, sampling, chat, rng, max_context, prompts)
    with sampling_mode(model):
        for batch in _batches(runners.values(), sampling.rollout_batch or len(runners)):
            _play(batch, model, chat, sampling, progress, ended)
    parts = distributed.gather({place: runner.episode for place, runner in runners.items()})
    played = {place: episode for part in parts for place, episode in part.items()}
    return [played[place] for place in range(len(envs))]


def _batches(runners, size: int) -> list[list]:
    """Lists of at most `size` episodes, whole groups where they fit (so that their prompt is encoded once)."""
    groups, batches = {}, [[]]
    for runner in runners:
        groups.setdefault(runner.episode.group, []).append(runner)
    for group in groups.values():
        for part in (group[i : i + size] for i in range(0, len(group), size)):
            if len(batches[-1]) + len(part) > size:
                batches.append([])
            batches[-1] += part
    return batches


def _play(runners, model, chat, sampling, progress, ended):
    """Play these episodes to their ends, turn by turn together."""
    runners = [r for r in runners if not r.over]
    keep_cache = sampling.keep_cache and not kv_cache_unsupported(model)
    generator = (CachedGenerator if keep_cache else UncachedGenerator)(model, chat, sampling, [r.episode.ids for r in runners])
    turn = 0
    while runners:
        turn += 1
        if progress:
            progress(f"turn {turn}: {len(runners)} episodes")
        replies, values = generator.sample(turn, [r.rng.random(sampling.max_tokens).tolist() for r in runners])
        glue = [runner.step(*sampled) for runner, *sampled in zip(runners, replies, values)]
        going_on = [row for row, runner in enumerate(runners) if not runner.over]
        if ended:
            ended(len(runners) - len(going_on))
        runners = [runners[row] for row in going_on]
        generator.extend(going_on, [glue[row] for row in going_on])


def longest_episode(model, tokenizer, env, sampling) -> tuple[int, int]:
    """Tokens of an episode whose replies take all they may and whose observations are like the first; and those of its prompt."""
    failed, length, prompt = SimpleNamespace(), math.inf, 0
    with containing(failed, sampling.env_timeout):  # an environment that fails now is the rollout's to report
        chat, observation = Chat(tokenizer), env.reset(seed=0)[0]
        turns = sampling.max_turns or env.max_turns
        prompt = len(chat.prompt(env.instruction, observation))
        length = prompt + turns * sampling.max_tokens + (turns - 1) * len(chat.follow([], observation))
    most = min(length, max_positions(model), sampling.max_context or math.inf)
    return int(most) if most < math.inf else sampling.max_tokens, int(min(prompt, most))


class EpisodeRunner:
    """One episode with its environment. What was sampled is recorded here, and all rewards, limits and ends are decided here.

    A reply that does not parse earns `format_penalty` and the environment does not move. An episode ends as
    `terminated` by its environment, or as `truncated`: out of turns (then the last turn is also charged env.step_reward
    for each action left unused, so that doing nothing is not the cheapest way to fail), out of context (perhaps with no
    turn at all), or by the environment. Without a chat (a policy that is no model, nanoragen/evaluate.py) there are no ids.

    rng: draws the ids. prompts: filled with the first messages of each (group, seed), which must be the same in all its episodes.
    observation: what is shown next. state: the environment's own text, without any remark of ours.
    """

    def __init__(self, env, env_name, seed, group, sampling, chat=None, rng=None, max_context=math.inf, prompts=None):
        self.env, self.sampling, self.chat, self.rng, self.max_context = env, sampling, chat, rng, max_context
        self.name = f"{env_name} (seed {seed})"
        self.max_turns = sampling.max_turns or env.max_turns
        self.max_actions = sampling.max_actions_per_turn or env.max_actions_per_turn
        self.episode = Episode(env_name, int(seed), int(group), [], [], instruction=env.instruction)
        with self._faults():
            check_attributes(env, self.name)
            self.placeholders = find_placeholders(env.instruction)
            self.state, info = env.reset(seed=seed)
            self._check_text()
            self.episode.observation = self.observation = self.state
            self.episode.success = bool(info.get("success", False))
            if chat:
                self._append_context(chat.prompt(env.instruction, self.state))
                if prompts.setdefault((group, seed), self.episode.messages) != self.episode.messages:
                    raise ValueError(f"env: {self.name} gave two different first observations; valid: reset(seed) alone decides")

    @property
    def over(self) -> bool:
        return self.episode.terminated or bool(self.episode.truncated)

    def step(self, reply_ids: list[int], values: list[tuple[float, float]]) -> list[int]:
        """Record a sampled reply with the (log-prob, entropy) of each id, and act on it.

        Returns the ids that carry the next observation; [] if the episode is over.
        """
        episode, start = self.episode, len(self.episode.ids)
        self._append(reply_ids, sampled=True)
        episode.logprobs += [logprob for logprob, _ in values]
        episode.entropies += [entropy for _, entropy in values]
        text = self.chat.reply_text(reply_ids)
        reply = parse_reply(text, self.placeholders)
        reasoning = reasoning_span(reply_ids, self.chat.tokenizer) if reply.parsed and reply.reasoning else 0
        cut = reply_ids[-1] not in self.chat.end_ids
        turn = Turn(start, len(episode.ids), start + reasoning, self.observation, text, parsed=reply.parsed, cut=cut)
        self.act(turn, reply.actions)
        if not self.over:
            with self._faults():  # an observation that no tokenizer can read is a fault of the environment
                return self._append_context(self.chat.follow(reply_ids, self.observation))
        return []

    def act(self, turn: Turn, actions: Iterable[str]):
        """Execute the actions, each asked for when those before it were executed, and add the turn with its reward to the episode."""
        episode = self.episode
        episode.turns.append(turn)
        if turn.parsed:
            with self._faults():
                for action in itertools.islice(actions, self.max_actions):
                    self._execute(action, turn)
                    if self.over:
                        break
        else:
            turn.reward = float(self.sampling.format_penalty)
        if not self.over and len(episode.turns) == self.max_turns:
            episode.truncated = "turns"
            unused = self.max_turns * self.max_actions - sum(len(t.actions) for t in episode.turns)
            turn.reward += self.env.step_reward * unused
        self.observation = self.state if turn.parsed else UNREADABLE + self.state

    def _execute(self, action: str, turn: Turn):
        self.state, reward, terminated, truncated, info = self.env.step(action)
        self._check_text()
        if not isinstance(reward, numbers.Real) or not abs(reward) < MAX_REWARD:  # NaN compares false
            raise ValueError(f"env: {self.name} returned the reward {reward!r}; valid: a finite number, below {MAX_REWARD:g}")
        turn.actions.append(action)
        turn.invalid += not info.get("action_is_valid", True)
        turn.reward += float(reward)
        self.episode.success = bool(info.get("success", False))
        self.episode.terminated = bool(terminated)
        if truncated and not terminated:
            self.episode.truncated = "env"

    def _append(self, ids: list[int], *, sampled: bool):
        """The mask is made here: 1 on ids that were sampled, 0 on all others."""
        self.episode.ids += ids
        self.episode.mask += [int(sampled)] * len(ids)

    def _append_context(self, ids: list[int]) -> list[int]:
        """Append and return the ids of an observation; where no whole reply has room after them the episode ends instead."""
        if len(self.episode.ids) + len(ids) + self.sampling.max_tokens > self.max_context:
            self.episode.truncated = "context"
            # of a first prompt there stays what fits: no later forward pass may fail on it
            ids = [] if self.episode.ids else ids[: int(self.max_context)]
        self._append(ids, sampled=False)
        return ids

    def _check_text(self):
        if not isinstance(self.state, str):
            raise ValueError(f"env: {self.name} returned the observation {self.state!r:.80}; valid: text")  # noqa: TRY004

    def _faults(self):
        """Where the environment's code runs: with `contain_faults`, whatever it raises ends the episode."""
        limit = self.sampling.env_timeout
        return containing(self.episode, limit) if self.sampling.contain_faults else time_limit(limit)
