"""What search_qa searches: the invented world, BM25 against its formula, and HotpotQA's files."""

import json
import math
import random
import re
from collections import Counter

import pytest

pytest.importorskip("bm25s")

from nanoragen.envs.base import TRAIN_SEEDS
from nanoragen.envs.retrieval import Index
from nanoragen.envs.search_corpus import PROVINCES, Question, generated
from nanoragen.envs.search_qa import SearchQA

# -- the world ---------------------------------------------------------------------------------------------------------


def test_the_world_says_what_the_questions_ask():
    """Every answer by reading: a reader of patterns follows the question from the inside and finds the answer that is known."""
    library = generated(60, 0)
    pages = dict(t.split(": ", 1) for t in library.texts)
    reads = {
        "author": r"by (.+), fin", "composer": r"by (.+), fin", "painter": r"by (.+), fin", "teacher": r"teacher of .+ was (.+)\.",
        "birthplace": r"born in (\w+)", "province": r"town in (\w+)", "capital": r"The capital of \w+ is (\w+)\.",
    }  # fmt: skip
    last = {
        r"Who was the (\w+) of (.+)\?": None, r"What is the (capital) of (.+)\?": None,
        r"In which (town) was (.+) born\?": r"born in (\w+)", r"In which (year) was (.+) born\?": r"born in \w+ in (\d+)",
        r"In which (province) is (.+)\?": r"town in (\w+)", r"Which (river) runs through (.+)\?": r"on the river (\w+)",
        r"In which (year) was (.+) founded\?": r"founded in (\d+)", r"What (is) (.+) known for\?": r"known for its (\w+)",
    }  # fmt: skip
    for q in library.questions + library.held_out:
        match, pattern = next((m, p) for form, p in last.items() if (m := re.fullmatch(form, q.text)))
        inside = re.fullmatch(r"((?:the \w+ of )*)(.+)", match[2])
        thing = inside[2]
        for relation in re.findall(r"the (\w+) of ", inside[1])[::-1]:
            thing = re.search(reads[relation], pages[thing])[1]
        assert re.search(pattern or reads[match[1]], pages[thing])[1] == q.answers[0], q.text
        assert 2 <= len(q.chain) == len(set(q.chain)) <= 3


def test_the_world_is_consistent():
    library = generated(150, 1)
    assert len(library.titles) == len(set(library.titles)) == len(PROVINCES) + 75 + 150 + 150
    born = {t: int(m[1]) for t, x in zip(library.titles, library.texts) if (m := re.search(r"born in \w+ in (\d+)", x))}
    for title, text in zip(library.titles, library.texts):
        if m := re.search(r"The teacher of .+ was (.+)\.", text):
            assert born[m[1]] <= born[title]
        if m := re.search(r"by (.+), finished in (\d+)", text):
            assert int(m[2]) >= born[m[1]] + 20
    texts = [q.text for q in library.questions + library.held_out]
    assert len(texts) == len(set(texts)) > 2_000


def test_worlds_by_seed():
    again = generated.__wrapped__(40, 0)
    assert again.texts == generated(40, 0).texts and again.questions == generated(40, 0).questions
    assert again.texts != generated(40, 1).texts
    assert SearchQA().library is SearchQA().library  # built once


# -- ranking -----------------------------------------------------------------------------------------------------------


def by_formula(texts, query, k1=1.5, b=0.75):
    """BM25 (Robertson; idf as in Lucene), in float64."""
    docs = [re.findall(r"\w+", t.lower()) for t in texts]
    mean = sum(map(len, docs)) / len(docs)
    scores = []
    for doc in docs:
        tf, total = Counter(doc), 0.0
        for word in re.findall(r"\w+", query.lower()):
            df = sum(word in d for d in docs)
            idf = math.log(1 + (len(docs) - df + 0.5) / (df + 0.5))
            total += idf * tf[word] / (tf[word] + k1 * (1 - b + b * len(doc) / mean))
        scores.append(total)
    return scores


def test_ranking_is_bm25():
    rng = random.Random(3)
    words = [f"w{i}" for i in range(30)]
    texts = [" ".join(rng.choices(words, weights=range(1, 31), k=rng.randrange(3, 40))) for _ in range(120)]
    index = Index(texts)
    for _ in range(60):
        query = " ".join(rng.choices([*words, "unknown"], k=rng.randrange(1, 5)))
        scores = by_formula(texts, query)
        found = index.search(query, 10)
        assert len(found) == min(10, sum(s > 0 for s in scores))
        best = sorted(scores, reverse=True)[: len(found)]
        assert [scores[n] for n in found] == pytest.approx(best, abs=1e-5)


def test_equal_texts_come_in_their_order():
    index = Index(["red sock", "blue"] * 60)
    assert index.search("red sock", 99) == list(range(0, 120, 2)) and index.search("red sock", 2) == [0, 2]
    assert index.search("the of ()", 5) == index.search("unknown", 5) == []


# -- files -------------------------------------------------------------------------------------------------------------

DISTRACTOR = {  # as in HotpotQA's own files
    "_id": "1", "question": "Where was the maker of Dune Song born?", "answer": "Eskford", "type": "bridge", "level": "hard",
    "supporting_facts": [["Dune Song", 0], ["Ada Elm", 0], ["Ada Elm", 1]],
    "context": [["Dune Song", ["Dune Song is an opera", " by Ada."]], ["Ada Elm", ["Born in Eskford."]], ["Drusk", ["A hill."]]],
}  # fmt: skip
HUB = {  # as on the Hugging Face hub
    "question": "Is Drusk a hill?", "answer": "yes",
    "supporting_facts": {"title": ["Drusk"], "sent_id": [0]}, "context": {"title": ["Drusk"], "sentences": [["A hill."]]},
}  # fmt: skip
PLAIN = {"question": "Who made Dune Song?", "golden_answers": ["Ada Elm", "A. Elm"]}


def write(path, rows, lines=True):
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("lines", [False, True])
def test_hotpotqa_with_its_own_passages(tmp_path, lines):
    env = SearchQA(data=write(tmp_path / "q.json", [DISTRACTOR, HUB, PLAIN], lines))
    assert env.library.texts == ["Dune Song: Dune Song is an opera by Ada.", "Ada Elm: Born in Eskford.", "Drusk: A hill."]
    seen = {}
    for seed in range(30):
        env.reset(seed=seed)
        actions = []
        for action in env.demonstrate():
            actions.append(action)
            info = env.step(action)[4]
        seen[env.question.text] = actions
        assert info["success"]
    assert seen == {
        DISTRACTOR["question"]: ["search[Dune Song]", "search[Ada Elm]", "finish[Eskford]"],
        HUB["question"]: ["search[Drusk]", "finish[yes]"],
        PLAIN["question"]: ["finish[Ada Elm]"],
    }  # fmt: skip


def test_a_corpus_of_its_own_and_questions_for_evaluation(tmp_path):
    corpus = [{"id": "0", "contents": '"Dune Song"\nAn opera by Ada Elm.'}, {"title": "Ada Elm", "text": "Born in Eskford."}]
    files = {
        "data": write(tmp_path / "train.jsonl", [DISTRACTOR]),
        "eval_data": write(tmp_path / "dev.json", [PLAIN], lines=False),
        "corpus": write(tmp_path / "corpus.jsonl", corpus),
    }
    env = SearchQA(**files)
    assert env.library.texts == ["Dune Song: An opera by Ada Elm.", "Ada Elm: Born in Eskford."]
    env.reset(seed=TRAIN_SEEDS.start)
    assert env.question == Question(DISTRACTOR["question"], ("Eskford",), (0, 1))
    env.reset(seed=5)
    assert env.question.answers == ("Ada Elm", "A. Elm")
    assert env.step("finish[A Elm]")[1] == 1.0


@pytest.mark.parametrize(
    "rows, says",
    [
        ([], "has no rows"),
        ([{"question": "x"}], "row 1: valid"),
        ([{"question": 3, "answer": "x"}], "row 1: valid"),
        ([{"question": "x", "answer": "The!"}], "row 1: no word is left of the answer"),
        ([{"question": "x", "answer": []}], "row 1: valid"),
        ([{"question": "x", "answer": " "}], "row 1: valid"),
        ([{"question": "x", "answer": 3}], "row 1: valid"),
        ([{**HUB, "context": [3]}], "row 1: its supporting_facts or context"),
        ([{**HUB, "supporting_facts": {"x": 1}}], "row 1: its supporting_facts or context"),
        ([{**HUB, "context": {"title": ["a"], "sentences": [[3]]}}], "row 1: its supporting_facts or context"),
        ([PLAIN], "corpus: none"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, rows, says):
    with pytest.raises(ValueError, match=f"{says}.*") as error:
        SearchQA(data=write(tmp_path / "q.json", rows))
    assert "\n" not in str(error.value) and "valid: " in str(error.value)


def test_rows_that_cannot_be_used_are_skipped(tmp_path, capsys):
    rows = [{"question": 3, "answer": "x"}, HUB, {"question": "x", "answer": "a"}]
    corpus = [{"title": "x"}, {"title": "A", "text": "B"}]
    env = SearchQA(data=write(tmp_path / "q.json", rows), corpus=write(tmp_path / "c.json", corpus))
    assert [q.text for q in env.questions] == [HUB["question"]] and env.library.texts == ["A: B"]
    first, second = capsys.readouterr().err.splitlines()
    assert "q.json: 2 of 3 rows" in first and "c.json: 1 of 2 rows" in second


def test_files_that_changed_are_read_again(tmp_path):
    data, corpus = write(tmp_path / "q.json", [HUB]), write(tmp_path / "c.json", [{"title": "A", "text": "B"}])
    assert SearchQA(data=data, corpus=corpus).library.texts == ["A: B"]
    write(tmp_path / "c.json", [{"title": "A", "text": "longer"}])
    assert SearchQA(data=data, corpus=corpus).library.texts == ["A: longer"]
    write(tmp_path / "q.json", [HUB, DISTRACTOR])
    assert len(SearchQA(data=data, corpus=corpus).questions) == 2


def test_a_corpus_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="row 1: valid: .*title"):
        SearchQA(data=write(tmp_path / "q.json", [HUB]), corpus=write(tmp_path / "c.jsonl", [{"title": "x"}]))


def test_hops_that_no_question_has(tmp_path):
    with pytest.raises(ValueError, match="^hops: .*valid: "):
        SearchQA(hops=3, data=write(tmp_path / "q.json", [HUB]))
