"""What is played and recorded: tokens, masks, rewards, ends (cases R1-R7, R15, A3, A4, A16, A18).

How tokens are drawn is in test_sampler.py.
"""

import math

import pytest
import torch
from helpers import FORGETFUL, Ladder, byte_tokenizer, encode, play, script, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoragen.envs.registry import make
from nanoragen.rollout.chat import Chat
from nanoragen.rollout.episodes import UNREADABLE, Sampling, longest_episode, rollout

UP, DOWN = "go</think><answer>up</answer>", "go</think><answer>down</answer>"
TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


def run(reply, envs, *, tokenizer=TOKENIZER, seeds=None, groups=None, **options):
    """Roll out with a scripted model: `reply` maps context ids to reply ids."""
    model = script(tiny_model(tokenizer), reply)
    seeds = seeds or [0] * len(envs)
    groups = groups or [0] * len(envs)
    return rollout(model, tokenizer, envs, seeds, groups, Sampling(**options), env_name="ladder")


def run_one(*replies, env=None, tokenizer=TOKENIZER, end="<|end|>", **options):
    return run(play(*replies, tokenizer=tokenizer, end=end), [env or Ladder()], tokenizer=tokenizer, **options)[0]


# -- tokens and masks --------------------------------------------------------------------------------------------------


def sampled_ids(episode):
    return [i for i, m in zip(episode.ids, episode.mask) if m]


def test_r1_mask_is_one_on_exactly_the_sampled_ids():
    replies = [UP, "no idea", "a bit longer</think><answer>down || up</answer>"]
    episode = run_one(*replies)
    own = [encode(TOKENIZER, r) + [END] for r in replies]
    assert sampled_ids(episode) == [i for reply in own for i in reply]
    assert episode.num_tokens == sum(map(len, own)) and len(episode.mask) == len(episode.ids)
    assert [episode.ids[t.start : t.end] for t in episode.turns] == own
    rest = TOKENIZER.decode([i for i, m in zip(episode.ids, episode.mask) if not m])
    assert "rung 1" in rest and "Climb" in rest and "answer>up" not in rest and "no idea" not in rest
    assert episode.ids[-1] == END and episode.mask[-1] == 1  # nothing follows the last reply


def test_r2_end_of_turn_sampled_or_added():
    sampled, added = run_one(UP, UP, UP), run_one(UP + "~", UP + "~", UP + "~")  # "~": the reply does not end itself
    assert TOKENIZER.decode(sampled.ids) == TOKENIZER.decode(added.ids) + "<|end|>"  # the last is never added
    first, other = sampled.turns[0], added.turns[0]
    assert (sampled.ids[first.end - 1], sampled.mask[first.end - 1], sampled.mask[first.end]) == (END, 1, 0)
    assert (added.ids[other.end], added.mask[other.end - 1], added.mask[other.end]) == (END, 1, 0)
    headers = TOKENIZER.convert_tokens_to_ids("<|start|>")
    assert all(m == 0 for i, m in zip(sampled.ids, sampled.mask) if i == headers)


def test_r3_sampled_pieces_stay_pieces():
    tokenizer = byte_tokenizer(merges=["h e", "l l", "ll o", "he llo"])
    he, llo, hello = tokenizer.convert_tokens_to_ids(["he", "llo", "hello"])
    assert encode(tokenizer, "hello") == [hello]
    reply = [he, llo, *encode(tokenizer, "</think><answer>up</answer><|end|>")]
    (episode,) = run(lambda context: reply, [Ladder()], tokenizer=tokenizer)
    assert [episode.ids[t.start : t.end] for t in episode.turns] == [reply] * 3
    assert hello not in episode.ids


@pytest.mark.parametrize("keep_cache", [True, False])
def test_r4_r5_each_context_extends_the_previous(keep_cache):
    tokenizer, seen = byte_tokenizer(FORGETFUL), []
    inner = play("a" + UP, "b" + UP, "c" + DOWN, "d" + UP, tokenizer=tokenizer)

    def reply(context):
        seen.append((context, inner(context)))
        return seen[-1][1]

    (episode,) = run(reply, [Ladder()], tokenizer=tokenizer, max_turns=4, keep_cache=keep_cache)
    assert len(seen) == 4
    for (context, answer), (later, _) in zip(seen, seen[1:]):
        assert later[: len(context) + len(answer)] == context + answer
    assert episode.ids == seen[-1][0] + seen[-1][1]
    assert [len(context) for context, _ in seen] == [t.start for t in episode.turns]
    assert "<think>ago</think>" in tokenizer.decode(seen[-1][0])  # the template would have deleted it


def test_r6_response_length_does_not_count_observations():
    short, long = (run_one(UP, UP, UP, env=Ladder(growth=g)) for g in (0, 50))
    assert short.num_tokens == long.num_tokens == 3 * (len(encode(TOKENIZER, UP)) + 1)
    assert len(long.ids) > len(short.ids) + 100


def test_r7_padding_id_may_be_the_end_of_turn():
    tokenizer = byte_tokenizer(pad="<|end|>")
    texts = {0: UP, 1: "a much longer line of thought</think><answer>up</answer>"}

    def reply(context):
        return encode(tokenizer, texts["seed 1" in tokenizer.decode(context)] + "<|end|>")

    for keep_cache in (True, False):
        episodes = run(reply, [Ladder(), Ladder()], tokenizer=tokenizer, seeds=[0, 1], keep_cache=keep_cache)
        for row, episode in enumerate(episodes):
            assert sampled_ids(episode) == (encode(tokenizer, texts[row]) + [END]) * 3


def test_reasoning_span_of_a_turn():
    episode = run_one("why so</think><answer>up</answer>", "unclosed", " </think><answer>up</answer>")
    spans = [TOKENIZER.decode(episode.ids[t.start : t.think_end]) for t in episode.turns]
    assert spans == ["why so", "", ""]


def test_messages_render_to_the_text_of_the_ids():
    episode = run_one(UP, "no idea", UP)
    assert [t.reply for t in episode.turns] == [UP, "no idea", UP]
    text = TOKENIZER.apply_chat_template(episode.messages, tokenize=False)
    assert text == TOKENIZER.decode(episode.ids) + "\n"


ROWS = st.lists(st.integers(5, len(TOKENIZER) - 1), min_size=8, max_size=8)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(ROWS, st.integers(0, 8)), min_size=6, max_size=6))
def test_any_ids_may_be_sampled(script_lines):
    """Whatever the model emits, tags and broken characters included, is recorded as it was sampled."""
    emitted, lines = {0: [], 1: []}, iter(script_lines)

    def reply(context):
        row, end = next(lines)
        row = [*row[:end], END, *row[end + 1 :]] if end < 8 else row  # 8: the turn is cut
        emitted["seed 1" in TOKENIZER.decode(context)] += row[: end + 1]  # what follows an end was never said
        return row

    for episode in run(reply, [Ladder(), Ladder()], seeds=[0, 1], groups=[0, 1], max_tokens=8):
        assert sampled_ids(episode) == emitted[episode.seed]
        assert sum(episode.mask) == sum(t.end - t.start for t in episode.turns)
        assert all(t.start <= t.think_end <= t.end for t in episode.turns)


# -- rewards and ends --------------------------------------------------------------------------------------------------


def test_an_unread_reply_costs_the_penalty_and_nothing_moves():
    env = Ladder()
    episode = run_one("no idea", UP, UP, env=env, format_penalty=-0.7, max_turns=3)
    assert env.acted == ["up", "up"]
    assert episode.turns[0].reward == -0.7 and not episode.turns[0].parsed and episode.turns[0].actions == []
    assert episode.turns[1].observation == UNREADABLE + episode.turns[0].observation
    assert not episode.turns[2].observation.startswith(UNREADABLE)


def test_a_copy_of_the_instructions_placeholder_is_an_unread_reply():
    env = Ladder()
    env.instruction = "Climb. Reply <think>your reasoning</think><answer>up</answer>"
    copied, own = "Your reasoning</think><answer>up</answer>", "so</think><answer>up</answer>"
    episode = run_one(copied, own, own, env=env, format_penalty=-0.7)
    assert [t.parsed for t in episode.turns] == [False, True, True] and env.acted == ["up", "up"]
    assert episode.turns[0].reward == -0.7 and episode.turns[0].think_end == episode.turns[0].start


def test_actions_beyond_the_limit_are_not_executed_and_the_end_stops_them():
    env = Ladder()
    episode = run_one("x</think><answer>up||up||up||up</answer>", UP, UP, env=env, max_actions_per_turn=3, max_turns=1)
    assert env.acted == ["up"] * 3 == episode.turns[0].actions
    env = Ladder(height=1)
    episode = run_one("x</think><answer>up||up</answer>", env=env)
    assert env.acted == ["up"] and episode.terminated and episode.success and episode.truncated == ""
    assert len(episode.turns) == 1 and episode.reward == pytest.approx(0.9)


def test_out_of_turns_is_charged_for_the_actions_left_unused():
    episode = run_one(UP, "no idea", "x</think><answer>up||up</answer>")  # 3 of 3 * 2 actions
    assert (episode.truncated, episode.terminated, episode.success) == ("turns", False, False)
    assert [t.reward for t in episode.turns] == pytest.approx([-0.1, -0.1, -0.2 - 0.1 * 3])


def test_never_acting_is_no_better_than_trying_and_failing():
    """On the bundled sokoban: a policy of unreadable replies against one that walks to and fro and fails."""
    lazy, busy = (
        run(play(*[text] * 5, tokenizer=TOKENIZER), [make("sokoban")], seeds=[3])[0]
        for text in ("no", "x</think><answer>Up||Down</answer>")
    )
    assert not lazy.success and not busy.success
    assert lazy.reward < busy.reward


def test_a16_a18_returns_are_sums_of_step_rewards_one_an_episode():
    three, five = (run_one(*[UP] * n, max_turns=n, max_actions_per_turn=1) for n in (3, 5))
    assert three.reward == pytest.approx(-0.3) and five.reward == pytest.approx(-0.5)
    rewards = torch.tensor([three.reward, five.reward])
    assert ((rewards - rewards.mean()) / rewards.std(correction=0)).tolist() == pytest.approx([1, -1], abs=1e-5)
    won = run_one(UP, env=Ladder(height=1))  # A18: the baseline counts episodes, not turns
    assert isinstance(won.reward, float) and (won.reward + five.reward) / 2 == pytest.approx(0.2)


def test_the_environment_may_truncate():
    class Tired(Ladder):
        def step(self, action):
            text, reward, done, _, info = super().step(action)
            return text, reward, done, True, info

    episode = run_one(UP, UP, env=Tired())
    assert (episode.truncated, episode.terminated, len(episode.turns)) == ("env", False, 1)


@pytest.mark.parametrize("bad", [None, {"score": 1}, math.nan, math.inf, "1"])
def test_a3_a4_a_reward_that_is_no_number_names_its_origin(bad):
    class Broken(Ladder):
        def step(self, action):
            return self._text(), bad, False, False, {"success": False}

    with pytest.raises(ValueError, match=r"ladder \(seed 7\).*reward"):
        run(play(UP, tokenizer=TOKENIZER), [Broken()], seeds=[7])


def test_an_observation_that_is_no_text_names_its_origin():
    class Broken(Ladder):
        def reset(self, **options):
            return {"grid": 1}, {}

    with pytest.raises(ValueError, match=r"ladder \(seed 7\).*observation"):
        run(play(UP, tokenizer=TOKENIZER), [Broken()], seeds=[7])


def test_group_mates_must_see_the_same_prompt():
    with pytest.raises(ValueError, match=r"ladder \(seed 4\).*different first observations"):
        run(play(UP, tokenizer=TOKENIZER), [Ladder(height=2), Ladder(height=3)], seeds=[4, 4])


@pytest.mark.parametrize("keep_cache", [True, False])
def test_r15_a_growing_observation_ends_the_episode_and_not_the_batch(keep_cache):
    envs = [Ladder(), Ladder(growth=200), Ladder()]
    episodes = run(
        play(*[UP] * 3, tokenizer=TOKENIZER),
        envs,
        seeds=[1, 2, 3],
        groups=[0, 1, 2],
        max_context=450,
        keep_cache=keep_cache,
    )
    assert [e.truncated for e in episodes] == ["turns", "context", "turns"]
    assert [len(e.turns) for e in episodes] == [3, 2, 3]
    for e in episodes:
        assert len(e.ids) <= 450 and sum(e.mask) == len(e.turns) * (len(encode(TOKENIZER, UP)) + 1)
        assert e.ids[-1] == END  # no observation that nobody answers


def test_r15_a_first_prompt_without_room_for_a_reply():
    tokenizer = byte_tokenizer()
    long = Ladder(height="9" * 500)
    model = script(tiny_model(tokenizer, positions=256), play(*[UP] * 3, tokenizer=tokenizer))
    long_, short = rollout(model, tokenizer, [long, Ladder()], [0, 1], [0, 1], Sampling(max_tokens=40), env_name="ladder")
    assert (long_.truncated, long_.turns, long_.reward) == ("context", [], 0.0)
    assert len(long_.ids) == 256 and sum(long_.mask) == 0  # no longer than the model's positions
    assert "999" in long_.messages[1]["content"]
    assert len(short.turns) > 0
    (alone,) = rollout(model, tokenizer, [long], [0], [0], Sampling(), env_name="ladder")
    assert alone.truncated == "context"


def test_r15_a_turn_begins_only_where_a_whole_reply_fits():
    first = run_one(UP, max_turns=1).turns[0].start
    room = {"max_tokens": 50, "max_turns": 1}
    assert len(run_one(UP, max_context=first + 50, **room).turns) == 1
    assert len(run_one(UP, max_context=first + 49, **room).turns) == 0


# -- bookkeeping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, chunks", [(None, [8]), (8, [8]), (4, [3, 3, 2]), (2, [2, 1, 2, 1, 2]), (1, [1] * 8)])
def test_rollout_batch_bounds_what_is_generated_at_a_time(size, chunks):
    seeds = [5, 6, 5, 7, 6, 5, 6, 7]  # groups of 3, 3, 2, interleaved
    rows = []
    model = script(tiny_model(TOKENIZER), play(*[UP] * 3, tokenizer=TOKENIZER))
    inner = model.generate
    model.generate = lambda **kw: (rows.append(len(kw["input_ids"])), inner(**kw))[1]
    options = Sampling(rollout_batch=size, max_turns=1)
    episodes = rollout(model, TOKENIZER, [Ladder() for _ in seeds], seeds, seeds, options, env_name="ladder")
    assert rows == chunks
    assert [e.seed for e in episodes] == seeds == [e.group for e in episodes]
    assert all(f"seed {s}" in e.turns[0].observation for e, s in zip(episodes, seeds))


def test_progress_and_arguments():
    said = []
    model = script(tiny_model(TOKENIZER), play(*[UP] * 3, tokenizer=TOKENIZER))
    rollout(model, TOKENIZER, [Ladder(), Ladder(height=1)], [0, 1], [0, 1], Sampling(), env_name="l", progress=said.append)
    assert said == ["turn 1: 2 episodes", "turn 2: 1 episodes", "turn 3: 1 episodes"]
    with pytest.raises(ValueError, match="lengths 1, 2, 1"):
        rollout(model, TOKENIZER, [Ladder()], [0, 1], [0], Sampling(), env_name="ladder")
    for wrong in (
        {"temperature": -1},
        {"temperature": math.nan},
        {"max_tokens": 0},
        {"rollout_batch": 0},
        {"max_turns": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)
    assert rollout(model, TOKENIZER, [], [], [], Sampling(), env_name="ladder") == []


def test_a_reply_is_cut_where_it_had_not_ended():
    budget = len(encode(TOKENIZER, UP)) + 1
    episode = run_one(UP, "a bit longer " + UP, UP, max_tokens=budget)
    assert [(t.cut, t.end - t.start) for t in episode.turns] == [(False, budget), (True, budget), (False, budget)]


def test_end_ids_of_the_chat_stop_a_turn():
    """The template's end of turn ends a reply also where the tokenizer's end of text is another token."""
    tokenizer = byte_tokenizer(eos="</s>")
    ends = Chat(tokenizer).end_ids
    for end, name in zip(ends, ("<|end|>", "</s>")):
        episode = run_one(UP, UP, UP, tokenizer=tokenizer, end=name)
        assert [episode.ids[t.end - 1] for t in episode.turns] == [end] * 3
        assert all(t.parsed for t in episode.turns)


def test_the_longest_episode_is_one_whose_replies_fill_their_budget():
    tokenizer = byte_tokenizer()
    sampling = Sampling(max_tokens=12, max_turns=3, contain_faults=True)
    reply = play(*["x" * 7 + "</think><answer>up</answer>~"] * 3, tokenizer=tokenizer)
    (episode,) = rollout(script(tiny_model(tokenizer), reply), tokenizer, [Ladder()], [1], [0], sampling, env_name="ladder")
    assert len(episode.turns) == 3 and all(t.actions == ["up"] for t in episode.turns)
    assert longest_episode(tiny_model(tokenizer), tokenizer, Ladder(), sampling) == (len(episode.ids), episode.turns[0].start)
    assert longest_episode(tiny_model(tokenizer, positions=50), tokenizer, Ladder(), sampling)[0] == 50
    sampling.max_context = 40
    assert longest_episode(tiny_model(tokenizer), tokenizer, Ladder(), sampling)[0] == 40

    class Broken(Ladder):
        def reset(self, **_):
            raise RuntimeError("no board")

    assert longest_episode(tiny_model(tokenizer), tokenizer, Broken(), Sampling(max_tokens=12)) == (2048, 0)
