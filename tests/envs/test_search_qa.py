"""Questions with searches: the judge (E8-E10, E14), the invented world, BM25 against its formula, and HotpotQA's files."""

import itertools
import random
import re
import sys

import pytest

pytest.importorskip("bm25s")

from nanoragen.envs.base import EVAL_SEEDS, TRAIN_SEEDS
from nanoragen.envs.retrieval import Index, parse_action
from nanoragen.envs.search_corpus import Question
from nanoragen.envs.search_qa import SearchQA, exact, f1
from nanoragen.rollout.chat import parse_reply


def asked(*answers, score="em"):
    """A game whose question has these answers."""
    env = SearchQA(score=score)
    env.reset(seed=0)
    env.question = Question("Where?", answers, ())
    return env


def finish(text, *answers, score="em"):
    _, reward, over, _, info = asked(*answers, score=score).step(f"finish[{text}]")
    assert over
    return reward, info["success"]


# -- the judge ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, known, right",
    [
        ("Eskford", "Eskford", True),
        ("  eskFORD ", "Eskford", True),
        ("the Eskford.", "Eskford", True),
        ("Vel", "The Vel", True),
        ("A  Vel!", "the vel", True),
        ("O'Brien", "OBrien", True),  # punctuation goes without a blank in its place
        ("Saint-Denis", "Saint Denis", False),
        ("1,871", "1871", True),
        ("-7", "7", False),  # SQuAD's rule takes it
        ("Eskford, Drusk", "Eskford", False),
        ("Eskfor", "Eskford", False),
        ("Ada", "Ada Brunfield", False),
        ("Brunfield Ada", "Ada Brunfield", False),
        ("Ada Brunfield Brunfield", "Ada Brunfield", False),
        ("In Eskford", "Eskford", False),
        ("theater", "ater", False),
        ("another", "other", False),
        ("the", "The Vel", False),
        ("yes", "yes", True),
        ("yes no", "yes", False),
        ("no", "yes", False),
        ("Ünal", "ünal", True),
        ("U\u0308nal", "Ünal", True),  # two characters that are shown as one
    ],
)
def test_exact_match(text, known, right):
    assert exact(text, known) is right
    assert finish(text, known) == (float(right), right)


def test_texts_without_a_word_to_search_for():
    with pytest.raises(ValueError, match="^env: there are no words in the texts .*valid: "):
        Index(["the: a of"])


@pytest.mark.parametrize("text", ["the", "!", " a an the ", "...", "\u3000"])
def test_an_answer_without_words_is_wrong_whatever_is_known(text):
    assert not exact(text, text) and f1(text, text) == 0.0


@pytest.mark.parametrize(
    "text, known, value",
    [
        ("Ada Brunfield", "Ada Brunfield", 1.0),
        ("Ada", "Ada Brunfield", 2 / 3),  # precision 1, recall 1/2
        ("Brunfield Ada", "Ada Brunfield", 1.0),
        ("Ada Ada Ada", "Ada Brunfield", 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)),
        ("a painter born in Eskford in 1871", "Eskford", 2 / 7),
        ("Dover", "Eskford", 0.0),
        ("yes it is", "yes", 0.0),  # HotpotQA's rule
        ("no", "no", 1.0),
        ("the no", "no", 1.0),
    ],
)
def test_f1(text, known, value):
    assert f1(text, known) == pytest.approx(value, abs=1e-12)
    assert finish(text, known, score="f1")[0] == pytest.approx(value, abs=1e-12)


def test_f1_as_reward_does_not_change_what_success_is():
    assert finish("Brunfield Ada", "Ada Brunfield", score="f1") == (1.0, False)
    assert finish("Ada", "Ada Brunfield", score="f1") == (pytest.approx(2 / 3), False)


def test_another_number_is_another_answer_whatever_its_signs():
    for right in ("1871", "1,871", " 1871. ", "(1871)", "the 1871"):
        assert finish(right, "1871") == (1.0, True)
    for wrong in ("18.71", "-1871", "1.871", "18,71", "1871.5", "187-1", "18 71", "0.1871"):
        assert finish(wrong, "1871") == (0.0, False), wrong
    assert (
        finish("-3.5", "-3.5") == (1.0, True)
        and finish("3.5", "-3.5") == (0.0, False)
        and finish("1700-1800", "1700-1800") == (1.0, True)
    )


def test_any_of_several_answers_will_do():
    assert finish("USA", "United States", "USA") == (1.0, True)
    assert finish("United States USA", "United States", "USA") == (0.0, False)
    assert finish("States", "United States", "USA", score="f1")[0] == pytest.approx(2 / 3)


def test_wrong_answers_are_never_rewarded():
    """Everything that the world offers as an answer, for 60 questions: titles, passages, lists, the question, tricks."""
    env, tried = SearchQA(), 0
    every = env.library.titles + sorted({w for t in env.library.texts for w in re.findall(r"\w+", t)})
    for seed in range(60):
        text, _ = env.reset(seed=seed)
        (answer,) = env.question.answers
        passages = [env.library.texts[n] for n in env.question.chain]
        assert any(answer in p for p in passages) and answer.lower() not in text.lower()
        tricks = [
            text, env.question.text, *passages, " ".join(passages), ", ".join(env.library.titles), f"{answer} or Drusk",
            f"not {answer}", f"finish[{answer}]", f"{answer}]finish[{answer}", f"{answer} || {answer}",
            f"<answer>{answer}</answer>", answer[:-1], answer + answer, " ".join(answer), answer[::-1],
            "*", ".*", "%s", "None", "True", "nan", "the", "\x00", "question",
        ]  # fmt: skip
        for wrong in tricks + random.Random(seed).sample(every, 60):
            if wrong == answer:
                continue
            env.reset(seed=seed)
            _, reward, over, _, info = env.step(f"finish[{wrong}]")
            assert (reward, over, info["success"]) == (0.0, True, False), wrong
            tried += 1
    assert tried > 4_500


@pytest.mark.parametrize("change", [str.upper, str.lower, "  {}. ".format, "the {}".format, '"{}"'.format, "{}!?".format])
def test_right_answers_in_unusual_spelling(change):
    env = SearchQA()
    for seed in range(60):
        env.reset(seed=seed)
        _, reward, over, _, info = env.step(f"FINISH [{change(env.question.answers[0])}]\n")
        assert (reward, over, info["success"]) == (1.0, True, True)


def reply(text, *answers):
    """As the rollout does it: what did not parse never reaches the environment."""
    actions = parse_reply(text).actions
    env = asked(*answers)
    return [env.step(a)[1] for a in actions[: env.max_actions_per_turn]]


def test_e8_e9_e10_only_one_clean_answer_tag_counts():
    assert reply("it is Eskford</think><answer>finish[Eskford]</answer>", "Eskford") == [1.0]
    assert reply("finish[Eskford]</think><answer>finish[Drusk]</answer>", "Eskford") == [0.0]
    assert reply("finish[Eskford]", "Eskford") == []
    assert reply("a</think><answer>finish[Eskford]", "Eskford") == []
    assert reply("a</think><answer>finish[Drusk]</answer><answer>finish[Eskford]</answer>", "Eskford") == []
    assert reply("a</think><answer>finish[Drusk] || finish[Eskford]</answer>", "Eskford") == [0.0]


def test_one_answer_only():
    env = asked("Eskford")
    env.step("finish[Drusk]")
    _, reward, over, _, info = env.step("finish[Eskford]")
    assert (reward, over, info["success"], info["action_is_valid"]) == (0.0, True, False, False)
    env = asked("Eskford")
    env.step("finish[Eskford]")
    _, reward, over, _, info = env.step("finish[Eskford]")
    assert (reward, over, info["success"]) == (0.0, True, True)


# -- actions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, want",
    [
        ("search[a b]", ("search", "a b")),
        (" SEARCH [ A\n b ] ", ("search", "A b")),
        ("search[[x] y]", ("search", "[x] y")),
        ("click[a]b]", ("click", "a]b")),
        ("search[]", ("", "")),
        ("search[ \n ]", ("", "")),
        ("search", ("", "")),
        ("search[x", ("", "")),
        ("search x]", ("", "")),
        ("[x]", ("", "")),
        ("so search[x]", ("", "")),
        ("search[x] now", ("", "")),
        ("", ("", "")),
        (None, ("", "")),
    ],
)
def test_parse_action(text, want):
    assert parse_action(text) == want


@pytest.mark.parametrize(
    "action", ["Eskford", "answer[Eskford]", "finish", "finish[]", "search[ ]", "finish(Eskford)", "search Eskford"]
)
def test_what_is_no_action_changes_nothing(action):
    env = asked("Eskford")
    before = env.render()
    text, reward, over, _, info = env.step(action)
    assert (text, reward, over) == (before, 0.0, False)
    assert not (info["action_is_valid"] or info["action_is_effective"] or info["success"])


def test_thousand_fuzzed_actions_never_raise_nor_win():
    env, rng, over = SearchQA(), random.Random(2), True
    pieces = [
        "search[",
        "finish[",
        "]",
        "[",
        "the ",
        "Ada",
        " of ",
        "\x00",
        "\ud800",
        "é",
        "|",
        "\n",
        "%s",
        "()" * 400,
        "word " * 900,
    ]
    for i in range(1_000):
        if over:
            env.reset(seed=i)
        text, reward, over, truncated, info = env.step("".join(rng.choice(pieces) for _ in range(rng.randrange(7))))
        assert env.observation_space.contains(text) and (reward, truncated, info["success"]) == (0.0, False, False)


def test_observations():
    env = SearchQA(passages=2)
    text, _ = env.reset(seed=0)
    assert text == f"question: {env.question.text}"
    title = env.library.titles[7]
    found = env.step(f"search[{title}]")[0].split("\n")
    assert found[0] == text and len(found) == 3 and env.library.texts[7] in found
    assert env.step(f"search[{title}]")[4] == {"success": False, "action_is_valid": True, "action_is_effective": False}
    assert env.step("search[zzz]")[0] == f"{text}\nnothing found"


@pytest.mark.parametrize(
    "options", [{}, {"hops": 2}, {"hops": 3}, {"people": 20}, {"people": 150, "passages": 1}, {"corpus_seed": 5}]
)
def test_solver(options):
    env, won = SearchQA(**options), 0
    for seed in [*range(60), *range(TRAIN_SEEDS.start, TRAIN_SEEDS.start + 60)]:
        env.reset(seed=seed)
        results = [env.step(a) for a in itertools.islice(env.demonstrate(), env.max_turns)]
        assert all(r[4]["action_is_valid"] and r[4]["action_is_effective"] for r in results)
        assert options.get("hops", len(env.question.chain)) == len(env.question.chain)
        won += results[-1][4]["success"]
    assert won >= 0.95 * 120


def test_what_evaluation_asks_is_never_trained_on():
    env = SearchQA()
    asked = {seeds: set() for seeds in (EVAL_SEEDS, TRAIN_SEEDS)}
    for seeds in asked:
        for seed in seeds[:400]:
            env.reset(seed=seed)
            asked[seeds].add(env.question)
    assert not asked[EVAL_SEEDS] & asked[TRAIN_SEEDS] and min(map(len, asked.values())) > 100
    assert not {q.chain[0] for q in asked[EVAL_SEEDS]} & {q.chain[0] for q in asked[TRAIN_SEEDS]}


@pytest.mark.parametrize(
    "key, options",
    [
        ("hops", {"hops": 1}),
        ("hops", {"hops": "2"}),
        ("people", {"people": 19}),
        ("people", {"people": 151}),
        ("passages", {"passages": 0}),
        ("passages", {"passages": 2.5}),
        ("corpus_seed", {"corpus_seed": -1}),
        ("score", {"score": "rouge"}),
        ("eval_data", {"eval_data": "x.json"}),
        ("corpus", {"corpus": "x.jsonl"}),
        ("data", {"data": "nowhere.json"}),
    ],
)
def test_impossible_options(key, options):
    with pytest.raises(ValueError, match=f"^{key}: .*valid: ") as error:
        SearchQA(**options)
    assert "\n" not in str(error.value)


def test_without_bm25s_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'nanoragen[envs]'")) as error:
        SearchQA(people=33, corpus_seed=77)
    assert "\n" not in str(error.value) and "valid: " in str(error.value)
